"""Padded vocabularies are accepted, permuted ones refused."""

from __future__ import annotations

import json

import pytest

from engine.errors import IncompleteModel, VocabularyMismatch
from engine.vocabulary import read_vocabulary, require_same_vocabulary


def write(folder, tokens, added=()):
    folder.mkdir()
    content = {
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}},
        "added_tokens": [{"id": token_id, "content": content} for token_id, content in added],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


TOKENS = [f"t{index}" for index in range(100)]


def test_equal(tmp_path):
    assert require_same_vocabulary(write(tmp_path / "a", TOKENS), write(tmp_path / "b", TOKENS)) == 100


def test_padded_in_either_direction(tmp_path):
    short = write(tmp_path / "short", TOKENS)
    padded = write(tmp_path / "padded", TOKENS, [(index, f"<pad{index}>") for index in range(100, 104)])
    assert require_same_vocabulary(short, padded) == 100
    assert require_same_vocabulary(padded, short) == 100


def test_permuted_is_refused_and_named(tmp_path):
    permuted = [*TOKENS[:40], TOKENS[41], TOKENS[40], *TOKENS[42:]]
    with pytest.raises(VocabularyMismatch, match="token 40 is 't40' for a and 't41' for b"):
        require_same_vocabulary(write(tmp_path / "a", TOKENS), write(tmp_path / "b", permuted))


def test_another_control_token_is_refused(tmp_path):
    target = write(tmp_path / "a", TOKENS, [(100, "<end>"), (101, "x")])
    draft = write(tmp_path / "b", TOKENS, [(100, "<stop>"), (101, "x")])
    with pytest.raises(VocabularyMismatch, match="token 100"):
        require_same_vocabulary(target, draft)


def test_a_hole_is_no_match(tmp_path):
    with pytest.raises(VocabularyMismatch, match="token 100 is None for a"):
        require_same_vocabulary(
            write(tmp_path / "a", TOKENS, [(101, "x")]), write(tmp_path / "b", TOKENS, [(100, "<end>"), (101, "x")])
        )


def test_unigram_lists_are_read(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}})
    )
    assert read_vocabulary(tmp_path) == {0: "a", 1: "b"}


def test_missing_or_damaged(tmp_path):
    with pytest.raises(IncompleteModel, match=r"no tokenizer\.json"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(IncompleteModel, match="can't be read"):
        read_vocabulary(tmp_path)
