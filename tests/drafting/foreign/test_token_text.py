"""The bytes of every token, by the library's own decoder; and texts cut where they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafting.foreign.token_text import TokenTexts
from engine.errors import IncompleteModel
from tests.drafting.foreign.vocabularies import byte_level, gpt, llama, save, sentence_piece, texts_of

TEXTS = (
    "The cat sat on the mat.",
    " leading space, two  spaces and a tab\t",
    "\n\nlines\n",
    "Größe 価格 🙂",
    "x",
    "don't 3.14",
)


@pytest.mark.parametrize("family", [gpt, llama])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_make_up_the_text(family, text: str, tmp_path: Path) -> None:
    texts = family(tmp_path)
    for at_start in (True, False):
        tokens = texts.encode(text, at_start)
        spelt = b"".join(texts.bytes_of[token.token_id] for token in tokens)
        prefix = b" " if at_start and family is llama else b""
        assert spelt == prefix + text.encode()
        assert all(0 <= token.start <= token.end <= len(text) for token in tokens)
        assert tokens[-1].end == len(text)


def test_single_bytes_are_bytes(tmp_path: Path) -> None:
    for texts in (gpt(tmp_path), llama(tmp_path)):
        single = {data for data in texts.bytes_of if data is not None and len(data) == 1}
        assert single == {bytes([byte]) for byte in range(256)}
        assert None in texts.bytes_of


def test_specials_have_no_text_but_a_spelling_and_a_role(tmp_path: Path) -> None:
    own, other = gpt(tmp_path), llama(tmp_path)
    end = own.specials["<|end|>"]
    assert (own.is_special(end), own.content(end), own.eos_ids, own.bos_id) == (True, "<|end|>", (end,), None)
    assert own.is_special(10**6)
    assert not own.adds_bos
    assert (other.bos_id, other.adds_bos) == (sentence_piece().token_to_id("<s>"), True)


def test_roles_may_be_spelt_or_listed(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path / "m", eos_token_id=[1, 0])
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>"})
    )
    texts = TokenTexts.load(folder)
    assert (texts.eos_ids, texts.bos_id) == ((1, 0), 1)


def test_a_byte_that_is_spelt_like_one_is_text_without_byte_fallback(tmp_path: Path) -> None:
    tokenizer = byte_level()
    texts = texts_of(tokenizer, tmp_path / "m")
    spelt = b"".join(texts.bytes_of[token.token_id] or b"" for token in texts.encode("<0x41>"))
    assert spelt == b"<0x41>"


def test_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteModel, match=r"tokenizer\.json"):
        TokenTexts.load(tmp_path)
