"""A model folder without weights, for `--engine fake`: a byte-level tokenizer, a config and a chat template.

Ids 0 to 255 are the bytes of UTF-8 text (byte-level BPE without merges), so that text ⇄ ids is the identity on bytes:

    256 <|bos|>    257 <|eos|>    258 <|user|>    259 <|assistant|>

The folder is read by the gateway like that of any other model; only the fake engine can run it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS_ID = 256
EOS_ID = 257
USER_ID = 258
ASSISTANT_ID = 259
VOCAB_SIZE = 260
MAX_MODEL_LEN = 4096

SPECIAL_TOKENS = {BOS_ID: "<|bos|>", EOS_ID: "<|eos|>", USER_ID: "<|user|>", ASSISTANT_ID: "<|assistant|>"}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% elif message['role'] in ['user', 'system'] %}<|user|>{{ message['content'] }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    symbols = []
    num_moved = 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + num_moved))
            num_moved += 1
    return symbols


def write_fake_model(folder: str | Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write the files of the fake model into `folder`, which is made if need be; return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        "config.json": _config(max_model_len),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(max_model_len),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return folder


def _config(max_model_len: int) -> dict[str, Any]:
    return {
        "model_type": "tandem_fake",
        "architectures": ["TandemFake"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, content in SPECIAL_TOKENS.items()
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def _tokenizer_config(max_model_len: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "additional_special_tokens": [SPECIAL_TOKENS[USER_ID], SPECIAL_TOKENS[ASSISTANT_ID]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": CHAT_TEMPLATE,
    }
