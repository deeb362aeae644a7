"""The worker's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafting.config import ProposerConfig, setting


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ProposerConfig):
    """Runs the target model: attaches to the scheduler and executes the steps that it plans."""

    model: str = field(metadata={"help": "folder or hub id of the target model", "metavar": "FOLDER"})
    scheduler: str = setting(
        "",
        "the scheduler to attach to; of several, comma-separated, the leader is found and followed (default "
        "127.0.0.1:50052, unless --state is a URL)",
        metavar="HOST:PORT",
    )
    state: str = setting(
        "memory", "where schedulers are found: memory (nowhere) or redis://HOST:PORT/DB", metavar="memory|URL"
    )
    cluster: str = setting("tandem", "the cluster's name within that state")
    cell: str = setting("", "the cell to work in; empty: the only one there is")
    worker_id: str = setting("", "this worker's name; made at start when empty")
    served_model_name: str = setting("", "the name that clients use; the folder's when empty")
    engine: str = setting("transformers", "real weights, or none", choices=("transformers", "fake"))
    dtype: str = setting("bfloat16", "number format of weights and KV", choices=("bfloat16", "float32"))
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    route: str = setting(
        "auto",
        "who runs the model: our own decoder, transformers' code, or the decoder where it knows the family",
        choices=("auto", "decoder", "transformers"),
    )
    kernels: str = setting(
        "auto",
        "CPU instructions of the decoder's operations; auto: the best there are; torch: without C++",
        choices=("auto", "avx512bf16", "avx512", "avx2", "torch"),
    )
    numerics: str = setting(
        "exact",
        "exact: equal bits in every batch; fast: on a GPU, library products whose bits depend on the batch",
        choices=("exact", "fast"),
    )
    run_ahead: str = setting(
        "auto",
        "whether steps are launched before the tokens of the one before are known; auto: on a GPU; on a CPU there is "
        "nothing to gain",
        choices=("auto", "on", "off"),
    )
    kv_cache_gib: float = setting(0.0, "KV memory; 0: sized from what is free", min=0.0)
    num_blocks: int = setting(0, "KV blocks, instead of kv_cache_gib; 0: not set", min=0)
    block_size: int = setting(16, "tokens per KV block", min=1)
    max_sequences: int = setting(256, "slots for sequences", min=1)
    max_model_len: int = setting(0, "most tokens of prompt and output together; 0: the model's own", min=0)
    threads: int = setting(0, "CPU threads of the model; 0: one per core", min=0)
    host: str = setting("127.0.0.1", "address of the health service")
    port: int = setting(-1, "port of the health service; 0: any free one, -1: none", min=-1, max=65535)
    draft: str = setting(
        "on",
        "who guesses: draft workers (on), nobody (off), or this worker itself, between its steps, with --draft-model "
        "(own): best where the draft model would compute on the target's cores",
        choices=("on", "off", "own"),
    )
    draft_model: str = setting(
        "ngram",
        "with --draft own: folder or hub id of a small model, folder of a distilled draft, ngram or fake",
        metavar="FOLDER|ngram|fake",
    )
    draft_kv_cache_gib: float = setting(0.5, "with --draft own: KV memory of the draft model", min=0.001)
    draft_stall_s: float = setting(
        2.0, "with --draft on: longest silence of a draft worker that is waited for", min=0.05
    )
    profile_s: float = setting(
        1.0, "longest that step times are measured at start, for draft budgets; 0: not at all", min=0.0
    )
    hung_step_s: float = setting(30.0, "a step longer than this counts as hung", min=0.1)
    drain_timeout_s: float = setting(60.0, "longest wait to be relieved when told to stop", min=0.0)
    fake_step_ms: float = setting(0.0, "fake engine: time of one step", min=0.0)
    fake_token_us: float = setting(0.0, "fake engine: time of one token of a step", min=0.0)

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
        self.require_model(self.draft_model, "--draft-model")
        if self.engine == "fake" and self.draft_model not in ("ngram", "fake"):
            raise ValueError(
                f"the fake engine is drafted for by fake or ngram, not by --draft-model {self.draft_model}"
            )
