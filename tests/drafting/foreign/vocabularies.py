"""Two tokenizers of different families, trained here, as model folders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from drafting.foreign.token_text import TokenTexts

CORPUS = (
    "The cat sat on the mat and looked at the old dog, which slept by the fire.",
    "A bridge of three arches carries the road across the river to the market town.",
    "Don't repeat yourself: say it once, say it well, and then say nothing more.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "価格は100円です。 Prices rise; 3.14 is not 22/7, and 2 + 2 = 4.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
) * 4


@cache
def byte_level(vocab_size: int = 420) -> Tokenizer:
    """As GPT-2, Llama 3 or SmolLM: bytes as printable characters, no begin of sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def sentence_piece(vocab_size: int = 460) -> Tokenizer:
    """As Llama 2 or Mistral: ▁ for spaces, one before the text, byte fallback, a begin of sequence."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Byte pieces are part of the vocabulary, not special tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """A folder with the tokenizer, and a config.json with these values."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), **config}))
    return folder


def texts_of(tokenizer: Tokenizer, folder: Path, bos: str | None = None, eos: str | None = None) -> TokenTexts:
    """Loaded as from a model's folder."""
    roles = {"bos_token_id": bos, "eos_token_id": eos}
    ids = {name: tokenizer.token_to_id(token) for name, token in roles.items() if token is not None}
    return TokenTexts.load(save(tokenizer, folder, **ids))


def gpt(folder: Path) -> TokenTexts:
    return texts_of(byte_level(), folder / "gpt", eos="<|end|>")


def llama(folder: Path) -> TokenTexts:
    return texts_of(sentence_piece(), folder / "llama", bos="<s>", eos="</s>")
