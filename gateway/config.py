"""The gateway's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway faces clients: it turns text into tokens and back, and keeps every request alive."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=50051, metadata={"help": "port to listen on; 0: any free one", "min": 0, "max": 65535})
    scheduler: str = field(
        default="127.0.0.1:50052",
        metadata={
            "help": "the scheduler; several candidates are tried in turn, comma-separated",
            "metavar": "HOST:PORT",
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
        """The schedulers' addresses."""
        return tuple(address.strip() for address in self.scheduler.split(",") if address.strip())

    def validate(self) -> None:
        """Raise ValueError for what no single field shows."""
        if not self.models():
            raise ValueError("--model NAME=FOLDER is needed at least once")
        if not self.schedulers():
            raise ValueError("--scheduler HOST:PORT is needed")
