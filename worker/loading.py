"""Makes the engine that the configuration names."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from cluster.cores import own_cores
from cluster.logs import event
from drafting.loading import ProposerOptions, load_proposer
from drafting.proposer import Proposer
from engine.batch import AheadEngine, Engine
from engine.errors import ModelError
from worker.config import WorkerConfig
from worker.progress import LoadingProgress

logger = logging.getLogger(__name__)

FAKE_NUM_BLOCKS = 512


def load_engine(config: WorkerConfig) -> Engine:
    """Load it on the calling thread, which owns it from then on; raises what the engine refuses the model with."""
    torch.set_num_threads(config.threads or _num_cores())
    engine = _fake(config) if config.engine == "fake" else _transformers(config)
    info = engine.info
    event(
        logger,
        "engine ready",
        fingerprint=info.fingerprint,
        blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        runs_ahead=isinstance(engine, AheadEngine) and engine.runs_ahead,
    )
    return engine


def load_own_proposer(config: WorkerConfig) -> Proposer:
    """Who guesses on this thread, between steps; computes where the target does. Raises ModelError for what can't be.

    An index needs no target, and the fake draft only the number of its ids.
    """
    options = ProposerOptions(
        draft=config.draft_model,
        target_model=config.model,
        config=config,
        dtype=config.dtype,
        device=config.device,
        kv_cache_gib=config.draft_kv_cache_gib,
        threads=config.threads,
    )
    try:
        proposer = load_proposer(options)
    except ModelError as error:
        raise ModelError(f"own drafts by {config.draft_model}: {error}") from error
    event(logger, "own drafts", proposer=proposer.name)
    return proposer


def cores_of(config: WorkerConfig) -> str:
    """Which cores the model computes on; empty where it has a device of its own."""
    if config.engine == "fake":
        return ""
    from engine.runner import resolve_device

    return own_cores() if resolve_device(config.device).type == "cpu" else ""


def _fake(config: WorkerConfig) -> Engine:
    from engine.fake import FakeEngine, fake_facts

    facts = fake_facts(Path(config.model))
    return FakeEngine(
        num_blocks=config.num_blocks or FAKE_NUM_BLOCKS,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        max_model_len=config.max_model_len or facts.get("max_position_embeddings", 4096),
        step_ms=config.fake_step_ms,
        token_us=config.fake_token_us,
        vocab_size=facts.get("vocab_size", 260),
        run_ahead=config.run_ahead == "on",
    )


def _transformers(config: WorkerConfig) -> Engine:
    from engine.loading import resolve_model
    from engine.runner import ModelRunner

    with LoadingProgress() as progress:
        folder = resolve_model(config.model, progress)
        try:
            return ModelRunner.load(
                folder,
                dtype=config.dtype,
                device=config.device,
                route=config.route,
                kernels=config.kernels,
                numerics=config.numerics,
                run_ahead=config.run_ahead,
                kv_cache_gib=config.kv_cache_gib or None,
                num_blocks=config.num_blocks or None,
                block_size=config.block_size,
                max_sequences=config.max_sequences,
                max_model_len=config.max_model_len or None,
                threads=config.threads or None,
                progress=progress,
            )
        except ValueError as error:
            # A setting that the engine can't work with; a wrong model is a ModelError already.
            raise ModelError(str(error)) from error


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
