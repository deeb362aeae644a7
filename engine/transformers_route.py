"""The transformers route: any decoder that transformers has, its layers tiled and its attention ours."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from engine.attention import PagedStep
from engine.attention_plan import KEY_TILE, QUERY_BLOCK, AttentionPlan
from engine.batch import Batch
from engine.kernels.cpp_ops import fingerprint as kernels_fingerprint
from engine.kernels.torch_tiles import PRODUCTS_PER_GROUP
from engine.kv_cache import KvCache
from engine.loading import ModelFacts
from engine.model import TiledModel, load_transformers_model
from engine.packed_linear import packed_level
from engine.progress import Progress


class TransformersModel:
    """Implements `engine.runner.Model`. Not thread-safe."""

    def __init__(
        self,
        facts: ModelFacts,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        self._model = TiledModel(load_transformers_model(facts.folder, dtype, device, progress), max_model_len)
        self.device = device
        self.dtype = dtype
        self.vocab_size = self._model.vocab_size
        self.layers = self._model.layers
        self.fingerprint = (
            f"route=transformers products={self._model.products} "
            f"device={_place(device)} torch={torch.__version__} transformers={transformers.__version__}"
        )
        self._max_kv_heads = max(shape.kv_heads for shape in self.layers.values())
        self._block_size = 0

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError for a block size that attention doesn't take."""
        if KEY_TILE % block_size:
            raise ValueError(f"block_size {block_size} must divide {KEY_TILE}")
        self._block_size = block_size
        level = packed_level(self.device, self.dtype)
        self._cache = KvCache(self.layers, num_blocks, block_size, self.dtype, self.device, level)
        if level is not None and self._cache.cpp:
            self.fingerprint += f" attention={kernels_fingerprint(level)}"
        if self._cache.torch_layers:
            self.fingerprint += f" attention={QUERY_BLOCK}x{KEY_TILE}x{PRODUCTS_PER_GROUP}"

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [L, vocab_size]."""
        num_padded = self._model.num_rows(len(batch.token_ids))
        plan = AttentionPlan(batch, num_padded, self._block_size, self._max_kv_heads, self.device)
        return self._model.forward(
            torch.from_numpy(_padded(batch.token_ids, num_padded)).to(self.device),
            torch.from_numpy(_padded(batch.positions, num_padded)).to(self.device),
            torch.from_numpy(np.ascontiguousarray(batch.logit_indices, dtype=np.int64)).to(self.device),
            int(batch.positions.max()),
            PagedStep(plan, self._cache),
        )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros(length, dtype=np.int64)
    out[: len(values)] = values
    return out


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}/cuda{torch.version.cuda}"
    # Products may be split over threads differently for another number of them.
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}/threads{torch.get_num_threads()}"
