"""Text ⇄ token ids of one model, by its own tokenizer, and the threads on which that happens.

`ModelText` is synchronous and only reads after loading, so any thread may use it. Only calls that release the
interpreter's lock are made for long inputs (`encode_batch_fast`, `decode_batch`; plain `encode` holds it for seconds).
transformers is used for reading a model folder and for chat templates; its `PreTrainedTokenizerFast` brings no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.admission import Refusal
from gateway.detokenizer import (
    BytesDetokenizer,
    BytesPlan,
    TokenBytes,
    WindowDetokenizer,
    plan_bytes,
    start,
)
from gateway.spellings import spellings
from gateway.templates import ChatTemplate, Piece, TemplateRefusal

# Spellings listed per bad word and form.
_MAX_SPELLINGS = 64
# Words whose ids a tokenizer remembers, for each thread that encodes; none is ever given up for another. The library's
# 10,000 may take 80 MiB per thread, and save a text of 2,000 characters 0.1 ms more than these do.
CACHED_WORDS = 2_000


class ModelFolderError(Exception):
    """A model folder can't be used; the message is fit for a user."""


class TooManyTokens(Exception):
    """A text has more tokens than its caller can use."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as ids and as text."""

    token_ids: list[int]
    text: str


class ModelText:
    """One model's tokenizer, chat template and ids with a meaning."""

    def __init__(self, name: str, folder: str | Path) -> None:
        """Load from a folder laid out as transformers does; raises ModelFolderError."""
        self.name = name
        self._folder = Path(folder)
        config = _read_json(self._folder / "config.json", required=True)
        inner = config.get("text_config") or config
        tokenizer = self._load_tokenizer()
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _bound_cache(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_id_of = {added[token_id].content: token_id for token_id in self._special_ids}
        self.vocab_size = int(inner.get("vocab_size") or config.get("vocab_size") or 0)
        """Rows of the embedding: ids from 0 to vocab_size - 1 are legal."""
        if self.vocab_size <= 0:
            raise ModelFolderError(f"{self._folder}/config.json names no vocab_size")
        self.max_position_embeddings = int(inner.get("max_position_embeddings") or 0)
        """0 where the folder doesn't say."""
        generation_config = _read_json(self._folder / "generation_config.json")
        self.eos_token_ids = _eos_ids(generation_config, config, inner, {"eos_token_id": tokenizer.eos_token_id})
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self._adds_bos = self.bos_token_id is not None and self.bos_token_id in self._encode("", special=True)
        state = json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder is not None else None
        plan = plan_bytes(state)
        self.token_bytes = None if plan is None else TokenBytes(plan, self)
        self.longest_token_bytes = self._longest_input_bytes(plan)
        """No token stands for more bytes of a prompt; None where that can't be told."""
        self._ids_of: dict[bytes, list[int]] | None = None
        self._template: ChatTemplate | None = None
        if tokenizer.chat_template is not None:
            special = [token.content for token in added.values() if token.special]
            self._template = ChatTemplate(tokenizer, special, [token.content for token in added.values()])
        self._newline_ids = self._encode("\n")

    def _load_tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            return PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:
            missing = not (self._folder / "tokenizer.json").exists()
            why = "tokenizer.json is missing" if missing else str(error).partition("\n")[0]
            raise ModelFolderError(f"no usable tokenizer in {self._folder}: {why}") from error

    # ------------------------------------------------------------------------------------------- Vocabulary

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling; None for an id without one (a padded embedding row)."""
        return self._tokenizer.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text."""
        return token_id in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The special token that is spelt exactly so."""
        return self._special_id_of.get(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, by the tokenizer's own decoder."""
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    # --------------------------------------------------------------------------------------------- encoding

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be served."""
        return self._template is not None

    def encode_text(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The ids of a text. One BOS at most: the tokenizer adds none to a text that spells its own.

        With `max_tokens`, raises TooManyTokens instead of making a list of more; that alone would hold up everybody.
        """
        token_ids = self._encode(text, special=add_special_tokens, max_tokens=max_tokens)
        if add_special_tokens and self._adds_bos:
            return self._with_one_bos(token_ids)
        return token_ids

    def encode_chat(
        self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool, max_tokens: int | None = None
    ) -> PromptText:
        """A conversation's ids: exactly one BOS where the model has one to begin with, no control token from users.

        Raises Refusal naming the field where there is no template or it doesn't take the conversation, TooManyTokens
        where a piece of it has more than `max_tokens`.
        """
        if self._template is None:
            raise Refusal("chat", f"model {self.name} has no chat template")
        try:
            pieces = self._template.render(messages, add_generation_prompt)
        except TemplateRefusal as refusal:
            raise Refusal("chat", str(refusal)) from refusal
        token_ids: list[int] = []
        for index, piece in enumerate(pieces):
            token_ids += self._encode_piece(piece, index == 0, max_tokens)
        if self._adds_bos:
            token_ids = self._with_one_bos(token_ids)
        return PromptText(token_ids, "".join(piece.text for piece in pieces))

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        if bos is None:
            return token_ids
        if token_ids[:1] != [bos]:
            return [bos, *token_ids]
        return token_ids[1:] if token_ids[:2] == [bos, bos] else token_ids

    def _encode(self, text: str, special: bool = False, max_tokens: int | None = None) -> list[int]:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding))
        return encoding.ids

    def _encode_piece(self, piece: Piece, first: bool, max_tokens: int | None = None) -> list[int]:
        """A stretch of a rendered conversation, as it stands in the middle of the rest."""

        def encode(text: str) -> list[int]:
            return self._encode_literal(text) if piece.literal else self._encode(text, max_tokens=max_tokens)

        if first:
            return encode(piece.text)
        # After a newline, SentencePiece adds no space in front; the newline's ids are taken off again.
        token_ids = encode("\n" + piece.text)
        size = len(self._newline_ids)
        return token_ids[size:] if token_ids[:size] == self._newline_ids else encode(piece.text)

    def _encode_literal(self, text: str) -> list[int]:
        """The ids of text without any added token, whatever it spells."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        words = [normal] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(normal)]
        token_ids = [token.id for word in words for token in self._tokenizer.model.tokenize(word)]
        if len(text) > 1 and not self._special_ids.isdisjoint(token_ids):
            # The model's own vocabulary holds the control token as a word: spell it in two halves.
            half = len(text) // 2
            return self._encode_literal(text[:half]) + self._encode_literal(text[half:])
        return token_ids

    # -------------------------------------------------------------------------------------------- decoding

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> BytesDetokenizer | WindowDetokenizer:
        """A fresh detokenizer for output that continues the prompt."""
        return start(self.token_bytes, self, prompt_token_ids)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids that stand for themselves; an incomplete last character has no text."""
        text = self.decode(token_ids, skip_special_tokens)
        if not text.endswith("\ufffd"):
            return text
        if skip_special_tokens:
            detokenizer = self.detokenizer()
            return "".join([detokenizer.feed(token_id) for token_id in token_ids]) + detokenizer.finish()
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id; empty for one without."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    # ------------------------------------------------------------------------------------------- bad words

    def bad_word_sequences(self, word: str) -> list[tuple[int, ...]]:
        """The id sequences that would write the word, with or without a space before it; the shortest ones first."""
        bare = word.lstrip(" ") or word
        forms = {tuple(self._encode(bare)), tuple(self._encode(" " + bare))}
        mid = self._encode_piece(Piece(bare, literal=False), False)
        forms.add(tuple(mid))
        if self.token_bytes is not None:
            ids_of, longest = self._ids_by_bytes()
            plain = spellings(bare.encode(), ids_of, longest, _MAX_SPELLINGS)
            spaced = spellings(b" " + bare.encode(), ids_of, longest, _MAX_SPELLINGS)
            # One that opens with a bare space ends like a plain one, which is banned already.
            forms.update(plain)
            forms.update(ids for ids in spaced if self.token_bytes.of(ids[0]) != b" ")
        return sorted((form for form in forms if form), key=lambda form: (len(form), form))

    def _ids_by_bytes(self) -> tuple[dict[bytes, list[int]], int]:
        assert self.token_bytes is not None
        if self._ids_of is None:
            ids_of: dict[bytes, list[int]] = {}
            # Ids may have holes, so that their number says nothing about the largest.
            for token_id in sorted(self._tokenizer.get_vocab(with_added_tokens=True).values()):
                data = self.token_bytes.of(token_id)
                if data and token_id < self.vocab_size:
                    ids_of.setdefault(data, []).append(token_id)
            self._ids_of = ids_of
        return self._ids_of, max(map(len, self._ids_of), default=0)

    # ---------------------------------------------------------------------------------------------- bounds

    def _longest_input_bytes(self, plan: BytesPlan | None) -> int | None:
        """See `longest_token_bytes`: only where every byte of a prompt ends up in a token."""
        if plan is None:
            return None
        normalizer = self._tokenizer.normalizer
        shrinking = 1 if normalizer is None else _shrinking(json.loads(normalizer.__getstate__()))
        added = self._tokenizer.get_added_tokens_decoder().values()
        if shrinking is None or any(token.lstrip or token.rstrip for token in added):
            return None
        symbols = self._tokenizer.get_vocab(with_added_tokens=True)
        return shrinking * max(len(symbol.encode()) for symbol in symbols)


def _bound_cache(tokenizer: Tokenizer) -> None:
    """Before the first text: what a thread has remembered by then stays until the thread ends."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:  # those of WordPiece and WordLevel remember nothing
        resize(CACHED_WORDS)


def _shrinking(normalizer: dict[str, Any]) -> int | None:
    """By how much at most a normalizer makes a text shorter, in bytes; None: without bound, or unknown."""
    kind = normalizer["type"]
    if kind == "Sequence":
        factor = 1
        for step in normalizer["normalizers"]:
            inner = _shrinking(step)
            if inner is None:
                return None
            factor *= inner
        return factor
    if kind == "Prepend" or (kind == "Replace" and normalizer["pattern"] == {"String": " "} and normalizer["content"]):
        return 1
    # Composition: three jamo of three bytes become one syllable of three; other compositions gain less.
    return 4 if kind == "NFC" else None


def _eos_ids(*sources: dict[str, Any]) -> frozenset[int]:
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids.add(token_id)
    return frozenset(ids)


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelFolderError(f"{path} is missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: {error}") from error
