"""The kernels are built once, by whoever comes first, and their absence is an answer rather than an error."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import packed_linear
from engine.kernels import build

_TINY = {
    "library.cpp": """
#include "value.h"
extern "C" __attribute__((visibility("default"))) int answer() { return kValue; }
""",
    "value.h": "constexpr int kValue = 42;\n",
    "kernel.cpp": "namespace tandem::TANDEM_LEVEL { int nothing() { return 0; } }\n",
    "threads.cpp": "",
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small library instead of the kernels, and without torch's slow headers; an empty cache, nothing decided."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name, text in _TINY.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TANDEM_KERNELS", raising=False)
    build.sources_hash.cache_clear()
    yield folder
    build.sources_hash.cache_clear()


def test_it_is_built_once_and_tells_how_far_it_is(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float | None]] = []
    compiled: list[str] = []
    run = build._run

    def recorded(command: list[str]) -> None:
        compiled.append(command[-3])
        run(command)

    monkeypatch.setattr(build, "_run", recorded)
    with ThreadPoolExecutor(3) as pool:  # as workers that start together
        paths = list(pool.map(lambda _: build.built(lambda text, share: told.append((text, share))), range(3)))
    assert len(set(paths)) == 1
    names = sorted(Path(name).name for name in compiled if name.endswith(".cpp"))
    assert names == ["kernel.cpp"] * 3 + ["library.cpp", "threads.cpp"]
    shares = [share for _, share in told]
    assert shares[0] == 0
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert 0.5 < shares[-1] <= 1  # type: ignore[operator]
    assert ctypes.CDLL(str(paths[0])).answer() == 42
    assert [path.name for path in paths[0].parent.iterdir() if path.suffix not in (".so", "")] == []


def test_a_change_in_a_header_is_another_library(sources: Path) -> None:
    first = build.sources_hash()
    (sources / "value.h").write_text("constexpr int kValue = 43;\n")
    build.sources_hash.cache_clear()
    assert build.sources_hash() != first


def test_sources_that_dont_compile(sources: Path) -> None:
    (sources / "kernel.cpp").write_text("this is no C++\n")
    with pytest.raises(build.NoKernels, match="did not compile") as failure:
        build.library()
    assert "kernel.cpp" in str(failure.value)
    (sources / "kernel.cpp").write_text(_TINY["kernel.cpp"])
    with pytest.raises(build.NoKernels, match="did not compile"):
        build.library()  # decided: a worker doesn't try again with every model it loads


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoKernels, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        build.library()


def test_a_compiler_that_cant_be_run(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_bytes(b"\0")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(build.NoKernels, match="can't be run"):
        build.library()


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "shorter by one"])
def test_a_damaged_library_is_built_anew(sources: Path, damage: str) -> None:
    """As after a power cut. To load one that was cut short would be a bus error."""
    path = build.built()
    whole = path.read_bytes()
    rest = {"empty": b"", "cut": whole[:4096], "zeros": bytes(len(whole)), "shorter by one": whole[:-1]}
    path.write_bytes(rest[damage])
    assert build.built() == path
    assert path.stat().st_size == len(whole)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_a_cache_that_cant_be_written(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.NoKernels, match="can't be kept"):
        build.library()


def test_one_built_ahead_needs_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = build.build_into(tmp_path / "ahead")
    monkeypatch.setenv("TANDEM_KERNELS", str(tmp_path / "ahead"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.built() == ahead
    assert ctypes.CDLL(str(ahead)).answer() == 42
    assert not (tmp_path / "cache").exists()
    # The code has moved on since.
    (sources / "value.h").write_text("constexpr int kValue = 43;\n")
    build.sources_hash.cache_clear()
    with pytest.raises(build.NoKernels, match="no C"):
        build.built()


def test_one_built_ahead_for_another_torch_isnt_taken(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = build.build_into(tmp_path / "ahead")
    monkeypatch.setenv("TANDEM_KERNELS", str(tmp_path / "ahead"))
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert build.built() != ahead


def test_other_machines(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.NoKernels, match="this is riscv64"):
        build.library()


def test_switched_off(sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, however many models are loaded."""
    monkeypatch.setenv("TANDEM_KERNELS", "off")
    monkeypatch.setattr(packed_linear, "_told", set())
    packed_linear.cpp_linear.load_operations.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert packed_linear.packed_level(torch.device("cpu"), torch.float32) is None
    assert [record.message for record in caplog.records] == ["plain torch multiplies: TANDEM_KERNELS=off"]


def test_the_command_says_why_there_are_none() -> None:
    """What `make setup` runs: never a traceback, and a missing compiler is no failure."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernels.build"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TANDEM_KERNELS": "off"},
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "kernels: TANDEM_KERNELS=off; plain torch is used instead"


def test_kept_objects_are_used_until_their_source_changes(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    run = build._run

    def recorded(command: list[str]) -> None:
        if "-c" in command:
            compiled.append(Path(command[command.index("-c") + 1]).name)
        run(command)

    monkeypatch.setattr(build, "_run", recorded)
    monkeypatch.setenv("TANDEM_KERNEL_OBJECTS", str(sources.parent / "objects"))
    build.built()
    assert sorted(set(compiled)) == ["kernel.cpp", "library.cpp", "threads.cpp"]
    compiled.clear()
    (sources / "value.h").write_text("constexpr int kValue = 43;\n")
    build.sources_hash.cache_clear()
    assert ctypes.CDLL(str(build.built())).answer() == 43
    assert compiled == ["library.cpp"], "only what includes the header"
