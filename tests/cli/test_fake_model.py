"""The fake model's folder, read by the same tokenizer class that the gateway uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from cli.fake_model import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID, VOCAB_SIZE, write_fake_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["hello world", "  two  spaces\n\ttabs", "Café 123 🦊好", "\x00\x7f", "".join(map(chr, range(256)))]
)
def test_ids_are_the_bytes_of_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=True) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_every_byte_has_its_own_id(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    # All 256 bytes, in an order in which no two neighbours form a character.
    assert [len(tokenizer.convert_ids_to_tokens(byte)) for byte in range(256)] == [1] * 256
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(VOCAB_SIZE))))) == VOCAB_SIZE


def test_chat_template_has_one_bos_and_control_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert ids == [BOS_ID, USER_ID, ord("a"), ASSISTANT_ID, ord("b"), EOS_ID, USER_ID, ord("c"), ASSISTANT_ID]


def test_config_says_what_the_engine_needs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "tandem_fake"
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (VOCAB_SIZE, BOS_ID, EOS_ID)
    assert config["max_position_embeddings"] == 4096
