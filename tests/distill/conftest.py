"""A tiny target with a chat template, and answers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cli.fake_model import write_fake_model
from distill.dataset import DataPlan, claim, generate
from distill.target import Opened, load_target, open_target
from engine.loading import read_json

HIDDEN = 48


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_target(folder: Path, seed: int = 3) -> Path:
    """Two random layers behind the byte tokenizer and chat template of the fake model.

    Large embeddings, small layers: the next token depends on the last one much more than on the rest, so that little
    training shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    write_fake_model(folder)
    raw = read_json(folder / "config.json")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=raw["vocab_size"],
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=raw["bos_token_id"],
        eos_token_id=raw["eos_token_id"],
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def opened(target_folder: Path) -> Opened:
    return open_target(target_folder)


@pytest.fixture(scope="session")
def plan(opened: Opened) -> DataPlan:
    return DataPlan(opened.facts.content_id, answer_tokens=3000, held_out_prompts=6, max_answer_tokens=24)


@pytest.fixture(scope="session")
def data(opened: Opened, plan: DataPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of answers."""
    folder = tmp_path_factory.mktemp("answers")
    claim(folder, plan)
    target = load_target(
        opened, torch.device("cpu"), threads=1, batch_size=16, max_answer_tokens=plan.max_answer_tokens
    )
    generate(target, folder, plan, lambda what, share: None)
    return folder
