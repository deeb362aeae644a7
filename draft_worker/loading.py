"""Makes the proposer that the configuration names. An n-gram draft worker never imports torch."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from cluster.logs import event
from draft_worker.config import DraftWorkerConfig
from draft_worker.ngram_proposer import NgramProposer
from draft_worker.proposer import Proposer
from engine.errors import ModelError

logger = logging.getLogger(__name__)

FAKE_VOCAB_SIZE = 260


def load_proposer(config: DraftWorkerConfig) -> Proposer:
    """Runs on the thread that owns the proposer from then on. Raises ModelError, naming what is wrong."""
    if config.draft == "ngram":
        return NgramProposer()
    import torch

    torch.set_num_threads(config.threads or _num_cores())
    return _fake(config) if config.draft == "fake" else _model(config)


def _fake(config: DraftWorkerConfig) -> Proposer:
    from draft_worker.model_proposer import ModelProposer
    from engine.fake import FakeEngine

    facts: dict[str, int] = {}
    path = Path(config.target_model) / "config.json"
    if config.target_model and path.is_file():
        facts = json.loads(path.read_text())
    vocab_size = facts.get("vocab_size", FAKE_VOCAB_SIZE)
    engine = FakeEngine(
        num_blocks=1024,
        max_model_len=facts.get("max_position_embeddings", 4096),
        vocab_size=vocab_size,
        step_ms=config.fake_step_ms,
        disagreement=config.fake_disagreement,
    )
    return ModelProposer(engine, "fake", vocab_size)


def _model(config: DraftWorkerConfig) -> Proposer:
    from draft_worker.model_proposer import ModelProposer
    from engine.loading import resolve_model
    from engine.runner import ModelRunner
    from engine.vocabulary import require_same_vocabulary

    if not config.target_model:
        raise ModelError("target_model: the target's folder is needed to compare the draft model's vocabulary with it")
    folder = resolve_model(config.draft, _progress)
    shared = require_same_vocabulary(resolve_model(config.target_model, _progress), folder)
    try:
        runner = ModelRunner.load(
            folder,
            dtype=config.dtype,
            device=config.device,
            kv_cache_gib=config.kv_cache_gib,
            threads=config.threads or None,
            progress=_progress,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    event(logger, "draft model ready", folder=folder, shared_vocabulary=shared, blocks=runner.info.num_blocks)
    return ModelProposer(runner, folder.name, shared)


_last_said = [""]


def _progress(what: str, share: float | None) -> None:
    """One line per stage; draft models are small."""
    if what != _last_said[0]:
        _last_said[0] = what
        event(logger, what)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
