"""A transformers decoder, unchanged but for its layers' tiling and its attention: tokens and a step in, logits out.

The model's own `forward` runs, with its `logits_to_keep` naming the rows that need logits, so that whatever it does
around the output embedding (soft-capping, scaling) is done as it does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.attention import ATTENTION_NAME, ShapeProbe, Step, active
from engine.errors import IncompleteModel, UnsupportedModel
from engine.kernels.cpp_ops import fingerprint as kernels_fingerprint
from engine.kv_cache import LayerShape
from engine.linear import TILE_ROWS, multiplies_elsewhere, padded_rows, tile_layers
from engine.packed_linear import packed_level
from engine.progress import Progress
from engine.quiet import quiet_transformers
from engine.rotary import tabulate_rotary

_EXPERTS_IMPLEMENTATION = "batched_mm"
"""Mixture of experts: one product per token and expert, so that routing doesn't change a product's shape."""


class TiledModel:
    """A loaded model and what it stores per layer. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        """Takes over `model`, which must have been made with ATTENTION_NAME as its attention."""
        self._model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        self._check_attention(config)
        head = model.get_output_embeddings()
        if head is None:
            raise UnsupportedModel(f"{type(model).__name__} has no output embedding")
        self.vocab_size: int = head.weight.shape[0]
        level = packed_level(self.device, self.dtype)
        tile_layers(model, head, on_cpu=self.device.type == "cpu", level=level)
        self.products = f"tiled{TILE_ROWS}" if level is None else kernels_fingerprint(level)
        """what multiplies, for the fingerprint"""
        self._pads_rows = level is None or multiplies_elsewhere(model)
        self._rotary_tables = tabulate_rotary(model, max_model_len)
        self.layers = self._probe_layers(config.num_hidden_layers)

    @staticmethod
    def _check_attention(config: Any) -> None:
        if config._attn_implementation != ATTENTION_NAME:
            raise ValueError(f"the model was made with attention {config._attn_implementation!r}")

    def num_rows(self, num_tokens: int) -> int:
        """How many rows `forward` wants for a step of so many tokens."""
        return padded_rows(num_tokens) if self._pads_rows else num_tokens

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_indices: torch.Tensor,
        max_position: int,
        step: Step,
    ) -> torch.Tensor:
        """token_ids, positions int64 [T], T as `num_rows` says; logit_indices int64 [L] → float32 [L, vocab_size].

        `max_position` is the largest of `positions`, known on the host.
        """
        for table in self._rotary_tables:
            table.max_position = max_position
        with active(step):
            out = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_indices,
            )
        return out.logits[0].float()

    def _probe_layers(self, num_layers: int) -> dict[int, LayerShape]:
        """Run one tile of tokens to see what each layer stores; every layer must call our attention, once."""
        probe = ShapeProbe()
        tokens = torch.zeros(TILE_ROWS, dtype=torch.int64, device=self.device)
        self.forward(tokens, tokens, tokens[:1], 0, probe)
        if sorted(probe.layers) != list(range(num_layers)):
            missing = sorted(set(range(num_layers)) - set(probe.layers))
            raise UnsupportedModel(
                f"{type(self._model).__name__}: layers {missing} don't use transformers' attention interface"
            )
        return probe.layers


def load_transformers_model(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> PreTrainedModel:
    """Read a checked folder's weights. Raises IncompleteModel if tensors are missing or have another shape."""
    if progress:
        progress("loading weights", None)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: PreTrainedModel
    info: dict[str, Any]
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                experts_implementation=_EXPERTS_IMPLEMENTATION,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
            )  # type: ignore[misc]
    except OSError as error:
        raise IncompleteModel(f"{folder}: {error}") from error
    missing = sorted(info["missing_keys"])
    missing += sorted(f"{name} ({list(found)} instead of {list(own)})" for name, found, own in info["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise IncompleteModel(f"{folder}: the weight files lack or contradict {shown}")
    return model.to(device)  # type: ignore[arg-type]
