"""Decode steps as one native call: rows of one token each, from a few numbers per row to their next tokens.

A step's arrays, its calls and the choice of its tokens are made in C++ (kernels/csrc/decode_steps.h), in buffers that
are bound once per number of rows. Between two steps all of the model's weights pass through the caches, so whatever
Python would touch for a step costs ten times what it costs in a loop of its own.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import DecodeRows
from engine.decoder import Decoder
from engine.kernels.ops import StepPlan
from engine.kernels.program import Program
from engine.workspace import ChoiceTensors, choice_inputs, step_inputs

MOST_BOUND = 64
"""numbers of rows whose buffers are kept"""


class DecodeSteps:
    """Of one decoder on the CPU. Not thread-safe."""

    def __init__(self, decoder: Decoder, program: Program, block_size: int) -> None:
        """`program` is the decoder's `whole_step`."""
        self._decoder = decoder
        self._program = program
        self._block_size = block_size
        self._take(np.zeros((1, 1), np.int32))

    def run(self, rows: DecodeRows) -> list[int]:
        """See `engine.batch.ChoosingEngine.decode`."""
        num_rows = len(rows.temperatures)
        if rows.block_tables is not self._tables or self._generation != self._decoder.workspace.generation:
            self._take(rows.block_tables)
        if num_rows not in self._bound:
            self._bind(num_rows)
        tokens: list[int] = self._steps.run(rows.numbers, rows.temperatures, self._tables_tensor, rows.bell)
        return tokens

    def _take(self, tables: np.ndarray) -> None:
        """Bind everything anew, for these block tables."""
        self._tables, self._tables_tensor = tables, torch.from_numpy(tables)
        self._steps = self._program.decode_steps(self._block_size)
        self._bound: set[int] = set()
        self._generation = self._decoder.workspace.generation

    def _bind(self, num_rows: int) -> None:
        width = self._tables.shape[1]
        with torch.inference_mode():
            views = self._decoder.workspace.views(num_rows, num_rows).body
            if self._generation != self._decoder.workspace.generation or len(self._bound) == MOST_BOUND:
                self._take(self._tables)
            plan = StepPlan(
                token_ids=torch.zeros(num_rows, dtype=torch.int32),
                positions=torch.zeros(num_rows, dtype=torch.int32),
                slots=torch.zeros(num_rows, dtype=torch.int64),
                query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
                context_lens=torch.zeros(num_rows, dtype=torch.int32),
                block_tables=torch.zeros(num_rows, width, dtype=torch.int32),
                logit_indices=torch.arange(num_rows),
                max_query_len=1,
                max_context_len=width * self._block_size,
            )
            choices = ChoiceTensors(
                torch.zeros(num_rows),
                torch.zeros(num_rows, 2, dtype=torch.int64),
                self._decoder.new_choices(num_rows),
            )
        inputs = step_inputs(views, plan) + choice_inputs(choices)
        arrays = (plan.token_ids, plan.positions, plan.slots, plan.context_lens, plan.block_tables)
        places = [_place(inputs, array) for array in (*arrays, *choice_inputs(choices))]
        self._steps.bind(num_rows, inputs, places)
        self._bound.add(num_rows)


def _place(inputs: list[torch.Tensor], tensor: torch.Tensor) -> int:
    return next(place for place, other in enumerate(inputs) if other is tensor)
