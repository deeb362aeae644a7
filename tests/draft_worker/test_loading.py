"""Which proposer the configuration gives, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cores import own_cores
from draft_worker.config import DraftWorkerConfig
from draft_worker.loading import cores_of, options_of, worth_of
from drafting.loading import load_proposer
from drafting.mirror import ALWAYS, OWN_DEVICE, Mirror, Worth
from drafting.ngram_proposer import NgramProposer
from engine.errors import ModelError, VocabularyMismatch


def tokenizer(folder: Path, tokens: list[str]) -> Path:
    folder.mkdir()
    content = {"model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def config(**changes: Any) -> DraftWorkerConfig:
    return DraftWorkerConfig(**{"target": "m", "threads": 1, **changes})


def test_a_permuted_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    """Case 70, the half that is refused."""
    target = tokenizer(tmp_path / "target", ["a", "b", "c"])
    draft = tokenizer(tmp_path / "draft", ["a", "c", "b"])
    with pytest.raises(VocabularyMismatch, match="token 1 is 'b' for target and 'c' for draft"):
        load_proposer(options_of(config(draft=str(draft), target_model=str(target))))


def test_a_model_needs_its_targets_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="target_model"):
        load_proposer(options_of(config(draft=str(tmp_path))))


def test_the_fake_takes_its_targets_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 64}))
    proposer = load_proposer(options_of(config(draft="fake", target_model=str(tmp_path), fake_disagreement=0.0)))
    assert proposer.name == "fake"
    mirror = Mirror(1, 0, 1, [65] * 60, 60, 0, 0.0, 4, 0)
    while mirror.wanted:
        proposer.extend([mirror])
    # 64 positions hold 60 known tokens and 4 guesses; one more would never be verified.
    assert len(mirror.guess) == 4


@pytest.mark.parametrize(
    ("draft", "proposer", "name"),
    [
        ("fake", "auto", "fake"),
        ("fake", "model", "fake"),
        ("fake", "ngram", "ngram"),
        ("fake", "combined", "ngram+fake"),
        ("ngram", "auto", "ngram"),
        ("ngram", "ngram", "ngram"),
    ],
)
def test_who_guesses(draft: str, proposer: str, name: str) -> None:
    assert load_proposer(options_of(config(draft=draft, proposer=proposer))).name == name


@pytest.mark.parametrize("proposer", ["model", "combined"])
def test_without_a_model_none_is_asked_for(proposer: str) -> None:
    with pytest.raises(ValueError, match="needs a model"):
        config(draft="ngram", proposer=proposer).validate()


def test_outputs_are_remembered_for_tenants_unless_all_is_said() -> None:
    for flags, expected in (
        ({}, (False, True)),
        ({"memory_of": "all"}, (True, True)),
        ({"memory_tokens": 0}, (False,) * 2),
    ):
        proposer = load_proposer(options_of(config(draft="ngram", **flags)))
        assert isinstance(proposer, NgramProposer)
        assert (proposer.memory.serves(b""), proposer.memory.serves(b"a")) == expected


@pytest.mark.parametrize(
    ("draft", "proposer", "worth", "has_cores"),
    [("ngram", "auto", ALWAYS, False), ("fake", "auto", ALWAYS, False), ("folder", "ngram", ALWAYS, False),
     ("folder", "auto", OWN_DEVICE, True)],
)  # fmt: skip
def test_only_a_model_takes_somebodys_cores(draft: str, proposer: str, worth: Worth, has_cores: bool) -> None:
    settings = config(draft=draft, proposer=proposer, device="cpu")
    assert worth_of(settings) == worth
    assert cores_of(settings) == (own_cores() if has_cores else "")


def test_ngram_never_imports_torch() -> None:
    code = (
        "import sys, draft_worker.__main__ as m; from draft_worker.loading import options_of;"
        "from drafting.loading import load_proposer;"
        "from draft_worker.config import DraftWorkerConfig as C; load_proposer(options_of(C(target='m')));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
