"""The worker's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafting.config import ProposerConfig


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ProposerConfig):
    """Runs the target model: attaches to the scheduler and executes the steps that it plans."""

    model: str = field(metadata={"help": "folder or hub id of the target model", "metavar": "FOLDER"})
    scheduler: str = _setting(
        "",
        "the scheduler to attach to; of several, comma-separated, the leader is found and followed (default "
        "127.0.0.1:50052, unless --state is a URL)",
        metavar="HOST:PORT",
    )
    state: str = _setting(
        "memory", "where schedulers are found: memory (nowhere) or redis://HOST:PORT/DB", metavar="memory|URL"
    )
    cluster: str = _setting("tandem", "the cluster's name within that state")
    cell: str = _setting("", "the cell to work in; empty: the only one there is")
    worker_id: str = _setting("", "this worker's name; made at start when empty")
    served_model_name: str = _setting("", "the name that clients use; the folder's when empty")
    engine: str = _setting("transformers", "real weights, or none", choices=("transformers", "fake"))
    dtype: str = _setting("bfloat16", "number format of weights and KV", choices=("bfloat16", "float32"))
    device: str = _setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    route: str = _setting(
        "auto",
        "who runs the model: our own decoder, transformers' code, or the decoder where it knows the family",
        choices=("auto", "decoder", "transformers"),
    )
    kernels: str = _setting(
        "auto",
        "CPU instructions of the decoder's operations; auto: the best there are; torch: without C++",
        choices=("auto", "avx512bf16", "avx512", "avx2", "torch"),
    )
    numerics: str = _setting(
        "exact",
        "exact: equal bits in every batch; fast: on a GPU, library products whose bits depend on the batch",
        choices=("exact", "fast"),
    )
    run_ahead: str = _setting(
        "auto",
        "whether steps are launched before the tokens of the one before are known; auto: on a GPU; on a CPU there is "
        "nothing to gain",
        choices=("auto", "on", "off"),
    )
    kv_cache_gib: float = _setting(0.0, "KV memory; 0: sized from what is free", min=0.0)
    num_blocks: int = _setting(0, "KV blocks, instead of kv_cache_gib; 0: not set", min=0)
    block_size: int = _setting(16, "tokens per KV block", min=1)
    max_sequences: int = _setting(256, "slots for sequences", min=1)
    max_model_len: int = _setting(0, "most tokens of prompt and output together; 0: the model's own", min=0)
    threads: int = _setting(0, "CPU threads of the model; 0: one per core", min=0)
    host: str = _setting("127.0.0.1", "address of the health service")
    port: int = _setting(-1, "port of the health service; 0: any free one, -1: none", min=-1, max=65535)
    draft: str = _setting(
        "on",
        "who guesses: draft workers (on), nobody (off), or this worker itself, between its steps, with --draft-model "
        "(own): best where the draft model would compute on the target's cores",
        choices=("on", "off", "own"),
    )
    draft_model: str = _setting(
        "ngram",
        "with --draft own: folder or hub id of a small model, folder of a distilled draft, ngram or fake",
        metavar="FOLDER|ngram|fake",
    )
    draft_kv_cache_gib: float = _setting(0.5, "with --draft own: KV memory of the draft model", min=0.001)
    draft_stall_s: float = _setting(
        2.0, "with --draft on: longest silence of a draft worker that is waited for", min=0.05
    )
    profile_s: float = _setting(
        1.0, "longest that step times are measured at start, for draft budgets; 0: not at all", min=0.0
    )
    hung_step_s: float = _setting(30.0, "a step longer than this counts as hung", min=0.1)
    drain_timeout_s: float = _setting(60.0, "longest wait to be relieved when told to stop", min=0.0)
    fake_step_ms: float = _setting(0.0, "fake engine: time of one step", min=0.0)
    fake_token_us: float = _setting(0.0, "fake engine: time of one token of a step", min=0.0)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def schedulers(self) -> tuple[str, ...]:
        """The addresses of schedulers that are known from the start."""
        given = self.scheduler or ("127.0.0.1:50052" if self.state == "memory" else "")
        return tuple(address.strip() for address in given.split(",") if address.strip())

    def validate(self) -> None:
        """Raise ValueError for what no single field shows."""
        if self.draft == "own":
            self._validate_draft()
        if self.state != "memory" and not self.state.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--state is memory or a Redis URL such as redis://127.0.0.1:6379/0, not {self.state!r}")
        if "=" in self.model_name:
            raise ValueError(
                f"a served name has no '=', unlike {self.model_name!r}, since gateways are given NAME=FOLDER: "
                "say another one with --served-model-name"
            )

    def _validate_draft(self) -> None:
        if not self.draft_model:
            raise ValueError("--draft-model is empty: say a folder, ngram or fake")
        if self.draft_model == "ngram" and self.proposer in ("model", "combined"):
            raise ValueError(f"--proposer {self.proposer} needs a model: --draft-model FOLDER")
        if self.engine == "fake" and self.draft_model not in ("ngram", "fake"):
            raise ValueError(
                f"the fake engine is drafted for by fake or ngram, not by --draft-model {self.draft_model}"
            )
