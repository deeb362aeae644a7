"""Makes the proposer that the configuration names. An n-gram draft worker never imports torch."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cores import own_cores
from cluster.logs import event
from draft_worker.combined_proposer import CombinedProposer
from draft_worker.config import DraftWorkerConfig
from draft_worker.mirror import ALWAYS, OWN_DEVICE, Worth
from draft_worker.ngram_proposer import NgramProposer
from draft_worker.output_memory import OutputMemory
from draft_worker.proposer import Proposer
from engine.errors import ModelError, VocabularyMismatch

if TYPE_CHECKING:
    from engine.batch import Engine

logger = logging.getLogger(__name__)

FAKE_VOCAB_SIZE = 260


def load_proposer(config: DraftWorkerConfig) -> Proposer:
    """Runs on the thread that owns the proposer from then on. Raises ModelError, naming what is wrong."""
    if config.draft == "ngram" or config.proposer == "ngram":
        return _index(config)
    import torch

    torch.set_num_threads(config.threads or _num_cores())
    model = _fake(config) if config.draft == "fake" else _model(config)
    # The fake engine is there to be known exactly: what it guesses is mixed with nothing unless that is asked for.
    alone = config.proposer == "model" or (config.proposer == "auto" and config.draft == "fake")
    return model if alone else CombinedProposer(_index(config), model)


def worth_of(config: DraftWorkerConfig) -> Worth:
    """How far guesses go for workers that compute elsewhere."""
    return OWN_DEVICE if _has_model(config) else ALWAYS


def cores_of(config: DraftWorkerConfig) -> str:
    """Which cores a model computes on; empty where there is none, or where it has a device of its own.

    Raises ModelError if the device isn't there.
    """
    if not _has_model(config):
        return ""
    from engine.runner import resolve_device

    return own_cores() if resolve_device(config.device).type == "cpu" else ""


def _has_model(config: DraftWorkerConfig) -> bool:
    return config.draft not in ("fake", "ngram") and config.proposer != "ngram"


def _index(config: DraftWorkerConfig) -> NgramProposer:
    return NgramProposer(OutputMemory(config.memory_tokens, config.memory_age_s, config.memory_of == "all"))


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
    from engine.draft_folder import is_draft_folder
    from engine.draft_model import load_draft
    from engine.loading import resolve_model
    from engine.runner import ModelRunner
    from engine.vocabulary import require_same_vocabulary

    if not config.target_model:
        raise ModelError("target_model: the target's folder is needed to compare the draft model's vocabulary with it")
    folder, target = resolve_model(config.draft, _progress), resolve_model(config.target_model, _progress)
    distilled = is_draft_folder(folder)
    if distilled and config.vocabulary != "same":
        raise ModelError(f"vocabulary: {folder} was distilled for one target, whose tokens it knows; leave it at same")
    shared = 0
    if config.vocabulary == "same" and not distilled:
        try:
            shared = require_same_vocabulary(target, folder)
        except VocabularyMismatch as error:
            raise VocabularyMismatch(f"{error}; with --vocabulary text it can draft by its words") from None
    try:
        load = partial(load_draft, folder, target) if distilled else partial(ModelRunner.load, folder)
        runner = load(
            dtype=config.dtype,
            device=config.device,
            kv_cache_gib=config.kv_cache_gib,
            threads=config.threads or None,
            progress=_progress,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    if distilled:
        shared = runner.info.vocab_size
    event(logger, "draft model ready", folder=folder, shared_vocabulary=shared, blocks=runner.info.num_blocks)
    if config.vocabulary != "same":
        return _foreign(config, runner, target, folder)
    return ModelProposer(runner, folder.name, shared)


def _foreign(config: DraftWorkerConfig, engine: Engine, target: Path, folder: Path) -> Proposer:
    """A draft model with another tokenizer than its target's."""
    from draft_worker.foreign.mapped_engine import MappedEngine, map_vocabularies
    from draft_worker.foreign.text_proposer import TextProposer
    from draft_worker.foreign.token_text import TokenTexts
    from draft_worker.model_proposer import ModelProposer

    of_target, of_draft = TokenTexts.load(target), TokenTexts.load(folder)
    if config.vocabulary == "text":
        return TextProposer(ModelProposer(engine, folder.name, engine.info.vocab_size), of_target, of_draft)
    common = map_vocabularies(of_target, of_draft, engine.info.vocab_size)
    event(logger, "common vocabulary", tokens=len(common.target_ids), share=round(common.share, 3))
    if not len(common.target_ids):
        raise VocabularyMismatch(f"{target.name} and {folder.name} have no token in common; try --vocabulary text")
    name = f"{folder.name} by intersection"
    return ModelProposer(MappedEngine(engine, common), name, len(common.to_draft))


_last_said = [""]


def _progress(what: str, share: float | None) -> None:
    """One line per stage; draft models are small."""
    if what != _last_said[0]:
        _last_said[0] = what
        event(logger, what)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
