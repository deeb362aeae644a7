"""Makes the proposer that the options name. Whoever has nothing but an n-gram index never imports torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.logs import event
from drafting.combined_proposer import CombinedProposer
from drafting.config import ProposerConfig
from drafting.ngram_proposer import NgramProposer
from drafting.output_memory import OutputMemory
from drafting.proposer import Proposer
from engine.errors import ModelError, VocabularyMismatch

if TYPE_CHECKING:
    from engine.batch import Engine

logger = logging.getLogger(__name__)

FAKE_VOCAB_SIZE = 260


@dataclass(frozen=True, kw_only=True)
class ProposerOptions:
    """Who guesses, for whom, and with what."""

    draft: str
    """a folder, ngram or fake"""
    target_model: str = ""
    """folder of the target; not needed for an index"""
    config: ProposerConfig = field(default_factory=ProposerConfig)
    dtype: str = "bfloat16"
    device: str = "auto"
    kv_cache_gib: float = 0.5
    threads: int = 0
    """0: one per core"""
    fake_step_ms: float = 0.0
    fake_disagreement: float = 0.2

    @property
    def has_model(self) -> bool:
        """Whether a model computes; the fake one doesn't."""
        return self.draft not in ("fake", "ngram") and self.config.proposer != "ngram"


def load_proposer(options: ProposerOptions) -> Proposer:
    """Runs on the thread that owns the proposer from then on. Raises ModelError, naming what is wrong."""
    proposer = options.config.proposer
    if options.draft == "ngram" or proposer == "ngram":
        return _index(options.config)
    import torch

    torch.set_num_threads(options.threads or _num_cores())
    model = _fake(options) if options.draft == "fake" else _model(options)
    # The fake engine is there to be known exactly: what it guesses is mixed with nothing unless that is asked for.
    alone = proposer == "model" or (proposer == "auto" and options.draft == "fake")
    return model if alone else CombinedProposer(_index(options.config), model)


def _index(config: ProposerConfig) -> NgramProposer:
    return NgramProposer(OutputMemory(config.memory_tokens, config.memory_age_s, config.memory_of == "all"))


def _fake(options: ProposerOptions) -> Proposer:
    from drafting.model_proposer import ModelProposer
    from engine.fake import FakeEngine, fake_facts

    facts = fake_facts(Path(options.target_model)) if options.target_model else {}
    vocab_size = facts.get("vocab_size", FAKE_VOCAB_SIZE)
    engine = FakeEngine(
        num_blocks=1024,
        max_model_len=facts.get("max_position_embeddings", 4096),
        vocab_size=vocab_size,
        step_ms=options.fake_step_ms,
        disagreement=options.fake_disagreement,
    )
    return ModelProposer(engine, "fake", vocab_size)


def _model(options: ProposerOptions) -> Proposer:
    from drafting.model_proposer import ModelProposer
    from engine.draft_folder import is_draft_folder
    from engine.draft_model import load_draft
    from engine.loading import resolve_model
    from engine.runner import ModelRunner
    from engine.vocabulary import require_same_vocabulary

    if not options.target_model:
        raise ModelError("target_model: the target's folder is needed to compare the draft model's vocabulary with it")
    folder, target = resolve_model(options.draft, _progress), resolve_model(options.target_model, _progress)
    distilled = is_draft_folder(folder)
    if distilled and options.config.vocabulary != "same":
        raise ModelError(f"vocabulary: {folder} was distilled for one target, whose tokens it knows; leave it at same")
    shared = 0
    if options.config.vocabulary == "same" and not distilled:
        try:
            shared = require_same_vocabulary(target, folder)
        except VocabularyMismatch as error:
            raise VocabularyMismatch(f"{error}; with --vocabulary text it can draft by its words") from None
    try:
        load = partial(load_draft, folder, target) if distilled else partial(ModelRunner.load, folder)
        runner = load(
            dtype=options.dtype,
            device=options.device,
            kv_cache_gib=options.kv_cache_gib,
            threads=options.threads or None,
            progress=_progress,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    if distilled:
        shared = runner.info.vocab_size
    event(logger, "draft model ready", folder=folder, shared_vocabulary=shared, blocks=runner.info.num_blocks)
    if options.config.vocabulary != "same":
        return _foreign(options, runner, target, folder)
    return ModelProposer(runner, folder.name, shared)


def _foreign(options: ProposerOptions, engine: Engine, target: Path, folder: Path) -> Proposer:
    """A draft model with another tokenizer than its target's."""
    from drafting.foreign.mapped_engine import MappedEngine, map_vocabularies
    from drafting.foreign.text_proposer import TextProposer
    from drafting.foreign.token_text import TokenTexts
    from drafting.model_proposer import ModelProposer

    of_target, of_draft = TokenTexts.load(target), TokenTexts.load(folder)
    if options.config.vocabulary == "text":
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
