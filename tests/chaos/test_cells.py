"""Fifteen cells of the matrix in one cluster: every pair of fault and process, fault and load, process and load.

`make chaos` runs the whole matrix, and a real model; see docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest
import pytest_asyncio

from tests.chaos.arena import Arena, open_arena
from tests.chaos.cells import Cell, cut_off_from_redis, every_cell, pairwise_cells
from tests.chaos.cluster import Options, running
from tests.chaos.faults import FAULTS, TARGETS
from tests.chaos.loads import LOADS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    options = Options()
    async with running(tmp_path_factory.mktemp("chaos"), options) as cluster, open_arena(cluster, options) as opened:
        yield opened


async def test_the_selection_has_every_pair() -> None:
    selection = pairwise_cells()
    assert len(selection) == 15
    found = {(strike.fault, strike.target, cell.load) for cell in selection for strike in cell.strikes}
    assert {(fault, target) for fault, target, _ in found} == set(product(FAULTS, TARGETS))
    assert {(fault, load) for fault, _, load in found} == set(product(FAULTS, LOADS))
    assert {(target, load) for _, target, load in found} == set(product(TARGETS, LOADS))


async def test_the_matrix_is_whole() -> None:
    found = [(strike.fault, strike.target, cell.load) for cell in every_cell() for strike in cell.strikes]
    assert len(found) == len(set(found))
    assert set(found) >= set(product(FAULTS, TARGETS, LOADS))


@pytest.mark.parametrize("cell", [*pairwise_cells(), cut_off_from_redis("plain")], ids=str)
async def test_no_stream_is_lost(arena: Arena, cell: Cell) -> None:
    result = await arena.run(cell)
    assert not result.losses + result.missed
    assert len(result.struck) == len(cell.strikes)
    assert result.tables_compared, "block tables were compared while streams ran"
