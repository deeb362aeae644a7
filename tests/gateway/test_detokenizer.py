"""Incremental text against the tokenizer's own decoding of everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gateway.detokenizer import BytesDetokenizer, WindowDetokenizer, plan_bytes
from gateway.text import ModelText

BYTES_KINDS = ["byte_level", "llama_style", "metaspace"]
KINDS = [*BYTES_KINDS, "wordpiece"]
FOX = "🦊好"


def stream(text: ModelText, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = text.detokenizer(prompt or [])
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_get_the_detokenizer_they_need(texts: dict[str, ModelText], kind: str) -> None:
    expected = BytesDetokenizer if kind in BYTES_KINDS else WindowDetokenizer
    assert isinstance(texts[kind].detokenizer(), expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_deltas_are_the_full_decode(texts: dict[str, ModelText], kind: str, data: st.DataObject) -> None:
    text = texts[kind]
    ids = data.draw(st.lists(st.integers(0, text.vocab_size - 1), max_size=24))
    full = text.decode(ids)
    if "\ufffd" not in full:
        assert "".join(stream(text, ids)) == full


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_output_continues_the_prompt(texts: dict[str, ModelText], kind: str, data: st.DataObject) -> None:
    text = texts[kind]
    ids = st.lists(st.integers(0, text.vocab_size - 1), max_size=16)
    prompt, output = data.draw(ids), data.draw(ids)
    before, full = text.detokenize(prompt, True), text.decode(prompt + output)
    if "\ufffd" not in full:
        assert before + "".join(stream(text, output, prompt)) == full


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_equal_the_full_decode_but_for_an_incomplete_end(byte_text: ModelText, data: bytes) -> None:
    ids = list(data)
    shown = "".join(stream(byte_text, ids))
    full = byte_text.decode(ids)
    # Whatever could still become a character has no text; everything else is the library's own lossy decoding.
    if shown != full:
        assert full == shown + "\ufffd"
        tail = data[-3:]
        assert any(_is_incomplete(tail[start:]) for start in range(len(tail)))


def _is_incomplete(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


@pytest.mark.parametrize("kind", BYTES_KINDS[:2])
def test_characters_in_byte_tokens_appear_whole(texts: dict[str, ModelText], kind: str) -> None:
    text = texts[kind]
    if kind == "llama_style":
        ids = [3 + byte for byte in FOX.encode()]
    else:
        ids = _byte_level_ids(text, FOX)
    assert len(ids) == len(FOX.encode())
    deltas = stream(text, ids)
    assert [delta for delta in deltas if delta] == ["🦊", "好"]
    assert "".join(deltas) == text.decode(ids)


@pytest.mark.parametrize("kind", BYTES_KINDS[:2])
def test_an_incomplete_character_at_the_end_has_no_text(texts: dict[str, ModelText], kind: str) -> None:
    text = texts[kind]
    if kind == "llama_style":
        ids = [3 + byte for byte in FOX.encode()[:-1]]
    else:
        ids = _byte_level_ids(text, FOX)[:-1]
    assert "".join(stream(text, ids)) == "🦊"


def test_a_prompt_that_ends_inside_a_character_is_completed(byte_text: ModelText) -> None:
    data = "a好b".encode()
    assert "".join(stream(byte_text, list(data[2:]), prompt=list(data[:2]))) == "好b"


def test_special_tokens_and_padded_rows_have_no_text(byte_text: ModelText) -> None:
    assert stream(byte_text, [104, 258, 263, 105, 259]) == ["h", "", "", "i", "<think>", ""]


def test_sentencepiece_space_is_kept_after_a_prompt_and_dropped_at_the_start(texts: dict[str, ModelText]) -> None:
    text = texts["llama_style"]
    prompt, (word,) = text.encode_text("the"), text.encode_text("fox")[1:]
    assert text.piece(word) == "▁fox"
    assert "".join(stream(text, [word], prompt)) == " fox"
    assert "".join(stream(text, [word])) == "fox"
    assert "".join(stream(text, [word], prompt=[1])) == "fox"


def test_unknown_decoders_have_no_plan() -> None:
    assert plan_bytes(None) is None
    assert plan_bytes({"type": "WordPiece", "prefix": "##", "cleanup": True}) is None
    strip_end = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    assert plan_bytes({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip_end]}) is None


def _byte_level_ids(text: ModelText, spelt: str) -> list[int]:
    """One token per byte, although the vocabulary may have longer ones."""
    probe = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = "".join(word for word, _ in probe.pre_tokenize_str(spelt))
    return [token_id for symbol in symbols if (token_id := text._tokenizer.token_to_id(symbol)) is not None]
