"""Every implementation of `engine.kernels.ops.Ops` that can run here.

A test that takes `implementation` runs for plain torch and for the CPU's best level in full; for each other level it
runs without the cases marked `full_only`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.kernels import build
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps

CPU_FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
}
"""What a level needs, in the words of /proc/cpuinfo"""


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """The CPU's levels, the best last; asked of the system, not of the kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())
    return tuple(level for level, needed in CPU_FLAGS.items() if needed <= flags)


def built_levels() -> list[str]:
    """The levels of the C++ kernels that run here, the best last; none without a compiler."""
    try:
        best = build.level_number(build.library())
    except build.NoKernels:
        return []
    return [level for level in build.LEVELS if build.level_number(level) <= best]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """The C++ kernels compute on so many threads. They have been loaded."""
    before: int = torch.ops.tandem.num_threads()
    torch.ops.tandem.set_threads(count, [])
    try:
        yield
    finally:
        torch.ops.tandem.set_threads(before, [])


@dataclass(frozen=True, slots=True)
class Implementation:
    """One implementation under test."""

    name: str
    ops: Ops

    @property
    def rounds_weights(self) -> bool:
        """Attention's weights are rounded to bfloat16 where they meet bfloat16 values, which the contract allows."""
        return self.name == "avx512bf16"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full_only: a kernel's case that only the best level and plain torch run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" not in metafunc.fixturenames:
        return
    names = ["torch"]
    for level in CPU_FLAGS:
        lacking = pytest.mark.skip(reason=f"the CPU has no {level}")
        names.append(level if level in supported_levels() else pytest.param(level, marks=lacking))  # type: ignore[arg-type]
    metafunc.parametrize("implementation", names, indirect=True, scope="session")


def _implementation_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("implementation") if callspec else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    best = supported_levels()[-1:]
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        name = _implementation_of(item)
        full = name is None or name == "torch" or name in best
        (kept if full or not item.get_closest_marker("full_only") else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def implementation(request: pytest.FixtureRequest) -> Implementation:
    name: str = request.param
    if name == "torch":
        return Implementation(name, TorchOps(torch.device("cpu")))
    try:
        return Implementation(name, CppOps(name))
    except build.NoKernels as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=list(build.LEVELS))
def cpp_level(request: pytest.FixtureRequest) -> str:
    """Each level of the C++ kernels."""
    level: str = request.param
    if level not in built_levels():
        pytest.skip(f"no kernels at {level} here")
    return level


@pytest.fixture(scope="module")
def ops(cpp_level: str) -> CppOps:
    return CppOps(cpp_level)


@pytest.fixture
def some_ops() -> CppOps:
    """Of the best level."""
    if not built_levels():
        pytest.skip("no kernels here")
    return CppOps()


@pytest.fixture
def four_threads() -> Iterator[None]:
    """To be named behind the kernels that it is for, which load the library."""
    with on_threads(4):
        yield
