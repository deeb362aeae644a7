"""The whole decoder on the Triton kernels, in the interpreter, against plain torch.

That a token's logits are its own is checked by `tests/bench/test_gpu_check.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.synthetic import Shape, random_decoder
from engine.batch import Batch, pad_tables
from engine.decoder import Decoder
from engine.kernels.ops import HeadShape
from engine.kernels.torch_ops import TorchOps
from engine.step_plan import StepPlanBuilder

pytest.importorskip("triton", reason="Triton isn't installed (pip install triton==3.7.1)")

from engine.kernels.triton_math import INTERPRETED
from engine.kernels.triton_ops import TritonOps

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=0: the kernels would need a GPU", allow_module_level=True)

CPU = torch.device("cpu")
SHAPE = Shape(60, 32, 40, 2, HeadShape(2, 1, 16))
TABLES = [[0, 2], [3]]
Row = tuple[int, int, int]


def forward(decoder: Decoder, rows: list[Row]) -> torch.Tensor:
    """rows: (sequence, first position, end); logits of all tokens."""
    flat = [(index, at) for index, first, end in rows for at in range(first, end)]
    ends = np.cumsum([0] + [end - first for _, first, end in rows])
    batch = Batch(
        token_ids=np.array([(index * 31 + at * 7) % 59 for index, at in flat], np.int32),
        positions=np.array([at for _, at in flat], np.int32),
        slot_mapping=np.array([TABLES[index][at // 16] * 16 + at % 16 for index, at in flat], np.int64),
        query_starts=ends.astype(np.int32),
        context_lens=np.array([end for _, _, end in rows], np.int32),
        block_tables=pad_tables([TABLES[index][: -(-end // 16)] for index, _, end in rows]),
        logit_indices=np.arange(len(flat)),
    )
    return decoder.forward(StepPlanBuilder(CPU).build(batch)).clone()


def fresh(ops: TritonOps | TorchOps) -> Decoder:
    decoder, _ = random_decoder(SHAPE, ops, torch.float32, CPU, 64, num_blocks=4, block_size=16)
    return decoder


def test_plain_torch_says_the_same() -> None:
    rows = [(0, 0, 17), (1, 0, 3)]
    logits = forward(fresh(TritonOps(CPU)), rows)
    expected = forward(fresh(TorchOps(CPU)), rows)
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 2e-5
