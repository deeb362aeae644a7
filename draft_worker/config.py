"""The draft worker's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafting.config import ProposerConfig, setting


@dataclass(frozen=True, kw_only=True)
class DraftWorkerConfig(ProposerConfig):
    """Guesses for workers how their sequences go on, with a small model or an n-gram index."""

    target: str = field(metadata={"help": "served name of the target model", "metavar": "NAME"})
    draft: str = setting(
        "ngram",
        "folder or hub id of a small model, folder of a distilled draft, ngram or fake",
        metavar="FOLDER|ngram|fake",
    )
    target_model: str = setting("", "folder of the target model, whose vocabulary is compared", metavar="FOLDER")
    scheduler: str = setting(
        "",
        "the scheduler to announce to; of several, comma-separated, the leader is found and followed (default "
        "127.0.0.1:50052, unless --state is a URL)",
        metavar="HOST:PORT",
    )
    state: str = setting(
        "memory", "where schedulers are found: memory (nowhere) or redis://HOST:PORT/DB", metavar="memory|URL"
    )
    cluster: str = setting("tandem", "the cluster's name within that state")
    cell: str = setting("", "the cell to draft in; empty: the only one there is")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port to listen on; 0: any free one", min=0, max=65535)
    advertise: str = setting("", "HOST:PORT that workers dial, where it differs from the one listened on")
    worker_id: str = setting("", "this draft worker's name; made at start when empty")
    dtype: str = setting("bfloat16", "number format of weights and KV", choices=("bfloat16", "float32"))
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    kv_cache_gib: float = setting(0.5, "KV memory of the mirrors", min=0.001)
    max_draft_tokens: int = setting(8, "longest draft that is looked for at once", min=0, max=64)
    branches: int = setting(
        2, "most other continuations that the model guesses of each sequence while its worker is busy", min=0, max=7
    )
    max_mirrors: int = setting(512, "most sequences followed at once, of all workers together", min=1)
    threads: int = setting(0, "CPU threads of the model; 0: one per core", min=0)
    metrics_port: int = setting(-1, "port of /metrics; 0: any free one, -1: none", min=-1, max=65535)
    fake_step_ms: float = setting(0.0, "fake engine: time of one step", min=0.0)
    fake_disagreement: float = setting(0.2, "fake engine: share of contexts it guesses wrong", min=0.0, max=1.0)

    def schedulers(self) -> tuple[str, ...]:
        """The addresses of schedulers that are known from the start."""
        given = self.scheduler or ("127.0.0.1:50052" if self.state == "memory" else "")
        return tuple(address.strip() for address in given.split(",") if address.strip())

    def validate(self) -> None:
        """Raise ValueError for what no single field shows."""
        self.require_model(self.draft, "--draft")
        if self.state != "memory" and not self.state.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--state is memory or a Redis URL such as redis://127.0.0.1:6379/0, not {self.state!r}")
