"""The fast decoder: one model as a flat list of calls to `engine.kernels.ops`, run once per step.

Everything that doesn't change from step to step is bound when the list is made; a step takes views of buffers that are
already there and walks the list. Nothing is allocated (unless a step is larger than any before it) and no data is
looked at, so the same walk can be captured in a CUDA graph.

Buffers, for T tokens:

    hidden   float32 [T, hidden]      the residual stream
    normed   A       [T, hidden]      what the next product reads
    qkv      float32 [T, Q + 2 KV]    ──rotate_write──▶  queries A [T, Q]  and the cache
    attended A       [T, Q]
    mlp      A       [T, mlp]
    added    float32 [T, hidden]      a product on its way through a norm, where one follows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.decoder_spec import DecoderSpec, LayerSpec, RotarySpec, rotary_table
from engine.decoder_weights import Weight
from engine.kernels.ops import AttentionRule, HeadNorms, LayerCache, Ops, PackedLinear, Rotary, StepPlan

_ROWS = 64
"""Buffers grow to a multiple of this many rows."""
_KEPT_LOGIT_ROWS = 512
"""Rows of logits that are kept; a step that wants more (log-probabilities of a prompt) takes memory of its own."""


@dataclass(slots=True)
class Views:
    """The buffers' parts that one step uses; shapes in the module's text."""

    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    query_part: torch.Tensor
    """of qkv"""
    key_part: torch.Tensor
    queries: torch.Tensor
    attended: torch.Tensor
    mlp: torch.Tensor
    added: torch.Tensor
    last: torch.Tensor
    """float32 [L, hidden]: rows of hidden whose logits are wanted; hidden itself if all are"""
    last_normed: torch.Tensor
    logits: torch.Tensor
    """float32 [L, vocab_size]"""


Call = Callable[[Views, StepPlan], object]
"""what it returns is of no use"""


class Workspace:
    """The buffers; they grow and never shrink."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._num_tokens = 0
        self._num_logits = 0
        self._views: tuple[int, int, Views] | None = None

    def reserve(self, num_tokens: int, num_logits: int) -> None:
        """Make sure that steps of up to so many tokens and logits allocate nothing."""
        spec, heads = self._spec, self._spec.heads
        self._views = None
        if num_tokens > self._num_tokens:
            self._num_tokens = n = _rounded(num_tokens)
            queries, keys = heads.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
            self._hidden = self._empty(n, spec.hidden_size, torch.float32)
            self._normed = self._empty(n, spec.hidden_size, self._dtype)
            self._qkv = self._empty(n, queries + 2 * keys, torch.float32)
            self._queries = self._empty(n, queries, self._dtype).view(n, heads.num_heads, heads.head_dim)
            self._attended = self._empty(n, queries, self._dtype)
            self._mlp = self._empty(n, spec.mlp_size, self._dtype)
            self._added = self._empty(n, spec.hidden_size, torch.float32)
        if num_logits > self._num_logits:
            self._num_logits = n = _rounded(num_logits)
            self._last = self._empty(n, spec.hidden_size, torch.float32)
            self._last_normed = self._empty(n, spec.hidden_size, self._dtype)
            self._logits = self._empty(min(n, _KEPT_LOGIT_ROWS), spec.vocab_size, torch.float32)

    def views(self, num_tokens: int, num_logits: int) -> Views:
        """Valid until the next `reserve`; logits until the next step."""
        if self._views is None or self._views[:2] != (num_tokens, num_logits):
            if num_tokens > self._num_tokens or num_logits > self._num_logits:
                self.reserve(num_tokens, max(num_logits, 1))
            self._views = (num_tokens, num_logits, self._cut(num_tokens, num_logits))
        return self._views[2]

    def _cut(self, num_tokens: int, num_logits: int) -> Views:
        heads = self._spec.heads
        queries, keys = heads.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        hidden, qkv = self._hidden[:num_tokens], self._qkv[:num_tokens]
        if num_logits > len(self._logits):
            logits = self._empty(num_logits, self._spec.vocab_size, torch.float32)
        else:
            logits = self._logits[:num_logits]
        return Views(
            hidden=hidden,
            normed=self._normed[:num_tokens],
            qkv=qkv,
            query_part=qkv[:, :queries],
            key_part=qkv[:, queries : queries + keys],
            queries=self._queries[:num_tokens],
            attended=self._attended[:num_tokens],
            mlp=self._mlp[:num_tokens],
            added=self._added[:num_tokens],
            last=hidden if num_logits == num_tokens else self._last[:num_logits],
            last_normed=self._last_normed[:num_logits],
            logits=logits,
        )

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=self._device)


def _rounded(rows: int) -> int:
    return -(-rows // _ROWS) * _ROWS


class Decoder:
    """One model on one device. Not thread-safe."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        """`weights` under the names of `engine.decoder_weights`."""
        self.spec = spec
        self.workspace = Workspace(spec, dtype, device)
        self._weights = weights
        self._ops = ops
        self._dtype = dtype
        self._rotaries = {
            rotary: Rotary(rotary_table(rotary, max_model_len).to(device), rotary.rotary_dim, rotary.interleaved)
            for rotary in {layer.rotary for layer in spec.layers if layer.rotary is not None}
        }
        self._body: list[Call] = []
        self._tail = self._head()

    def bind_caches(self, caches: list[LayerCache]) -> None:
        """One per layer, made by the same ops; before the first step."""
        self._body = [self._embed()]
        for index, (layer, cache) in enumerate(zip(self.spec.layers, caches, strict=True)):
            self._body += self._attention(f"layers.{index}", layer, cache)
            self._body += self._mlp(f"layers.{index}")

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Write the plan's keys and values; float32 logits [L, vocab_size], valid until the next call."""
        num_logits = len(plan.logit_indices)
        views = self.workspace.views(len(plan.token_ids), num_logits)
        for call in self._body:
            call(views, plan)
        if num_logits:
            for call in self._tail:
                call(views, plan)
        return views.logits

    # --------------------------------------------------------------------------------------------- the list of calls

    def _embed(self) -> Call:
        embed, weights = self._ops.embed, self._weights
        table = weights["head"] if self.spec.tied_head else weights["embedding"]
        # A model that scales its embeddings was trained with the scale rounded to its own dtype.
        scale = torch.tensor(self.spec.embedding_scale, dtype=self._dtype).item()
        return lambda views, plan: embed(plan.token_ids, table, scale, views.hidden)

    def _attention(self, name: str, layer: LayerSpec, cache: LayerCache) -> list[Call]:
        spec, ops, heads = self.spec, self._ops, self.spec.heads
        qkv, rotary = self._packed(f"{name}.qkv"), self._rotary(layer.rotary)
        rule = AttentionRule(spec.attention_scale, layer.window, spec.attention_softcap)
        linear, rotate_write, attend = ops.linear, ops.rotate_write, ops.attend
        norms = None
        if spec.head_norms == "head":
            norms = HeadNorms(self._tensor(f"{name}.query_norm"), self._tensor(f"{name}.key_norm"), spec.norm_eps)
        return [
            self._normed(f"{name}.attention_norm"),
            lambda views, plan: linear(views.normed, qkv, views.qkv),
            *(self._row_norms(name) if spec.head_norms == "row" else ()),
            lambda views, plan: rotate_write(views.qkv, heads, norms, rotary, plan, cache, views.queries),
            lambda views, plan: attend(views.queries, heads, rule, plan, cache, views.attended),
            *self._added(f"{name}.out", f"{name}.attention_post_norm", lambda views: views.attended),
        ]

    def _row_norms(self, name: str) -> tuple[Call, Call]:
        """Norms over all query heads together and over all key heads, in place."""
        rms_norm, eps = self._ops.rms_norm, self.spec.norm_eps
        query, key = self._tensor(f"{name}.query_norm"), self._tensor(f"{name}.key_norm")
        return (
            lambda views, plan: rms_norm(views.query_part, query, eps, views.query_part),
            lambda views, plan: rms_norm(views.key_part, key, eps, views.key_part),
        )

    def _mlp(self, name: str) -> list[Call]:
        gate_up, activation = self._packed(f"{name}.gate_up"), self.spec.activation
        up = self._ops.linear_gated if self.spec.gated else self._ops.linear_activation
        return [
            *(() if self.spec.parallel else (self._normed(f"{name}.mlp_norm"),)),
            lambda views, plan: up(views.normed, gate_up, activation, views.mlp),
            *self._added(f"{name}.down", f"{name}.mlp_post_norm", lambda views: views.mlp),
        ]

    def _normed(self, name: str) -> Call:
        """hidden → normed; only rounded where there is no norm."""
        if name not in self._weights:
            return lambda views, plan: views.normed.copy_(views.hidden)
        norm = self._norm(name)
        return lambda views, plan: norm(views.hidden, views.normed)

    def _added(self, linear_name: str, norm_name: str, source: Callable[[Views], torch.Tensor]) -> list[Call]:
        """hidden += residual_scale · (source W), normalised on the way where such a norm exists."""
        weight, scale, eps = self._packed(linear_name), self.spec.residual_scale, self.spec.norm_eps
        linear_add, linear, rms_norm_add = self._ops.linear_add, self._ops.linear, self._ops.rms_norm_add
        if norm_name not in self._weights:
            return [lambda views, plan: linear_add(source(views), weight, scale, views.hidden)]
        norm = self._tensor(norm_name)
        return [
            lambda views, plan: linear(source(views), weight, views.added),
            lambda views, plan: rms_norm_add(views.added, norm, eps, scale, views.hidden),
        ]

    def _head(self) -> list[Call]:
        spec, linear, weight = self.spec, self._ops.linear, self._packed("head")
        norm = self._norm("final_norm")

        def gather(views: Views, plan: StepPlan) -> None:
            if views.last is not views.hidden:
                torch.index_select(views.hidden, 0, plan.logit_indices, out=views.last)

        return [
            gather,
            lambda views, plan: norm(views.last, views.last_normed),
            lambda views, plan: linear(views.last_normed, weight, views.logits, spec.logit_scale, spec.logit_softcap),
        ]

    def _norm(self, name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        weight, eps = self._tensor(name), self.spec.norm_eps
        if self.spec.norm == "rms":
            rms_norm = self._ops.rms_norm
            return lambda x, out: rms_norm(x, weight, eps, out)
        layer_norm = self._ops.layer_norm
        bias = self._tensor(f"{name}.bias") if self.spec.norm_bias else None
        return lambda x, out: layer_norm(x, weight, bias, eps, out)

    def _rotary(self, spec: RotarySpec | None) -> Rotary | None:
        return None if spec is None else self._rotaries[spec]

    def _packed(self, name: str) -> PackedLinear:
        weight = self._weights[name]
        assert isinstance(weight, PackedLinear)
        return weight

    def _tensor(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        assert isinstance(weight, torch.Tensor)
        return weight
