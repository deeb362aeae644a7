"""From a trained network to the folder that `--draft` takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.card import card
from distill.evaluation import Acceptance
from distill.network import draft_settings
from distill.target import Opened
from distill.training import Trainer
from engine.decoder_weights import Checkpoint
from engine.draft_folder import HEAD_TOKEN_IDS, WEIGHTS, embedding_digest, write_draft

_NOT_SETTINGS = frozenset(
    {
        *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "initializer_range"),
        *("is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "pretraining_tp"),
        *("problem_type", "return_dict", "transformers_version", "unk_token_id", "use_cache"),
    }
)
"""of a configuration, what says nothing about the decoder"""
_DIGITS = 4


def export(
    trainer: Trainer, opened: Opened, name: str, data: dict[str, Any], found: list[Acceptance], out: Path
) -> None:
    """Write the folder. `data`: what data.json holds; `found`: the evaluation."""
    spec = opened.spec
    embedding = Checkpoint(opened.folder).tensor(f"{spec.names.embedding}.weight", (spec.vocab_size, spec.hidden_size))
    settings = draft_settings(opened, trainer.recipe.layers)
    config = {
        "target": {
            "name": name,
            "model_type": opened.facts.model_type,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "embedding_sha256": embedding_digest(embedding),
        },
        "decoder": {key: value for key, value in settings.items() if key not in _NOT_SETTINGS},
        "recipe": asdict(trainer.recipe),
        "data": data,
        "acceptance": [_rounded(asdict(one)) for one in found],
    }
    tensors = {name: parameter.detach() for name, parameter in trainer.network.trained().items()}
    write_draft(out, config, {**tensors, HEAD_TOKEN_IDS: trainer.token_ids})
    (out / "README.md").write_text(card(config, (out / WEIGHTS).stat().st_size), "utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
