"""Paged attention behind transformers' attention interface.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `attend` in place of its own attention, with the queries,
keys and values of the whole packed batch. `attend` writes keys and values to the cache of the *active* step and reads
all context back through the block tables. transformers builds no mask for an implementation it has no mask for; what a
query may see follows from its position and the layer's window.

A layer whose memory is the C++ kernels' is theirs (engine/kernels/csrc/attention.cpp). The rest is plain torch. Its
arithmetic is float32 whatever the model's dtype, one online-softmax merge over tiles (Milakov & Gimelshein,
arXiv:1805.02867) in the order of positions. For tile j with scores s: m_j = max s, l_j = Σ exp(s − m_j),
o_j = Σ exp(s − m_j) v; with M = max_j m_j the result is Σ_j e^(m_j − M) o_j / Σ_j e^(m_j − M) l_j.

Bits don't depend on the batch: matrix products run in groups of one fixed shape, maxima are exact, row sums have one
length, and the merge is a chain of single additions and multiplications in which a tile that isn't there adds 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine.attention_plan import KEY_TILE, QUERY_BLOCK, AttentionPlan, Wave
from engine.kernels import cpp_attention
from engine.kernels.build import level_number
from engine.kernels.cpp_attention import CppCache
from engine.kernels.ops import AttentionRule
from engine.kernels.torch_tiles import grouped_products
from engine.kv_cache import KvCache, LayerShape

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
    """Attention of one batch against the cache."""

    def __init__(self, plan: AttentionPlan, cache: KvCache) -> None:
        self._plan = plan
        self._cache = cache
        self._level = None if cache.level is None else level_number(cache.level)

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
        memory = self._cache.cpp.get(layer)
        if memory is not None:
            rule = AttentionRule(scaling, window, softcap, None if sinks is None else sinks.float().contiguous())
            return self._attend_cpp(memory, query, key, value, rule)
        plan = self._plan
        num_heads, kv_heads = query.shape[1], key.shape[1]
        num_real = plan.num_tokens
        self._cache.write(
            layer,
            plan.places(kv_heads),
            key[0, :, :num_real].transpose(0, 1),
            value[0, :, :num_real].transpose(0, 1),
        )
        # [query blocks, kv_heads, QUERY_BLOCK, heads per kv head, D]; places and grouped heads are a product's rows
        queries = query[0].transpose(0, 1).index_select(0, plan.query_tokens).float() * scaling
        queries = queries.view(-1, QUERY_BLOCK, kv_heads, num_heads // kv_heads, query.shape[3]).transpose(1, 2)
        queries = queries.reshape(-1, kv_heads, QUERY_BLOCK * (num_heads // kv_heads), query.shape[3])
        parts = []
        for wave in plan.waves(window):
            query_rows, runs = wave.product_indices(kv_heads)
            keys, values = self._cache.read(layer, runs)
            parts.append(_attend_wave(wave, queries[wave.query_blocks], query_rows, keys, values, softcap, sinks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        # [query blocks, kv_heads, QUERY_BLOCK, group, Dv] → [places, heads, Dv] → [1, T, heads, Dv]
        out = out.transpose(1, 2).reshape(-1, num_heads, value.shape[3])
        return out.index_select(0, plan.token_places)[None]

    def _attend_cpp(
        self, memory: CppCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """As `attend`; the result is of the cache's dtype, zeros for padding tokens."""
        assert self._level is not None
        plan = self._plan.step_plan
        queries, keys, values = (_token_major(x, memory.keys.dtype)[: len(plan.positions)] for x in (query, key, value))
        cpp_attention.write(self._level, keys, values, plan.slots, memory)
        out = queries.new_zeros((query.shape[2], *queries.shape[1:]))
        cpp_attention.attend(self._level, queries, rule, plan, memory, out[: len(queries)])
        return out[None]


def _token_major(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, heads, T, D] → a view [T, heads, D] in which a head's elements are neighbours."""
    x = x[0].to(dtype)
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)


def _attend_wave(
    wave: Wave,
    queries: torch.Tensor,
    query_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries [q, kv_heads, rows, D]; query_rows, keys and values per product → float32 [q, kv_heads, QB, G, Dv]."""
    kv_heads, num_rows = queries.shape[1], queries.shape[2]
    num_products = wave.num_pieces * kv_heads  # the rest fills the last group
    shape = (wave.num_pieces, kv_heads, QUERY_BLOCK, num_rows // QUERY_BLOCK)

    keys = keys.float().view(len(query_rows), KEY_TILE, -1)
    values = values.float().view(len(query_rows), KEY_TILE, -1)
    scores = grouped_products(queries.flatten(0, 1).index_select(0, query_rows), keys.transpose(1, 2))
    visible = scores[:num_products].view(*shape, KEY_TILE)
    if softcap is not None:
        visible.div_(softcap).tanh_().mul_(softcap)
    partly_hidden = visible.index_select(0, wave.partly_hidden)
    partly_hidden.masked_fill_(wave.hidden[:, None, :, None, :], -torch.inf)
    visible.index_copy_(0, wave.partly_hidden, partly_hidden)
    peaks = visible.amax(dim=-1)
    # A tile that a query doesn't see has no peak; its weights are exp(-inf) = 0 whatever is subtracted.
    visible.sub_(peaks.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
    sums = visible.sum(dim=-1)
    partial = grouped_products(scores, values)
    return _merge(wave, peaks, sums, partial[:num_products].view(*shape, -1), sinks)


def _merge(
    wave: Wave, peaks: torch.Tensor, sums: torch.Tensor, partial: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Tiles to results: peaks and sums [n, kv_heads, QB, G], partial [n, kv_heads, QB, G, Dv] → as partial, n now q.

    `sinks` [heads] are logits that take weight and give no value (gpt-oss).
    """
    num_steps, num_blocks = wave.merge_order.shape
    tile_peaks = peaks.index_select(0, wave.merge_order.view(-1)).view(num_steps, num_blocks, *peaks.shape[1:])
    tile_peaks.masked_fill_(wave.absent.view(num_steps, num_blocks, 1, 1, 1), -torch.inf)
    peak = tile_peaks.amax(dim=0)
    total = torch.zeros_like(peak)
    if sinks is not None:
        sink = sinks.float().view(1, peak.shape[1], 1, peak.shape[3])
        peak = torch.maximum(peak, sink)
        total += (sink - peak).exp_()
    weights = (tile_peaks - peak).exp_()
    out = partial.new_zeros((num_blocks, *partial.shape[1:]))
    for step in range(num_steps):
        pieces = wave.merge_order[step]
        total += weights[step] * sums.index_select(0, pieces)
        out += weights[step][..., None] * partial.index_select(0, pieces)
    return out / total[..., None]
