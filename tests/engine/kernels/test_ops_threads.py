"""Threads: C++ bits don't depend on how many there are; plain torch's rows don't depend on each other, with any."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.kernels import build, threads
from tests.engine.kernels import test_ops_rows as rows
from tests.engine.kernels.conftest import Implementation, supported_levels
from tests.engine.kernels.oracle import assert_same_bits
from tests.engine.kernels.paged import Layer, Paged
from tests.engine.kernels.test_ops_attention import LAYERS, STEPS

NAMES = (
    "linear-bf16-deep",
    "linear-f32-wide-scale",
    "linear-bf16-wide-softcap",
    "add-f32-bias",
    "gated-bf16-silu",
    "activation-f32-gelu_tanh",
    "rms-to-bf16",
    "layer-to-f32-odd-no-bias",
    "embed-packed-bf16-odd-scale",
)


@pytest.fixture
def set_threads(implementation: Implementation) -> Iterator[Callable[[int], object]]:
    """Of whichever threads the implementation uses; put back at the end."""
    put: Callable[[int], object]
    if implementation.name == "torch":
        before, put = torch.get_num_threads(), torch.set_num_threads
    else:
        before, put = torch.ops.tandem.num_threads(), threads.use_threads
    yield put
    put(before)


@pytest.mark.parametrize("name", NAMES)
def test_rows(implementation: Implementation, set_threads: Callable[[int], object], name: str) -> None:
    make = next(make for own, make, _ in rows.CASES if own == name)
    many = torch.arange(150) % rows.NUM_ROWS
    results = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        case = make(implementation.ops, torch.Generator().manual_seed(5))
        together = case.start[many]
        case.run(case.x[many], together)
        for row in (0, 1, 20, 63, 149):
            alone = case.start[many[row]][None].clone()
            case.run(case.x[many[row]][None], alone)
            assert_same_bits(alone[0], together[row])
        results.append(together)
    if implementation.name != "torch":
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("layer", [pytest.param(layer, id=name) for name, layer, _ in LAYERS[:2]])
def test_attention(implementation: Implementation, set_threads: Callable[[int], object], layer: Layer) -> None:
    results = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        paged = Paged(implementation, layer, [before + new for before, new in STEPS])
        paged.write([(index, 0, before) for index, (before, _) in enumerate(STEPS) if before])
        steps = [(index, before, before + new) for index, (before, new) in enumerate(STEPS)]
        together = paged.attend(steps)
        for step, part in zip(steps, together.split([new for _, new in STEPS]), strict=True):
            assert_same_bits(paged.attend([step]), part)
        results.append(together)
    if implementation.name != "torch":
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


def test_the_best_level_is_the_cpus() -> None:
    try:
        best = build.library()
    except build.NoKernels as error:
        pytest.skip(str(error))
    assert best == supported_levels()[-1]
