"""The transformers route: any decoder that transformers has, its layers tiled and its attention ours."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from engine.attention import PagedStep
from engine.batch import Batch
from engine.kernels.cpp_attention import CppCache
from engine.kernels.cpp_ops import fingerprint as kernels_fingerprint
from engine.kernels.torch_attention import KEY_TILE, QUERY_BLOCK
from engine.kernels.torch_tiles import PRODUCTS_PER_GROUP
from engine.kv_cache import Cache, make_caches
from engine.loading import ModelFacts
from engine.model import TiledModel, load_transformers_model
from engine.packed_linear import packed_level
from engine.progress import Progress
from engine.step_plan import StepPlanBuilder


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
        self._plans = StepPlanBuilder(device)
        self._level = packed_level(device, dtype)
        self._caches: dict[int, Cache] = {}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError for sizes that can't be served."""
        self._caches = make_caches(self.layers, num_blocks, block_size, self.dtype, self.device, self._level)
        in_cpp = [isinstance(cache, CppCache) for cache in self._caches.values()]
        if self._level is not None and any(in_cpp):
            self.fingerprint += f" attention={kernels_fingerprint(self._level)}"
        if not all(in_cpp):
            self.fingerprint += f" attention=torch-{QUERY_BLOCK}x{KEY_TILE}x{PRODUCTS_PER_GROUP}"

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [L, vocab_size]."""
        num_padded = self._model.num_rows(len(batch.token_ids))
        return self._model.forward(
            torch.from_numpy(_padded(batch.token_ids, num_padded)).to(self.device),
            torch.from_numpy(_padded(batch.positions, num_padded)).to(self.device),
            torch.from_numpy(np.ascontiguousarray(batch.logit_indices, dtype=np.int64)).to(self.device),
            int(batch.positions.max()),
            PagedStep(self._plans.build(batch), self._caches, self._level),
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
