"""The worker's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = ("transformers", "fake")
DTYPES = ("bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
SWITCH = ("on", "off")


@dataclass(frozen=True)
class WorkerConfig:
    """Everything a worker can be told. Raises ValueError, naming the field, for what cannot work."""

    model: str = field(default="", metadata={"help": "folder (or hub id) of the target model"})
    scheduler: str = field(default="127.0.0.1:50052", metadata={"help": "HOST:PORT of the scheduler to attach to"})
    worker_id: str = field(default="", metadata={"help": "this worker's name; made at start when empty"})
    served_model_name: str = field(default="", metadata={"help": "name clients use; the folder's name when empty"})
    engine: str = field(default="transformers", metadata={"help": "transformers (real weights) or fake (none)"})
    dtype: str = field(default="bfloat16", metadata={"help": "bfloat16 or float32"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    kv_cache_gib: float = field(default=0.0, metadata={"help": "KV memory in GiB; 0: sized from what is free"})
    num_blocks: int = field(default=0, metadata={"help": "KV blocks, instead of kv_cache_gib; 0: not set"})
    block_size: int = field(default=16, metadata={"help": "tokens per KV block"})
    max_sequences: int = field(default=256, metadata={"help": "slots for sequences"})
    max_model_len: int = field(default=0, metadata={"help": "most tokens of prompt and output; 0: the model's own"})
    threads: int = field(default=0, metadata={"help": "CPU threads for the model; 0: one per core"})
    host: str = field(default="127.0.0.1", metadata={"help": "address of the health service"})
    port: int = field(default=-1, metadata={"help": "port of the health service; 0: any free one, -1: none"})
    draft: str = field(default="on", metadata={"help": "on: use draft workers; off: never"})
    hung_step_s: float = field(default=30.0, metadata={"help": "a step longer than this counts as hung"})
    drain_timeout_s: float = field(default=60.0, metadata={"help": "longest wait for the scheduler when told to stop"})
    fake_step_ms: float = field(default=0.0, metadata={"help": "fake engine: time of one step"})
    fake_token_us: float = field(default=0.0, metadata={"help": "fake engine: time of one token in a step"})

    def __post_init__(self) -> None:
        for name, allowed in (("engine", ENGINES), ("dtype", DTYPES), ("device", DEVICES), ("draft", SWITCH)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not self.model:
            raise ValueError("model: the folder of the target model is missing")
        for name in ("block_size", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        for name in ("kv_cache_gib", "num_blocks", "max_model_len", "threads", "fake_step_ms", "fake_token_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
