"""The draft as it is trained: the target's first layers, its final norm, and a lens, in transformers' own code.

    hidden = layers(embedding of the tokens)          the embedding is the target's and stays as it is
    output = lens(norm(hidden))                       [hidden, hidden]: to what the target's head would have seen
    logits = output · (rows of the target's head)ᵀ    those of frequent tokens; they stay as they are too

Training starts near the goal: the layers are copies, and the lens is the ridge regression from the copies' output to
the target's features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from distill.batches import TrainBatch
from distill.errors import Refused
from distill.target import Opened
from engine.decoder_weights import Checkpoint
from engine.errors import UnsupportedModel

_PER_LAYER = ("layer_types", "no_rope_layers")
"""settings with an entry for each layer"""
_RIDGE = 0.01
"""of the mean of the squares"""


def draft_settings(opened: Opened, num_layers: int) -> dict[str, Any]:
    """The target's configuration with fewer layers, as config.json would hold it.

    Raises Refused for more than it has, UnsupportedModel for a target whose head has a bias.
    """
    if opened.spec.head_bias:
        raise UnsupportedModel(f"{opened.folder} can't be distilled: its head has a bias")
    config: Any = AutoConfig.from_pretrained(opened.folder, local_files_only=True)
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise Refused("layers", f"the target has {config.num_hidden_layers}, and a draft 1 of them or more")
    settings: dict[str, Any] = config.to_dict()
    settings["num_hidden_layers"] = num_layers
    for name in _PER_LAYER:
        if isinstance(settings.get(name), list):
            settings[name] = settings[name][:num_layers]
    return settings


class Network(nn.Module):
    """See the module's text."""

    def __init__(self, opened: Opened, num_layers: int) -> None:
        """With the target's weights; float32."""
        super().__init__()
        spec = opened.spec
        config = AutoConfig.for_model(**draft_settings(opened, num_layers))
        config.use_cache = False
        self.model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.lens = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)
        checkpoint = Checkpoint(opened.folder)
        with torch.no_grad():
            self.lens.weight.copy_(torch.eye(spec.hidden_size))
            for name, parameter in self.model.named_parameters():
                parameter.copy_(checkpoint.tensor(f"model.{name}", tuple(parameter.shape)))
            head = spec.names.embedding if spec.tied_head else spec.names.head
            full = checkpoint.tensor(f"{head}.weight", (spec.vocab_size, spec.hidden_size))
            self.full_head = full.to(torch.bfloat16)
        self.model.get_input_embeddings().weight.requires_grad_(False)

    def trained(self) -> dict[str, nn.Parameter]:
        """What training changes, under the names of the draft's file."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def normed(self, batch: TrainBatch) -> torch.Tensor:
        """[predicting tokens, hidden]: before the lens."""
        device_type = batch.token_ids.device.type
        with torch.autocast(device_type, torch.bfloat16):
            # Right-padded rows of a causal model need no mask.
            hidden = self.model(input_ids=batch.token_ids).last_hidden_state
        return hidden.flatten(0, 1)[batch.predicting]

    def forward(self, batch: TrainBatch) -> torch.Tensor:
        """bfloat16 [predicting tokens, hidden]: what the head is multiplied with."""
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16):
            output: torch.Tensor = self.lens(self.normed(batch))
        return output

    @torch.no_grad()
    def fit_lens(self, batches: Iterable[TrainBatch]) -> float:
        """Ridge regression from the present layers to the target's features; the share of variance explained."""
        width = self.lens.in_features
        device = self.lens.weight.device
        gram, cross = torch.zeros(width, width, device=device), torch.zeros(width, width, device=device)
        total, sums, count = 0.0, torch.zeros(width, device=device), 0
        for batch in batches:
            x, y = self.normed(batch).float(), batch.features.float()
            gram += x.T @ x
            cross += x.T @ y
            total += float(y.square().sum())
            sums += y.sum(0)
            count += len(y)
        regular = gram + torch.eye(width, device=device) * gram.diagonal().mean() * _RIDGE
        lens = torch.linalg.solve(regular, cross).T.contiguous()
        self.lens.weight.copy_(lens)
        error = total - 2 * float((lens.T * cross).sum()) + float((lens @ gram * lens).sum())
        return 1.0 - error / (total - float(sums.square().sum()) / max(count, 1))
