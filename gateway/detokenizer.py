"""Tokens to text, one at a time, without half characters and without losing or doubling any.

Nearly every decoder-only model's decoder turns each token into a fixed run of bytes, whatever stands around it; the
text is those bytes read as UTF-8. That is a `BytesPlan`, read off the tokenizer's own decoder:

    ByteLevel                                       GPT-2, Llama 3, Qwen, SmolLM, OLMo   "Ġworld" → b" world"
    Replace ▁ → space, ByteFallback, Fuse, Strip    Llama 2, Mistral, Gemma, Phi-3       "<0xE5>" → b"\\xe5"
    Metaspace                                       other SentencePiece models

Any other decoder (WordPiece, …) is asked for the text of a short window of tokens, before and after the new one.

Rules that hold for both:

* Text is a continuation of the prompt: the space that opens a SentencePiece word is kept, unless nothing visible stands
  before it. Hence prompt text + output text = text of prompt + output.
* Bytes that can't be UTF-8 become U+FFFD, each maximal part once, as soon as that is certain.
* An incomplete character at the very end has no text; its tokens are still reported.
* What has been released after n tokens depends on those n tokens only, not on how they arrived.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes; 8 visible tokens of context always contain the start of an incomplete one.
CONTEXT_TOKENS = 8


class Vocabulary(Protocol):
    """What detokenisation needs of a tokenizer."""

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling; None for an id without one (a padded embedding row)."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of visible tokens, by the tokenizer's own decoder."""
        ...


class Detokenizer(Protocol):
    """Turns one choice's tokens into text."""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        ...

    def finish(self) -> str:
        """The text that is left when no token follows."""
        ...


@dataclass(frozen=True, slots=True)
class BytesPlan:
    """How a piece of the vocabulary becomes bytes."""

    to_bytes: Callable[[str], bytes]
    first_to_bytes: Callable[[str], bytes]
    """The same for the first visible token of a text."""


def plan_bytes(decoder: Mapping[str, Any] | None) -> BytesPlan | None:
    """The plan of a decoder as tokenizers serialises it; None where tokens don't stand for fixed bytes."""
    kind = None if decoder is None else decoder.get("type")
    if decoder is None or kind not in ("ByteLevel", "Metaspace", "Sequence"):
        return None
    if kind == "ByteLevel":
        return BytesPlan(_byte_level, _byte_level)
    if kind == "Sequence":
        return _plan_sequence(decoder.get("decoders", []))
    mark = decoder.get("replacement", "▁")
    # The decoder drops every mark of the first token, wherever it stands in it.
    first = " " if decoder.get("prepend_scheme", "always") == "never" else ""
    return BytesPlan(
        lambda piece: piece.replace(mark, " ").encode(),
        lambda piece: piece.replace(mark, first).encode(),
    )


def _plan_sequence(steps: Sequence[Mapping[str, Any]]) -> BytesPlan | None:
    replacements: list[tuple[str, str]] = []
    byte_fallback = byte_level = fused = False
    num_stripped = 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and not fused and not byte_fallback and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "ByteLevel" and not fused and not byte_fallback:
            byte_level = fused = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            num_stripped += step["start"]
        else:
            return None

    def to_bytes(piece: str) -> bytes:
        for pattern, content in replacements:
            piece = piece.replace(pattern, content)
        if byte_level:
            return _byte_level(piece)
        if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.encode()

    if num_stripped > 1:
        return None
    return BytesPlan(to_bytes, lambda piece: to_bytes(piece).removeprefix(b" ") if num_stripped else to_bytes(piece))


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF_SYMBOL = byte_symbols()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_SYMBOL[symbol] for symbol in piece])
    except KeyError:
        return piece.encode()  # an added token, which is spelt as it is


class TokenBytes:
    """The bytes of every token of one vocabulary, looked up once each."""

    def __init__(self, plan: BytesPlan, vocabulary: Vocabulary) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def of(self, token_id: int) -> bytes:
        """What the token stands for in the middle of a text; nothing for a special or unknown one."""
        data = self._known.get(token_id)
        if data is None:
            piece = self._visible_piece(token_id)
            data = b"" if piece is None else self._plan.to_bytes(piece)
            self._known[token_id] = data
        return data

    def text_of(self, token_id: int) -> str | None:
        """The text of those bytes where they are whole characters, as they nearly always are; else None."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def of_first(self, token_id: int) -> bytes | None:
        """What it stands for at the start of a text; None if it isn't visible, and the start is yet to come."""
        piece = self._visible_piece(token_id)
        return None if piece is None else self._plan.first_to_bytes(piece)

    def _visible_piece(self, token_id: int) -> str | None:
        return None if self._vocabulary.is_special(token_id) else self._vocabulary.piece(token_id)


class BytesDetokenizer:
    """By the bytes of each token."""

    __slots__ = ("_at_start", "_bytes", "_utf8", "_whole")

    def __init__(self, token_bytes: TokenBytes, context: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        # No character is incomplete, so that whole ones need no decoder.
        self._whole = True
        for token_id in context:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        if self._at_start:
            data = self._bytes.of_first(token_id)
            if data is None:
                return ""
            self._at_start = False
            return self._decode(data)
        if self._whole:
            text = self._bytes.text_of(token_id)
            if text is not None:
                return text
        return self._decode(self._bytes.of(token_id))

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._whole = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        pending = self._utf8.getstate()[0]
        # Python waits for the third byte of a surrogate, which no UTF-8 has: that is no incomplete character.
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            return REPLACEMENT * 2
        return ""


class WindowDetokenizer:
    """By asking the tokenizer's decoder for a window of tokens with and without the new ones."""

    __slots__ = ("_shown", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._window = [token_id for token_id in context if not vocabulary.is_special(token_id)]
        # Tokens of the window whose text has been released.
        self._shown = len(self._window)

    def feed(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id):
            return ""
        self._window.append(token_id)
        shown, text = self._texts()
        if text.endswith(REPLACEMENT) or not text.startswith(shown) or len(text) == len(shown):
            return ""
        del self._window[: max(0, len(self._window) - CONTEXT_TOKENS)]
        self._shown = len(self._window)
        return text[len(shown) :]

    def finish(self) -> str:
        shown, text = self._texts()
        text = text.rstrip(REPLACEMENT)
        return text[len(shown) :] if text.startswith(shown) else ""

    def _texts(self) -> tuple[str, str]:
        shown = self._vocabulary.decode(self._window[: self._shown]) if self._shown else ""
        return shown, self._vocabulary.decode(self._window)


def visible_context(vocabulary: Vocabulary, prompt_token_ids: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that have text, as many as the detokenizers want, in order."""
    context: list[int] = []
    for token_id in reversed(prompt_token_ids):
        if not vocabulary.is_special(token_id) and vocabulary.piece(token_id):
            context.append(token_id)
            if len(context) == CONTEXT_TOKENS:
                break
    return context[::-1]


def start(
    token_bytes: TokenBytes | None, vocabulary: Vocabulary, prompt_token_ids: Sequence[int] = ()
) -> BytesDetokenizer | WindowDetokenizer:
    """A detokenizer for text that continues this prompt; `token_bytes` is None where there is no BytesPlan."""
    context = visible_context(vocabulary, prompt_token_ids)
    if token_bytes is None:
        return WindowDetokenizer(vocabulary, context)
    return BytesDetokenizer(token_bytes, context)
