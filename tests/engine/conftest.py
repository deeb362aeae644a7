"""Tiny models, and sequences on a paged pool, for the tests of the model's side of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, pad_tables
from engine.default_model import fetch_default_model
from engine.kernels import build, cpp_choose
from engine.runner import ModelRunner
from tests.engine.models import write_tiny_model

BLOCK_SIZE = 16
NUM_BLOCKS = 96


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a named tiny model, written once."""
    written: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in written:
            written[name] = write_tiny_model(tmp_path_factory.mktemp(name), name)
        return written[name]

    return find


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; fetched and converted at first."""
    return fetch_default_model()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and the tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["kernels", "torch"])
def each_sampling_route(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sampling by the C++ kernels, where they can be had, and by torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(cpp_choose, "kernels_for", lambda logits: None)
        else:
            try:
                build.library()
            except build.NoKernels as error:
                pytest.skip(str(error))
            assert cpp_choose.kernels_for(torch.empty(0)) is not None
        yield


@dataclass
class Sequences:
    """Sequences on one runner's pool: blocks in shuffled order, tables as the scheduler would send them."""

    runner: ModelRunner
    seed: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.runner.info.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def share(self, source: str, target: str, num_blocks: int) -> None:
        """Start `target` with the first blocks of `source`, as a prefix hit does."""
        self.tables[target] = self.tables[source][:num_blocks]

    def batch(self, *rows: tuple[str, int, list[int]], logits: str = "all") -> Batch:
        """One step of rows (name, first position, token ids), with logits of all tokens or of each row's last."""
        block_size = self.runner.info.block_size
        tables: list[list[int]] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        for name, start, token_ids in rows:
            table = self.tables.setdefault(name, [])
            while len(table) * block_size < start + len(token_ids):
                table.append(self.free.pop())
            tables.append(table)
            row_positions = range(start, start + len(token_ids))
            positions += row_positions
            slots += [table[p // block_size] * block_size + p % block_size for p in row_positions]
            lengths.append(len(token_ids))
        starts = np.concatenate(([0], np.cumsum(lengths)))
        return Batch(
            token_ids=np.array([token for row in rows for token in row[2]], dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            slot_mapping=np.array(slots, dtype=np.int64),
            query_starts=starts.astype(np.int32),
            context_lens=np.array([start + len(ids) for _, start, ids in rows], dtype=np.int32),
            block_tables=pad_tables(tables),
            logit_indices=np.arange(starts[-1]) if logits == "all" else starts[1:].astype(np.int64) - 1,
        )

    def run(self, *rows: tuple[str, int, list[int]], logits: str = "all") -> torch.Tensor:
        # Logits are valid until the next step; tests compare those of several.
        return self.runner.forward(self.batch(*rows, logits=logits)).clone()


@pytest.fixture(scope="session")
def sequences() -> type[Sequences]:
    return Sequences


@pytest.fixture(scope="session")
def load_runner() -> Callable[..., ModelRunner]:
    """Load a folder with a small pool, on the transformers route unless told otherwise."""
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": NUM_BLOCKS,
        "threads": 1,
        "route": "transformers",
    }

    def load(folder: Path, **options: Any) -> ModelRunner:
        return ModelRunner.load(folder, **{**defaults, **options})

    return load
