"""The decoder route: a folder that `engine.families` knows, run by `engine.decoder`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.batch import Batch
from engine.decoder import Decoder
from engine.decoder_spec import DecoderSpec
from engine.decoder_weights import Checkpoint, WeightReader
from engine.description import Undescribed, describe
from engine.errors import IncompleteModel, UnsupportedModel
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps
from engine.kv_cache import LayerShape
from engine.loading import ModelFacts
from engine.packed_weights import WORTH_MAPPING, entry_name, mapped_weights
from engine.progress import Progress
from engine.step_plan import StepPlanBuilder


def decoder_spec(facts: ModelFacts, max_model_len: int) -> DecoderSpec | Undescribed:
    """What the decoder would run a checked folder by."""
    config: Any = AutoConfig.from_pretrained(facts.folder, local_files_only=True)
    return describe(config, max_model_len)


class DecoderModel:
    """Implements `engine.runner.Model`. Not thread-safe."""

    def __init__(
        self,
        facts: ModelFacts,
        spec: DecoderSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        *,
        cache: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Raises IncompleteModel for a checkpoint that lacks something, UnsupportedModel for heads of an odd shape."""
        self.device = device
        self.dtype = dtype
        self.vocab_size = spec.vocab_size
        self.layers = {
            index: LayerShape(spec.heads.kv_heads, spec.heads.head_dim, spec.heads.head_dim)
            for index in range(len(spec.layers))
        }
        self.ops = ops
        self.fingerprint = f"route=decoder kernels={ops.fingerprint}"
        self._spec = spec
        self._plans = StepPlanBuilder(device)
        if progress:
            progress("loading weights", None)
        reader = WeightReader(spec, Checkpoint(facts.folder), ops, dtype, device)
        num_bytes = facts.num_parameters * dtype.itemsize
        if device.type == "cpu" and not isinstance(ops, TorchOps) and num_bytes >= WORTH_MAPPING:
            name = entry_name(facts.content_id, dtype, ops.fingerprint)
            weights = mapped_weights(name, num_bytes, reader.items, cache)
        else:
            weights = dict(reader.items())
        self._decoder = Decoder(spec, weights, ops, dtype, device, max_model_len)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError for a block size that the operations don't take."""
        self._decoder.bind_caches(
            [self.ops.make_cache(num_blocks, block_size, self._spec.heads, self.dtype) for _ in self.layers]
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [L, vocab_size], valid until the next call."""
        return self._decoder.forward(self._plans.build(batch))


def refusal(facts: ModelFacts, spec: DecoderSpec, ops: Ops, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the decoder can't run a described model; None if it can. Reads no weights."""
    try:
        Checkpoint(facts.folder)
        ops.make_cache(1, block_size, spec.heads, dtype)
    except (IncompleteModel, UnsupportedModel, ValueError) as error:
        return str(error)
    return None
