"""The memory that a step of `engine.decoder` works in.

For T tokens, A being the model's dtype:

    hidden   float32 [T, hidden]      the residual stream
    normed   A       [T, hidden]      what the next product reads
    qkv      float32 [T, Q + 2 KV]    ──rotate_write──▶  queries A [T, Q]  and the cache
    attended A       [T, Q]
    mlp      A       [T, mlp]
    added    float32 [T, hidden]      a product on its way through a norm, where one follows

Behind the last layer's attention no token looks at another, so only the L tokens whose logits are wanted go on from
there: the *ending* works in views of L rows, into which what it begins with is copied unless all tokens are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.decoder_spec import DecoderSpec
from engine.kernels.ops import StepPlan

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
    logits: torch.Tensor
    """float32 [L, vocab_size]"""


@dataclass(frozen=True, slots=True)
class ChoiceTensors:
    """How the tokens of wanted logits are chosen, and which they are."""

    temperatures: torch.Tensor
    """float32 [L]"""
    keys: torch.Tensor
    """int64 [L, 2], `noise.row_key`"""
    token_ids: torch.Tensor
    """out: int64 [L], or some numbers each"""


def choice_inputs(choices: ChoiceTensors) -> list[torch.Tensor]:
    """All tensors of a choice."""
    return [choices.temperatures, choices.keys, choices.token_ids]


def step_inputs(views: Views, plan: StepPlan) -> list[torch.Tensor]:
    """All tensors that differ from step to step."""
    return [
        views.hidden,
        views.normed,
        views.qkv,
        views.query_part,
        views.key_part,
        views.queries,
        views.attended,
        views.mlp,
        views.added,
        views.logits,
        plan.token_ids,
        plan.positions,
        plan.slots,
        plan.query_starts,
        plan.context_lens,
        plan.block_tables,
        plan.logit_indices,
    ]


@dataclass(frozen=True, slots=True)
class StepViews:
    """Of one step."""

    body: Views
    ending: Views
    """of L rows; the same as `body` if all tokens are wanted"""

    def begin_ending(self, logit_indices: torch.Tensor) -> None:
        """Copy the wanted tokens' rows of what the ending begins with."""
        if self.ending is not self.body:
            for name in ("hidden", "normed", "attended"):
                torch.index_select(getattr(self.body, name), 0, logit_indices, out=getattr(self.ending, name))


class Workspace:
    """The buffers; they grow and never shrink."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._num_tokens = 0
        self._num_logits = 0
        self.generation = 0
        """rises when views from before are of buffers that aren't used any more"""
        self._views: tuple[int, int, StepViews] | None = None

    def reserve(self, num_tokens: int, num_logits: int) -> None:
        """Make sure that steps of up to so many tokens and logits allocate nothing."""
        spec, heads = self._spec, self._spec.heads
        self._views = None
        self.generation += 1
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
            self._last_attended = self._empty(n, spec.heads.num_heads * spec.heads.head_dim, self._dtype)
            self._logits = self._empty(min(n, _KEPT_LOGIT_ROWS), spec.vocab_size, torch.float32)

    def views(self, num_tokens: int, num_logits: int) -> StepViews:
        """Valid until the next `reserve`; logits until the next step."""
        if self._views is None or self._views[:2] != (num_tokens, num_logits):
            if num_tokens > self._num_tokens or num_logits > self._num_logits:
                self.reserve(num_tokens, max(num_logits, 1))
            self._views = (num_tokens, num_logits, self._cut(num_tokens, num_logits))
        return self._views[2]

    def _cut(self, num_tokens: int, num_logits: int) -> StepViews:
        heads = self._spec.heads
        queries, keys = heads.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        qkv = self._qkv[:num_tokens]
        if num_logits > len(self._logits):
            logits = self._empty(num_logits, self._spec.vocab_size, torch.float32)
        else:
            logits = self._logits[:num_logits]
        body = Views(
            hidden=self._hidden[:num_tokens],
            normed=self._normed[:num_tokens],
            qkv=qkv,
            query_part=qkv[:, :queries],
            key_part=qkv[:, queries : queries + keys],
            queries=self._queries[:num_tokens],
            attended=self._attended[:num_tokens],
            mlp=self._mlp[:num_tokens],
            added=self._added[:num_tokens],
            logits=logits,
        )
        if num_logits == num_tokens:
            return StepViews(body, body)
        ending = replace(
            body,
            hidden=self._last[:num_logits],
            normed=self._last_normed[:num_logits],
            attended=self._last_attended[:num_logits],
            mlp=body.mlp[:num_logits],
            added=body.added[:num_logits],
        )
        return StepViews(body, ending)

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=self._device)


def _rounded(rows: int) -> int:
    return -(-rows // _ROWS) * _ROWS
