"""The gateway's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway faces clients: it turns text into tokens and back, and keeps every request alive."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=50051, metadata={"help": "port to listen on; 0: any free one", "min": 0, "max": 65535})
    scheduler: str = field(
        default="",
        metadata={
            "help": "the scheduler; of several, comma-separated, the leader is found and followed (default "
            "127.0.0.1:50052, unless --state is a URL)",
            "metavar": "HOST:PORT",
        },
    )
    state: str = field(
        default="memory",
        metadata={
            "help": "where schedulers are found: memory (nowhere) or redis://HOST:PORT/DB",
            "metavar": "memory|URL",
        },
    )
    cluster: str = field(default="tandem", metadata={"help": "the cluster's name within that state"})
    cell: str = field(
        default="",
        metadata={
            "help": "the only cell that requests go to; empty: all that --state finds, or the one of --scheduler"
        },
    )
    model: tuple[str, ...] = field(
        default=(), metadata={"help": "a served model and the folder with its tokenizer", "metavar": "NAME=FOLDER"}
    )
    metrics_port: int = field(
        default=-1, metadata={"help": "port of /metrics; 0: any free one, -1: none", "min": -1, "max": 65535}
    )
    max_message_mib: float = field(default=64, metadata={"help": "most MiB of one request", "min": 0.001})
    max_prompt_mib: float = field(default=8, metadata={"help": "most MiB of text in one prompt", "min": 0.001})
    max_concurrent_requests: int = field(default=4096, metadata={"help": "most live requests", "min": 1})
    drain_timeout_s: float = field(
        default=600, metadata={"help": "seconds that live requests get to finish after SIGTERM", "min": 0}
    )
    scheduler_wait_s: float = field(
        default=5, metadata={"help": "seconds that a new request waits for a scheduler that is away", "min": 0}
    )
    cell_loss_s: float = field(
        default=5, metadata={"help": "seconds after which a lost cell's live requests go to other cells", "min": 0}
    )
    scheduler_loss_s: float = field(
        default=60, metadata={"help": "seconds without any scheduler after which live requests end", "min": 0}
    )

    def models(self) -> dict[str, str]:
        """Folder of each served name, in the order given. Raises ValueError."""
        folders: dict[str, str] = {}
        for entry in self.model:
            name, equals, folder = entry.partition("=")
            if not equals or not name or not folder:
                raise ValueError(f"--model takes NAME=FOLDER, not {entry!r}")
            if name in folders:
                raise ValueError(f"--model {name} is given twice")
            folders[name] = folder
        return folders

    def schedulers(self) -> tuple[str, ...]:
        """The addresses of schedulers that are known from the start."""
        given = self.scheduler or ("127.0.0.1:50052" if self.state == "memory" else "")
        return tuple(address.strip() for address in given.split(",") if address.strip())

    @property
    def finds_cells(self) -> bool:
        """Whether requests go to every cell of the cluster."""
        return self.state != "memory" and not self.scheduler and not self.cell

    def validate(self) -> None:
        """Raise ValueError for what no single field shows."""
        if self.state != "memory" and not self.state.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--state is memory or a Redis URL such as redis://127.0.0.1:6379/0, not {self.state!r}")
        if not self.models():
            raise ValueError("--model NAME=FOLDER is needed at least once")
        if not self.schedulers() and self.state == "memory":
            raise ValueError("--scheduler HOST:PORT is needed")
