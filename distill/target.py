"""Opens a target for distillation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from distill.dialogue import Dialogue
from distill.generation import Target, longest_conversation
from engine.decoder_route import DecoderModel, decoder_spec, refusal
from engine.decoder_spec import DecoderSpec
from engine.description import Undescribed
from engine.errors import UnsupportedModel
from engine.kernels.selection import select_ops
from engine.kernels.threads import use_threads
from engine.loading import ModelFacts, check_supported
from engine.progress import Progress


@dataclass(frozen=True, slots=True)
class Opened:
    """A target's folder, looked at; no weights yet."""

    folder: Path
    facts: ModelFacts
    spec: DecoderSpec
    tokenizer: Any


def open_target(folder: Path) -> Opened:
    """Raises ModelError: what the decoder route can't run can't be distilled."""
    facts = check_supported(folder)
    spec = decoder_spec(facts, facts.max_model_len)
    if isinstance(spec, Undescribed):
        raise UnsupportedModel(f"{folder} can't be distilled: {spec.reason}")
    return Opened(folder, facts, spec, AutoTokenizer.from_pretrained(folder, local_files_only=True))


def load_target(
    opened: Opened,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
    batch_size: int = 64,
    max_answer_tokens: int = 220,
    progress: Progress | None = None,
) -> Target:
    """Weights and a KV pool for `batch_size` conversations."""
    if device.type == "cpu":
        if threads:
            torch.set_num_threads(threads)
        use_threads(threads, progress)
    max_len = min(opened.facts.max_model_len, longest_conversation(max_answer_tokens) + 1)
    ops = select_ops(device, "auto")
    reason = refusal(opened.facts, opened.spec, ops, dtype, 16)
    if reason is not None:
        raise UnsupportedModel(f"{opened.folder} can't be distilled: {reason}")
    model = DecoderModel(opened.facts, opened.spec, ops, dtype, device, max_len, progress=progress)
    dialogue = Dialogue(opened.tokenizer)
    return Target(
        model,
        dialogue,
        opened.facts.eos_token_ids,
        max_answer_tokens=max_answer_tokens,
        batch_size=batch_size,
    )
