"""Paged attention behind transformers' attention interface.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `attend` in place of its own attention, with the queries,
keys and values of the whole packed batch. `attend` writes keys and values to the cache of the *active* step and reads
all context back through the block tables. transformers builds no mask for an implementation it has no mask for; what a
query may see follows from its position and the layer's window.

A layer's keys and values are the C++ kernels' where these can serve it, and plain torch's elsewhere
(engine/kernels/torch_attention.py, which also says why its bits don't depend on the batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine.kernels import cpp_attention, torch_attention
from engine.kernels.build import level_number
from engine.kernels.cpp_attention import CppCache
from engine.kernels.ops import AttentionRule, HeadShape, StepPlan
from engine.kernels.torch_attention import QueryBlocks
from engine.kv_cache import Cache, LayerShape

ATTENTION_NAME = "tandem_paged"


class Step(Protocol):
    """What attention does while a step is active."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, heads, T, D], key and value [1, kv_heads, T, D] → [1, T, heads, value_dim]."""
        ...


_active_step: ContextVar[Step] = ContextVar("active attention step")


@contextmanager
def active(step: Step) -> Iterator[None]:
    """While inside, attention calls of this thread go to `step`."""
    token = _active_step.set(step)
    try:
        yield
    finally:
        _active_step.reset(token)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = _window(module, layer, kwargs)
    out = _active_step.get().attend(layer, query, key, value, scaling, window, softcap, s_aux)
    return out.to(query.dtype), None


def _window(module: nn.Module, layer: int, kwargs: dict[str, Any]) -> int | None:
    """The layer's sliding window: from the call, else the module, else the configuration's list of layer types."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"] or None
    if hasattr(module, "sliding_window"):
        return module.sliding_window or None  # type: ignore[return-value]
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] == "sliding_attention":
        return config.sliding_window or None  # type: ignore[union-attr]
    return None


AttentionInterface.register(ATTENTION_NAME, _attend)


class ShapeProbe:
    """A step that computes nothing and records what each layer would store."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


class PagedStep:
    """Attention of one batch against the caches."""

    def __init__(self, plan: StepPlan, caches: Mapping[int, Cache], level: str | None) -> None:
        """`level`: that of the C++ kernels, where a cache is theirs."""
        self._plan = plan
        self._caches = caches
        self._level = 0 if level is None else level_number(level)
        self._blocks: QueryBlocks | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Step.attend`; zeros for padding tokens, which stand behind the plan's."""
        rule = AttentionRule(scaling, window, softcap, None if sinks is None else sinks.float().contiguous())
        num_real = len(self._plan.positions)
        cache, slots = self._caches[layer], self._plan.slots
        queries, keys, values = (_token_major(x, cache.keys.dtype)[:num_real] for x in (query, key, value))
        out = value.new_zeros((query.shape[2], query.shape[1], value.shape[3]), dtype=cache.keys.dtype)
        if isinstance(cache, CppCache):
            cpp_attention.write(self._level, keys, values, slots, cache)
            cpp_attention.attend(self._level, queries, rule, self._plan, cache, out[:num_real])
        else:
            cache.write(slots, keys, values)
            heads = HeadShape(query.shape[1], key.shape[1], key.shape[3])
            # All caches have blocks of one size.
            self._blocks = self._blocks or QueryBlocks(self._plan, cache)
            found = torch_attention.attend(queries, heads, rule, self._blocks, cache)
            out[:num_real] = found.view(num_real, *out.shape[1:])
        return out[None]


def _token_major(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, heads, T, D] → a view [T, heads, D] in which a head's elements are neighbours."""
    x = x[0].to(dtype)
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)
