"""The fast decoder: one model as a flat list of calls to `engine.kernels.ops`, run once per step.

Everything that doesn't change from step to step is bound when the list is made; a step takes views of buffers that are
already there and walks the list. Nothing is allocated (unless a step is larger than any before it) and no data is
looked at, so the same walk can be captured in a CUDA graph, or recorded as a program (`engine.kernels.program`) that
makes the same calls without Python. Buffers are in `engine.workspace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.decoder_spec import DecoderSpec, LayerSpec, RotarySpec, rotary_table
from engine.decoder_weights import Weight
from engine.kernels.cpp_draft import DraftOps
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import AttentionRule, HeadNorms, LayerCache, Ops, PackedLinear, Rotary, StepPlan
from engine.kernels.program import Program
from engine.workspace import ChoiceTensors, Views, Workspace, choice_inputs, step_inputs

Call = Callable[[Views, StepPlan], object]
"""what it returns is of no use"""


def _walk(calls: list[Call], views: Views, plan: StepPlan) -> None:
    for call in calls:
        call(views, plan)


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
        self._ending: list[Call] = []
        """of the wanted tokens only: what follows the last layer's attention"""
        self._tail = self._head()
        self._programs: tuple[Program, Program] | None = None
        self._num_skipped = torch.zeros(1, dtype=torch.int64)
        self._choosing: tuple[Program, Program] | None = None

    def bind_caches(self, caches: list[LayerCache]) -> None:
        """One per layer, made by the same ops; before the first step."""
        self._body, self._ending = [self._embed()], []
        for index, (layer, cache) in enumerate(zip(self.spec.layers, caches, strict=True)):
            self._body += self._ending + self._attention(f"layers.{index}", layer, cache)
            self._ending = self._behind_attention(f"layers.{index}")

    def record(self) -> None:
        """Make programs of the calls, after `bind_caches`; for operations that only write into what they are given."""
        views = self.workspace.views(2, 1).body
        a, b, c, d, e, f, g = (torch.zeros(1, dtype=torch.int32) for _ in range(7))  # only which is which counts
        plan = StepPlan(a, b, c, d, e, f, g, max_query_len=0, max_context_len=0)
        inputs = step_inputs(views, plan)
        self._programs = (
            Program(inputs, lambda: _walk(self._body, views, plan)),
            Program(inputs, lambda: _walk(self._ending + self._tail, views, plan)),
        )
        if isinstance(self._ops, CppOps):
            choices = ChoiceTensors(torch.zeros(1), torch.zeros(1), torch.zeros(1))
            inputs = inputs + choice_inputs(choices)
            choose = self._best_two(self._ops) if isinstance(self._ops, DraftOps) else self._choose_head(self._ops)

            def ending() -> None:
                _walk(self._ending, views, plan)
                choose(views, choices)

            def all_calls() -> None:
                _walk(self._body, views, plan)
                ending()

            self._choosing = Program(inputs, ending), Program(inputs, all_calls)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Write the plan's keys and values; float32 logits [L, vocab_size], valid until the next call."""
        views = self.workspace.views(len(plan.token_ids), len(plan.logit_indices))
        if self._programs is None:
            _walk(self._body, views.body, plan)
        else:
            self._programs[0].run(step_inputs(views.body, plan))
        if len(plan.logit_indices) == 0:
            return views.ending.logits
        views.begin_ending(plan.logit_indices)
        if self._programs is None:
            _walk(self._ending + self._tail, views.ending, plan)
        else:
            self._programs[1].run(step_inputs(views.ending, plan))
        return views.ending.logits

    @property
    def whole_step(self) -> Program | None:
        """All calls of a step whose logits are those of all its tokens, up to their choice: the inputs are
        `step_inputs`, then `choice_inputs`. None where steps aren't recorded or the operations can't.
        """
        return None if self._choosing is None else self._choosing[1]

    def new_choices(self, num_rows: int) -> torch.Tensor:
        """What the choice of tokens is written to, int64, one or some numbers a row; after `record`."""
        assert isinstance(self._ops, CppOps)
        return self._ops.new_choices(num_rows)

    @torch.inference_mode()
    def choose(self, plan: StepPlan, choices: ChoiceTensors) -> None:
        """`forward` and the choice of tokens in one, after `record`; logits that decide nothing aren't computed."""
        if self._programs is None or self._choosing is None:
            raise RuntimeError("steps that choose are recorded")
        views = self.workspace.views(len(plan.token_ids), len(plan.logit_indices))
        self._programs[0].run(step_inputs(views.body, plan))
        views.begin_ending(plan.logit_indices)
        self._choosing[0].run(step_inputs(views.ending, plan) + choice_inputs(choices))

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
        ]

    def _row_norms(self, name: str) -> tuple[Call, Call]:
        """Norms over all query heads together and over all key heads, in place."""
        rms_norm, eps = self._ops.rms_norm, self.spec.norm_eps
        query, key = self._tensor(f"{name}.query_norm"), self._tensor(f"{name}.key_norm")
        return (
            lambda views, plan: rms_norm(views.query_part, query, eps, views.query_part),
            lambda views, plan: rms_norm(views.key_part, key, eps, views.key_part),
        )

    def _behind_attention(self, name: str) -> list[Call]:
        """The rest of a layer, where each token is by itself: attended and hidden → hidden, by way of normed."""
        gate_up, activation = self._packed(f"{name}.gate_up"), self.spec.activation
        up = self._ops.linear_gated if self.spec.gated else self._ops.linear_activation
        return [
            *self._added(f"{name}.out", f"{name}.attention_post_norm", lambda views: views.attended),
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
        return [
            lambda views, plan: norm(views.hidden, views.normed),
            lambda views, plan: linear(views.normed, weight, views.logits, spec.logit_scale, spec.logit_softcap),
        ]

    def _choose_head(self, ops: CppOps) -> Callable[[Views, ChoiceTensors], None]:
        """The final norm, and the head up to its rows' tokens."""
        spec, weight, num_skipped = self.spec, self._packed("head"), self._num_skipped
        screen = self._tensor("head_screen") if "head_screen" in self._weights else None
        norm = self._norm("final_norm")

        def call(views: Views, choices: ChoiceTensors) -> None:
            norm(views.hidden, views.normed)
            ops.choose_head(
                views.normed,
                weight,
                screen,
                spec.logit_scale,
                spec.logit_softcap,
                choices.temperatures,
                choices.keys,
                num_skipped,
                views.logits,
                choices.token_ids,
            )

        return call

    def _best_two(self, ops: DraftOps) -> Callable[[Views, ChoiceTensors], None]:
        """The final norm, the head, and what comes first and second in its rows."""
        spec, weight, norm = self.spec, self._packed("head"), self._norm("final_norm")

        def call(views: Views, choices: ChoiceTensors) -> None:
            norm(views.hidden, views.normed)
            ops.linear(views.normed, weight, views.logits, spec.logit_scale, spec.logit_softcap)
            ops.best_two(views.logits, choices.temperatures, choices.keys, choices.token_ids)

        return call

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
