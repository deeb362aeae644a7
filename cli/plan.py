"""Which processes make up a local cluster, and with which flags. Pure.

scheduler ◀── gateway            one each; with a shared state, standbys scheduler-1 … of the scheduler
    ▲─── worker-0 … worker-N-1   the cores are split among them
    └─── draft                   one thread, unless workers guess for themselves, or nobody does
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Flag = tuple[str, str]
Settings = list[tuple[str, str | int | float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `tandem up` was asked for; None: the service's own default."""

    model: str
    """a folder"""
    served_model_name: str
    num_workers: int
    draft: str
    """a folder, or ngram, none, fake"""
    own_drafts: bool = False
    """workers guess for themselves; else a draft worker does"""
    engine: str
    num_cores: int
    host: str = "127.0.0.1"
    port: int = 50051
    scheduler_port: int = 50052
    metrics_port: int = -1
    num_schedulers: int = 1
    state: str | None = None
    device: str | None = None
    dtype: str | None = None
    kv_cache_gib: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_sequences: int | None = None
    max_model_len: int | None = None
    speculation: str | None = None
    max_draft_tokens: int | None = None
    proposer: str | None = None
    draft_vocabulary: str | None = None
    token_budget: int | None = None
    max_waiting: int | None = None
    max_concurrent_requests: int | None = None
    max_message_mib: float | None = None
    drain_timeout_s: float | None = None
    fake_step_ms: float | None = None
    fake_token_us: float | None = None

    @property
    def worker_threads(self) -> int:
        """CPU threads of one worker's model."""
        return max(1, self.num_cores // self.num_workers)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `python -m service flag…`."""

    name: str
    service: str
    flags: tuple[Flag, ...]
    env: tuple[tuple[str, str], ...] = ()
    """variables where the user's own environment doesn't set them"""

    def with_flag(self, name: str, value: str) -> ChildSpec:
        """The same process with one flag replaced."""
        return replace(self, flags=(*(flag for flag in self.flags if flag[0] != name), (name, value)))

    def arguments(self) -> list[str]:
        """What follows the Python interpreter on the command line. -P: the current folder can't shadow a package."""
        return ["-P", "-m", self.service, *(f"--{name}={value}" for name, value in self.flags)]


def scheduler_specs(options: ClusterOptions) -> list[ChildSpec]:
    """The scheduler and its standbys, at ports one after the other; the port may be 0."""
    return [_scheduler_spec(options, index) for index in range(options.num_schedulers)]


def _scheduler_spec(options: ClusterOptions, index: int) -> ChildSpec:
    flags: Settings = [
        ("host", options.host),
        ("port", options.scheduler_port + index if options.scheduler_port else 0),
        ("metrics-port", _later_port(options.metrics_port, 1 + index)),
        ("state", options.state),
        ("max-waiting", options.max_waiting),
        ("token-budget", options.token_budget),
        ("speculation", options.speculation),
        ("max-draft-tokens", options.max_draft_tokens),
        ("drain-timeout-s", options.drain_timeout_s),
    ]
    return ChildSpec(f"scheduler-{index}" if index else "scheduler", "scheduler", _spell(flags))


def gateway_spec(options: ClusterOptions, scheduler: str) -> ChildSpec:
    """The gateway; its port may be 0. `scheduler`, here and below: the addresses of all, comma-separated."""
    flags: Settings = [
        ("host", options.host),
        ("port", options.port),
        ("scheduler", scheduler),
        ("model", f"{options.served_model_name}={options.model}"),
        ("metrics-port", options.metrics_port),
        ("max-message-mib", options.max_message_mib),
        ("max-concurrent-requests", options.max_concurrent_requests),
        ("drain-timeout-s", options.drain_timeout_s),
    ]
    return ChildSpec("gateway", "gateway", _spell(flags))


def worker_specs(options: ClusterOptions, scheduler: str) -> list[ChildSpec]:
    """The workers."""
    shared: Settings = [
        ("scheduler", scheduler),
        ("model", options.model),
        ("served-model-name", options.served_model_name),
        ("engine", options.engine),
        ("device", options.device),
        ("dtype", options.dtype),
        ("kv-cache-gib", options.kv_cache_gib),
        ("num-blocks", options.num_blocks),
        ("block-size", options.block_size),
        ("max-sequences", options.max_sequences),
        ("max-model-len", options.max_model_len),
        ("threads", options.worker_threads),
        *_draft_flags(options),
        ("drain-timeout-s", options.drain_timeout_s),
        ("fake-step-ms", options.fake_step_ms),
        ("fake-token-us", options.fake_token_us),
    ]
    env = _thread_env(options.worker_threads)
    return [
        ChildSpec(f"worker-{index}", "worker", _spell([("worker-id", f"worker-{index}"), *shared]), env)
        for index in range(options.num_workers)
    ]


def draft_specs(options: ClusterOptions, scheduler: str) -> list[ChildSpec]:
    """The draft worker, or nothing."""
    if options.draft == "none" or options.own_drafts:
        return []
    flags: Settings = [
        ("worker-id", "draft"),
        ("scheduler", scheduler),
        ("host", options.host),
        ("port", 0),
        ("target", options.served_model_name),
        ("target-model", options.model),
        ("draft", options.draft),
        ("proposer", options.proposer),
        ("vocabulary", options.draft_vocabulary),
        ("dtype", options.dtype),
        ("max-draft-tokens", options.max_draft_tokens),
        ("threads", 1),
    ]
    return [ChildSpec("draft", "draft_worker", _spell(flags), _thread_env(1))]


def _draft_flags(options: ClusterOptions) -> Settings:
    """What a worker is told of drafts."""
    if options.draft == "none" or not options.own_drafts:
        return [("draft", "off" if options.draft == "none" else "on")]
    return [
        ("draft", "own"),
        ("draft-model", options.draft),
        ("proposer", options.proposer),
        ("vocabulary", options.draft_vocabulary),
    ]


def _later_port(port: int, offset: int) -> int:
    """A scheduler's metrics port: above the gateway's, where that is a real one."""
    return port + offset if port > 0 else port


def _thread_env(num_threads: int) -> tuple[tuple[str, str], ...]:
    # Libraries size their thread pools when they are loaded, before a flag can be read.
    return (("OMP_NUM_THREADS", str(num_threads)), ("MKL_NUM_THREADS", str(num_threads)))


def _spell(flags: Settings) -> tuple[Flag, ...]:
    return tuple((name, str(value)) for name, value in flags if value is not None)
