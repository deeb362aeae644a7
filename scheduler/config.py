"""The scheduler's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulerConfig:
    """Everything a scheduler can be told."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=50052, metadata={"help": "port to listen on; 0: any free one", "min": 0, "max": 65535})
    advertise: str = field(
        default="",
        metadata={
            "help": "HOST:PORT that others dial, where it differs from the one listened on",
            "metavar": "HOST:PORT",
        },
    )
    state: str = field(
        default="memory",
        metadata={
            "help": "where schedulers agree on who leads: memory (there is only this one) or redis://HOST:PORT/DB",
            "metavar": "memory|URL",
        },
    )
    cluster: str = field(default="tandem", metadata={"help": "the cluster's name within that state"})
    cell: str = field(default="main", metadata={"help": "the cell that this scheduler leads or stands by for"})
    lease_ttl_s: float = field(
        default=1.5, metadata={"help": "a leader silent towards the shared state for so long is replaced", "min": 0.1}
    )
    metrics_port: int = field(default=-1, metadata={"help": "port of /metrics; 0: any free one, -1: none", "min": -1})
    max_waiting: int = field(default=1024, metadata={"help": "most choices in the queue", "min": 1})
    token_budget: int = field(default=512, metadata={"help": "most tokens one step may process", "min": 1})
    speculation: str = field(
        default="auto",
        metadata={
            "help": "draft budgets: auto (what pays, as measured), fixed (the largest) or off",
            "choices": ("auto", "fixed", "off"),
        },
    )
    max_draft_tokens: int = field(default=7, metadata={"help": "largest draft budget of a row; 0: never", "min": 0})
    draft_token_budget: int = field(
        default=64, metadata={"help": "most tokens of a step's decode rows with drafts; fewer drafts at load", "min": 1}
    )
    capacity_wait_s: float = field(
        default=60.0, metadata={"help": "how long requests without a deadline wait for a worker", "min": 0.0}
    )
    heartbeat_timeout_s: float = field(
        default=3.0, metadata={"help": "a worker silent for so long is frozen", "min": 0.1}
    )
    hung_step_s: float = field(default=30.0, metadata={"help": "a step longer than this may be hung", "min": 1.0})
    session_grace_s: float = field(
        default=10.0, metadata={"help": "how long a lost gateway's requests are kept for it", "min": 0.0}
    )
    drain_timeout_s: float = field(default=60.0, metadata={"help": "longest wait for live requests on SIGTERM"})

    def validate(self) -> None:
        """Raise ValueError for what no single field shows."""
        if self.state != "memory" and not self.state.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--state is memory or a Redis URL such as redis://127.0.0.1:6379/0, not {self.state!r}")
        for name in ("cluster", "cell", "advertise"):
            value = getattr(self, name)
            if any(character.isspace() or character in "{}/" for character in value) or not (
                value or name == "advertise"
            ):
                raise ValueError(f"--{name} is a name without spaces, slashes and braces, not {value!r}")
