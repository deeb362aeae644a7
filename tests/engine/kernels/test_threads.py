"""The kernels' threads: every item once, by its own job; no race that a sanitizer sees; fit for forks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from engine.kernels import build, threads

STRESS = Path(__file__).with_name("threads_stress.cpp")


@pytest.fixture
def kernels() -> str:
    """The best level of this CPU."""
    try:
        return build.library()
    except build.NoKernels as error:
        pytest.skip(str(error))


def _compiled(folder: Path, *flags: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / "stress"
    sources = [str(build.SOURCES / "threads.cpp"), str(STRESS)]
    command = [compiler, "-std=c++20", *flags, f"-I{build.SOURCES}", *sources, "-pthread", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "-fsanitize=thread" in flags and "tsan" in done.stderr:
        pytest.skip("no thread sanitizer")
    assert done.returncode == 0, done.stderr
    return program


def _run(program: Path, num_jobs: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), str(num_jobs)], capture_output=True, text=True, timeout=100, check=False)


def test_every_item_runs_once(tmp_path: Path) -> None:
    done = _run(_compiled(tmp_path, "-O2"), 3000)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_sanitizer_sees_no_race(tmp_path: Path) -> None:
    done = _run(_compiled(tmp_path, "-O1", "-g", "-fsanitize=thread"), 500)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer can't run on this system")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_forked_child_computes(kernels: str) -> None:
    """It has none of the pool's threads, and must neither wait for them nor hang when it ends."""
    out = _python(
        """
        import os, sys, torch
        from engine.kernels import threads
        from engine.kernels.cpp_ops import CppOps
        torch.set_num_threads(1)
        threads.use_threads(3)
        ops = CppOps()
        weight = ops.pack(torch.randn(640, 96))
        x = torch.randn(40, 96)
        def result():
            out = torch.empty(40, 640)
            ops.linear(x, weight, out)
            return out
        expected = result()
        child = os.fork()
        if child == 0:
            assert torch.ops.tandem.num_threads() == 1
            assert torch.equal(result(), expected)
            threads.use_threads(2)
            assert torch.equal(result(), expected)
            sys.exit(0)  # with all that runs at exit
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(result(), expected)
        print("ok")
        """
    )
    assert out == "ok\n"


def test_callers_on_several_threads(kernels: str) -> None:
    """Python threads that call at once take turns."""
    from concurrent.futures import ThreadPoolExecutor

    from engine.kernels.cpp_ops import CppOps

    ops = CppOps(kernels)
    before = torch.ops.tandem.num_threads()
    threads.use_threads(3)
    try:
        weight = ops.pack(torch.randn(640, 96))
        xs = [torch.randn(1 + 9 * i, 96) for i in range(4)]

        def results(x: torch.Tensor) -> torch.Tensor:
            outs = []
            for _ in range(30):
                out = torch.empty(len(x), 640)
                ops.linear(x, weight, out)
                outs.append(out)
            return torch.stack(outs)

        alone = [results(x)[0] for x in xs]
        with ThreadPoolExecutor(4) as pool:
            for expected, found in zip(alone, pool.map(results, xs), strict=True):
                assert torch.equal(found, expected.expand_as(found))
    finally:
        threads.use_threads(before)


@pytest.mark.parametrize(("cores", "expected"), [([4], 1), ([0, 5], 2), ([0, 1, 2], 2), (list(range(8)), 7)])
def test_default_threads(cores: list[int], expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "allowed_cores", lambda: cores)
    monkeypatch.setattr(threads, "_CPU_LIMIT", tmp_path / "none")
    assert threads.default_threads() == expected


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 7), ("250000 100000", 2), ("50000 100000", 1)])
def test_default_threads_in_a_limited_container(
    limit: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(threads, "allowed_cores", lambda: list(range(8)))
    monkeypatch.setattr(threads, "_CPU_LIMIT", tmp_path / "cpu.max")
    assert threads.default_threads() == expected


def test_cores_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threads, "allowed_cores", lambda: [0, 1, 2, 3])
    assert threads.cores_to_pin(3) == [], "nobody has chosen cores"
    monkeypatch.setattr(threads, "allowed_cores", lambda: [1, 3])
    assert threads.cores_to_pin(2) == [1, 3]
    assert threads.cores_to_pin(3) == [], "more threads than cores"


def test_use_threads(kernels: str) -> None:
    before = torch.ops.tandem.num_threads()
    try:
        for count in (1, 3, 2):
            assert threads.use_threads(count) == torch.ops.tandem.num_threads() == count
        with pytest.raises(RuntimeError, match="at least 1"):
            torch.ops.tandem.set_threads(0, [])
        with pytest.raises(RuntimeError, match="one core per thread"):
            torch.ops.tandem.set_threads(2, [0])
    finally:
        threads.use_threads(before)


def test_pinned_threads_compute(kernels: str) -> None:
    from engine.kernels.cpp_ops import CppOps

    ops = CppOps(kernels)
    before = torch.ops.tandem.num_threads()
    cores = threads.allowed_cores()[:2]
    try:
        weight, x = ops.pack(torch.randn(640, 96)), torch.randn(40, 96)
        outs = torch.empty(2, 40, 640)
        threads.use_threads(1)
        ops.linear(x, weight, outs[0])
        torch.ops.tandem.set_threads(len(cores), cores)
        ops.linear(x, weight, outs[1])
        assert torch.equal(outs[0], outs[1])
    finally:
        torch.ops.tandem.set_threads(1, [])
        threads.use_threads(before)
