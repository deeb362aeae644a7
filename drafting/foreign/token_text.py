"""What the tokens of one tokenizer stand for, and how a text is cut into them.

A token's bytes are those it stands for in the middle of a text: a byte-level vocabulary spells bytes as printable
characters (GPT-2), one with byte fallback has pieces such as <0xE5>, and for any other piece the tokenizer's own
decoder is asked, behind a token that keeps a leading space from being dropped. Special tokens stand for no text.

Some tokenizers put a space before a text. A text that continues another one is encoded behind an anchor, a character
whose tokens are dropped again; behind another one where a token would stand for the anchor and for some of the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, pre_tokenizers

from engine.errors import IncompleteModel

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHORS = ("\n", ".", "a", "~", "\x01")
"""the last one is spelt in bytes where these are tokens, which join with nothing"""


class Token(NamedTuple):
    """One token of a text."""

    token_id: int
    start: int
    """characters of the text before it"""
    end: int


@dataclass(slots=True)
class TokenTexts:
    """See the module's text."""

    tokenizer: Tokenizer
    bytes_of: list[bytes | None]
    """by id; None: a special token, or none"""
    specials: dict[str, int]
    """special tokens by content"""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """the main one first"""
    adds_bos: bool
    _anchors: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        first = self.tokenizer.encode("a", add_special_tokens=False).ids
        if first and (self.bytes_of[first[0]] or b"").startswith(b" "):
            texts = ("b", " b", "\nb")
            self._anchors = tuple(one for one in _ANCHORS if all(self._is_clean(one, text) for text in texts))

    @classmethod
    def load(cls, folder: Path) -> TokenTexts:
        """Of a model's folder. Raises IncompleteModel where there is no usable tokenizer.json."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more special
            raise IncompleteModel(f"{folder} has no usable tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        specials = {token.content: token_id for token_id, token in added.items() if token.special}
        bos_id, eos_ids = _roles(folder, specials)
        opening = tokenizer.encode("", add_special_tokens=True).ids
        return cls(tokenizer, _bytes_of(tokenizer, specials), specials, bos_id, eos_ids, bos_id in opening)

    def content(self, token_id: int) -> str:
        """A special token's spelling."""
        return self.tokenizer.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Whether it has no text, or there is no such token."""
        return token_id >= len(self.bytes_of) or self.bytes_of[token_id] is None

    def encode(self, text: str, at_start: bool = False) -> list[Token]:
        """The tokens of a text that continues another one, or begins one."""
        for anchor in () if at_start else self._anchors:
            tokens = self._cut(anchor + text)
            if not any(token.start < len(anchor) < token.end for token in tokens):
                return [
                    Token(token_id, start - len(anchor), end - len(anchor))
                    for token_id, start, end in tokens
                    if end > len(anchor)
                ]
        return self._cut(text)

    def _cut(self, text: str) -> list[Token]:
        # The batch form lets other threads run meanwhile.
        encoding = self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return [Token(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]

    def _is_clean(self, anchor: str, text: str) -> bool:
        """Whether no token stands for the anchor and for a part of the text, and no space comes in between."""
        encoding = self.tokenizer.encode(anchor + text, add_special_tokens=False)
        behind = [token_id for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > 1]
        crossing = any(start < 1 < end for start, end in encoding.offsets)
        return not crossing and b"".join(self.bytes_of[token_id] or b"" for token_id in behind) == text.encode()


def _bytes_of(tokenizer: Tokenizer, specials: dict[str, int]) -> list[bytes | None]:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    pieces = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    special_ids = set(specials.values())
    decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
    symbols = _byte_symbols() if '"ByteLevel"' in decoder else None
    found: list[bytes | None] = [None] * size
    asked: list[int] = []
    for token_id, piece in enumerate(pieces):
        if piece is None or token_id in special_ids:
            continue
        match = _BYTE_PIECE.fullmatch(piece)
        if symbols is not None and all(character in symbols for character in piece):
            found[token_id] = bytes(symbols[character] for character in piece)
        elif symbols is None and match and "ByteFallback" in decoder:
            found[token_id] = bytes([int(match[1], 16)])
        else:
            asked.append(token_id)
    anchor = tokenizer.encode("a", add_special_tokens=False).ids
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    texts = tokenizer.decode_batch([[*anchor, token_id] for token_id in asked], skip_special_tokens=False)
    for token_id, text in zip(asked, texts, strict=True):
        found[token_id] = text.removeprefix(before).encode()
    return found


def _byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, as the library itself has it."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = sorted(alphabet - own.keys())
    moved = [byte for byte in range(256) if chr(byte) not in own]
    return own | dict(zip(others, moved, strict=True))


def _roles(folder: Path, specials: dict[str, int]) -> tuple[int | None, tuple[int, ...]]:
    """Begin and end of sequence, wherever the folder says."""
    bos_id: int | None = None
    eos_ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        content = _read(folder / name)
        begin, end = content.get("bos_token_id"), content.get("eos_token_id")
        bos_id = begin if bos_id is None and isinstance(begin, int) else bos_id
        eos_ids += [one for one in (end if isinstance(end, list) else [end]) if isinstance(one, int)]
    content = _read(folder / "tokenizer_config.json")
    for name in ("bos_token", "eos_token"):
        spelt = content.get(name)
        spelt = spelt.get("content") if isinstance(spelt, dict) else spelt
        token_id = specials.get(spelt) if isinstance(spelt, str) else None
        if token_id is not None and name == "eos_token":
            eos_ids.append(token_id)
        elif token_id is not None and bos_id is None:
            bos_id = token_id
    return bos_id, tuple(dict.fromkeys(eos_ids))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
