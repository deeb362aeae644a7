"""The engine that runs a real model: `ModelRunner` implements `engine.batch.Engine` over one of two routes.

    decoder        families that `engine.families` knows, by our own operations   (engine/decoder_route.py)
    transformers   every other decoder, by transformers' own code                 (engine/transformers_route.py)

`auto` takes the decoder where it can. In float32 both give the same tokens; they are two numerics fingerprints.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.batch import (
    AheadEngine,
    Batch,
    Choices,
    ChoosingEngine,
    DecodeRows,
    EngineInfo,
    LaunchedRows,
    Pending,
)
from engine.decoder_route import DecoderModel, decoder_spec, refusal
from engine.description import Undescribed
from engine.errors import UnsupportedModel
from engine.kernels.selection import KERNELS, select_ops
from engine.kernels.threads import use_threads
from engine.kv_cache import (
    LayerShape,
    MemoryRequest,
    bytes_per_block,
    memory_facts,
    plan_num_blocks,
    require_weights_fit,
)
from engine.loading import ModelFacts, check_supported
from engine.progress import Progress

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTES = ("auto", "decoder", "transformers")
NUMERICS = ("exact", "fast")
RUN_AHEAD = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to run a model."""

    dtype: str = "bfloat16"
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one"""
    kv_cache_gib: float | None = None
    num_blocks: int | None = None
    """overrides kv_cache_gib"""
    block_size: int = 16
    max_sequences: int = 256
    max_model_len: int | None = None
    """None: the model's own"""
    threads: int | None = None
    """CPU threads of a product; None: one per core"""
    route: str = "auto"
    """one of ROUTES"""
    kernels: str = "auto"
    """one of `engine.kernels.selection.KERNELS`; for the decoder route"""
    numerics: str = "exact"
    """exact: a row's bits are its own. fast: on a GPU products may take the order of sums that suits the batch; a
    CPU's exact products are its fastest, so there it changes nothing"""
    run_ahead: str = "auto"
    """on: steps can be launched before the tokens of the one before are known, where the route can; auto: on a GPU"""


class Model(Protocol):
    """One model on one device; two implementations, one per route."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    layers: dict[int, LayerShape]
    fingerprint: str
    """what decides the bits besides dtype and weights"""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool, once. Raises ValueError for a block size that can't be served."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Engine.forward`."""
        ...


class ModelRunner:
    """One model on one device with its KV cache. Not thread-safe."""

    def __init__(self, model: Model, facts: ModelFacts, options: RunnerOptions) -> None:
        max_model_len = resolve_max_model_len(facts, options.max_model_len)
        memory = memory_facts(
            model.device,
            block_bytes=bytes_per_block(model.layers, options.block_size, model.dtype),
            block_size=options.block_size,
            max_model_len=max_model_len,
            max_sequences=options.max_sequences,
        )
        num_blocks = plan_num_blocks(MemoryRequest(options.num_blocks, options.kv_cache_gib), memory)
        model.allocate(num_blocks, options.block_size)
        self._model = model
        self._choosing = model if isinstance(model, ChoosingEngine) and model.chooses else None
        self._ahead = model if isinstance(model, AheadEngine) and model.runs_ahead else None
        self.facts = facts
        self._info = EngineInfo(
            fingerprint=fingerprint(model, facts, max_model_len, options.numerics),
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
        )

    @classmethod
    def load(cls, folder: str | Path, *, progress: Progress | None = None, **options: Any) -> ModelRunner:
        """Check, load and lay out the model in `folder`; `options` are fields of RunnerOptions.

        Raises a `ModelError` that says what is wrong with the model, ValueError for an option that can't be.
        """
        wanted = RunnerOptions(**options)
        _check_choices(wanted)
        if wanted.threads:
            torch.set_num_threads(wanted.threads)
        facts = check_supported(Path(folder))
        dtype, device = resolve_dtype(wanted.dtype), resolve_device(wanted.device)
        if device.type == "cpu":
            use_threads(wanted.threads, progress)
        # What the pool needs is known exactly only once the model is there; this is refused before reading gigabytes.
        require_weights_fit(
            facts.num_parameters * dtype.itemsize,
            facts.kv_bytes_per_token(dtype.itemsize) * resolve_max_model_len(facts, wanted.max_model_len),
            device,
        )
        model = _load_model(facts, wanted, dtype, device, progress)
        if progress:
            progress("laying out the KV cache", None)
        return cls(model, facts, wanted)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Engine.forward`."""
        return self._model.forward(batch)

    @property
    def chooses(self) -> bool:
        """See `ChoosingEngine`."""
        return self._choosing is not None

    def choose(self, batch: Batch, choices: Choices) -> list[int]:
        """See `ChoosingEngine`; only where `chooses`."""
        assert self._choosing is not None
        return self._choosing.choose(batch, choices)

    def decode(self, rows: DecodeRows) -> list[int]:
        """See `ChoosingEngine`; only where `chooses`."""
        assert self._choosing is not None
        return self._choosing.decode(rows)

    @property
    def runs_ahead(self) -> bool:
        """See `AheadEngine`."""
        return self._ahead is not None

    def launch(self, rows: LaunchedRows) -> Pending:
        """See `AheadEngine`; only where `runs_ahead`."""
        assert self._ahead is not None
        return self._ahead.launch(rows)


def _load_model(
    facts: ModelFacts, wanted: RunnerOptions, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Model:
    max_model_len = resolve_max_model_len(facts, wanted.max_model_len)
    why = "the transformers route was asked for"
    if wanted.route != "transformers":
        spec = decoder_spec(facts, max_model_len)
        if isinstance(spec, Undescribed):
            why = spec.reason
        else:
            ops = select_ops(device, wanted.kernels, fast_numerics=wanted.numerics == "fast")
            reason = refusal(facts, spec, ops, dtype, wanted.block_size)
            if reason is None:
                return DecoderModel(
                    facts,
                    spec,
                    ops,
                    dtype,
                    device,
                    max_model_len,
                    max_sequences=wanted.max_sequences,
                    progress=progress,
                    run_ahead=None if wanted.run_ahead == "auto" else wanted.run_ahead == "on",
                )
            why = reason
        if wanted.route == "decoder":
            raise UnsupportedModel(f"the decoder route can't run {facts.folder}: {why}")
    logger.info("transformers' own code runs %s: %s", facts.model_type, why)
    # Its modelling code takes a second and a hundred megabytes to import; the decoder does without.
    from engine.transformers_route import TransformersModel

    return TransformersModel(facts, dtype, device, max_model_len, progress)


def _check_choices(options: RunnerOptions) -> None:
    for name, choices in (("route", ROUTES), ("kernels", KERNELS), ("numerics", NUMERICS), ("run_ahead", RUN_AHEAD)):
        value = getattr(options, name)
        if value not in choices:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(choices)}")


def resolve_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a name that isn't served."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """Raises UnsupportedModel if the device that was asked for isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA GPU")
    if device.index is not None:
        # Kernels, streams and graphs are those of the thread's current device: the one that loads owns the engine.
        torch.cuda.set_device(device)
    return device


def resolve_max_model_len(facts: ModelFacts, asked: int | None) -> int:
    """Raises UnsupportedModel if more is asked than the model has positions."""
    if asked is None:
        return facts.max_model_len
    if asked < 1 or asked > facts.max_model_len:
        raise UnsupportedModel(
            f"max_model_len {asked} is outside 1 … {facts.max_model_len}, the positions that {facts.model_type} has"
        )
    return asked


def fingerprint(model: Model, facts: ModelFacts, max_model_len: int, numerics: str) -> str:
    """Everything that can change a bit of the logits."""
    parts = [
        model.fingerprint,
        f"dtype={str(model.dtype).removeprefix('torch.')}",
        f"model={facts.content_id}",
    ]
    if numerics != "exact" and model.device.type != "cpu":
        parts.append(f"numerics={numerics}")
    if facts.rope_depends_on_length:
        parts.append(f"max_model_len={max_model_len}")
    return " ".join(parts)
