"""Compiles the C++ kernels, once per machine: `library()` loads them, `python -m engine.kernels.build` builds ahead.

    csrc/<kernel>.cpp      once per level, without torch's headers: seconds each
    csrc/<kernel>_ops.cpp  once: what torch.library knows of it
                           → <cache>/kernels/<hash>/tandem_kernels.so

The hash is of the sources, the flags, the compiler and torch, so an old library is never loaded. A lock makes workers
that start together wait for the first. Where there is no compiler, or the CPU has none of the levels, `library()` says
so by NoKernels, and `torch_ops` takes over. A library that was cut short is built anew: to load it would end the
process.

`--into FOLDER` builds a library for machines without a compiler, which find it when `TANDEM_KERNELS` names the folder
(as it does in the engine's container image). Its hash leaves the compiler out: one made from other sources or for
another torch isn't taken.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from engine.model_cache import cache_folder
from engine.progress import Progress

SOURCES = Path(__file__).parent / "csrc"
_WITHOUT_LEVEL = ("threads",)
"""sources compiled once, without vectors of their own"""
_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
LEVELS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall")
_QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
"""GCC 12's own vector headers set off these two"""
_NAME = "tandem_kernels.so"
_ELF = struct.Struct("<4s36xq10xHH2x")
"""a header's magic number; place, entry size and length of the table of sections"""
_LEVEL_NUMBERS = {1: "avx2", 2: "avx512", 3: "avx512bf16"}


class NoKernels(RuntimeError):
    """The C++ kernels can't be used here; the message says why."""


_outcome: str | NoKernels | None = None
"""what `library` said; a failure isn't tried again"""


def library(progress: Progress | None = None) -> str:
    """Load the kernels, building them first if need be, and return the best level of this CPU.

    `torch.ops.tandem` holds the operations afterwards. Raises NoKernels.
    """
    global _outcome
    if _outcome is None:
        try:
            _outcome = _load(progress)
        except NoKernels as error:
            _outcome = error
    if isinstance(_outcome, NoKernels):
        raise _outcome
    return _outcome


def _load(progress: Progress | None) -> str:
    _require_architecture()
    if os.environ.get("TANDEM_KERNELS") == "off":
        raise NoKernels("TANDEM_KERNELS=off")
    path = built(progress)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise NoKernels(f"{path} can't be loaded: {error}") from error
    level = torch.ops.tandem.best_level()
    if level not in _LEVEL_NUMBERS:
        raise NoKernels("the CPU has no AVX2")
    return _LEVEL_NUMBERS[level]


def _require_architecture() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NoKernels(f"the C++ kernels are for x86-64, this is {platform.machine()}")


def level_number(level: str) -> int:
    """What the operations take as `level`. Raises ValueError for one that there isn't."""
    for number, name in _LEVEL_NUMBERS.items():
        if name == level:
            return number
    raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")


def built(progress: Progress | None = None) -> Path:
    """The library's file: the one that was built ahead, or else built here if it isn't there. Raises NoKernels."""
    ahead = os.environ.get("TANDEM_KERNELS")
    if ahead and _is_whole(path := Path(ahead) / _hash() / _NAME):
        return path
    compiler = _compiler()
    folder = cache_folder() / "kernels" / _hash(compiler)
    path = folder / _NAME
    if _is_whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(path):
                _build(compiler, path, progress)
    except OSError as error:
        raise NoKernels(f"the compiled kernels can't be kept: {error}; TANDEM_CACHE names another place") from error
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file is a 64-bit ELF that ends where it should: at its section headers, which linkers write last."""
    try:
        with path.open("rb") as file:
            header = file.read(_ELF.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF.size:
        return False
    magic, table, entry_size, num_entries = _ELF.unpack(header)
    return bool(magic == b"\x7fELF" and num_entries > 0 and table + entry_size * num_entries <= size)


def _compiler() -> str:
    wanted = os.environ.get("CXX", "c++")
    found = shutil.which(wanted)
    if found is None:
        raise NoKernels(f"there is no C++ compiler ({wanted}); on Debian or Ubuntu: sudo apt install g++")
    return found


def build_into(folder: Path, progress: Progress | None = None) -> Path:
    """Build the library of all levels, whatever this CPU has, for `TANDEM_KERNELS=FOLDER`. Raises NoKernels."""
    _require_architecture()
    path = folder / _hash() / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    _build(_compiler(), path, progress)
    return path


def _hash(compiler: str = "") -> str:
    version = ""
    if compiler:
        try:
            version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        except OSError as error:
            raise NoKernels(f"the C++ compiler can't be run: {error}") from error
    return hashlib.sha256(repr((version, torch.__version__, _FLAGS, LEVELS, sources_hash())).encode()).hexdigest()[:16]


@cache
def sources_hash() -> str:
    """One short hash of all sources, as they were when first asked for."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _jobs() -> list[tuple[str, Path, tuple[str, ...]]]:
    """(object name, source, flags), the slowest first."""
    sources = sorted(SOURCES.glob("*.cpp"))
    bindings = [path for path in sources if path.stem.endswith("_ops") or path.stem == "library"]
    once = [path for path in sources if path.stem in _WITHOUT_LEVEL]
    jobs = [(path.stem, path, _torch_flags()) for path in bindings]
    for path in sources:
        if path not in bindings and path not in once:
            jobs += [
                (f"{path.stem}.{level}", path, (*flags, f"-DTANDEM_LEVEL={level}")) for level, flags in LEVELS.items()
            ]
    return jobs + [(path.stem, path, ()) for path in once]


def _torch_flags() -> tuple[str, ...]:
    root = Path(torch.__file__).parent / "include"
    includes = (root, root / "torch" / "csrc" / "api" / "include")
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return (*(f"-isystem{folder}" for folder in includes), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-O1")


def _build(compiler: str, path: Path, progress: Progress | None) -> None:
    jobs = _jobs()
    num_done = 0

    def tell() -> None:
        if progress:
            progress("compiling the kernels (once)", num_done / (len(jobs) + 1))

    def compile_one(job: tuple[str, Path, tuple[str, ...]]) -> str:
        nonlocal num_done
        name, source, flags = job
        target = Path(folder) / f"{name}.o"
        command = [compiler, *_FLAGS, *_QUIET, *flags]
        kept = _kept_object(command, source)
        if kept is None or not kept.is_file():
            _run([*command, "-c", str(source), "-o", str(target)])
            if kept is not None:
                shutil.copy(target, kept.with_suffix(".partial"))
                kept.with_suffix(".partial").rename(kept)
        with telling:
            num_done += 1
            tell()
        return str(target if kept is None else kept)

    telling = Lock()
    tell()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, jobs))
        shared = path.with_suffix(".partial")
        libraries = Path(torch.__file__).parent / "lib"
        _run([compiler, "-shared", "-o", str(shared), *objects, f"-L{libraries}", "-ltorch_cpu", "-lc10", "-pthread"])
        shared.rename(path)


def _kept_object(command: list[str], source: Path) -> Path | None:
    """Where a compiled source is kept, by what went into it; None if it isn't."""
    folder = os.environ.get("TANDEM_KERNEL_OBJECTS")
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    read = subprocess.run([*command, "-E", "-P", str(source)], capture_output=True, check=False).stdout
    return Path(folder) / f"{hashlib.sha256(repr(command).encode() + read).hexdigest()[:16]}.o"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoKernels(f"the kernels did not compile:\n{' '.join(command)}\n{done.stderr[-4000:]}")


def _show(text: str, share: float | None) -> None:
    """One moving line on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K  [{'#' * round(20 * (share or 0)):<20}] {text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Build what isn't built. Where that can't be, say why; only sources that don't compile are a failure."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.build", description=main.__doc__)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="for machines without a compiler; see this module")
    folder = parser.parse_args().into
    began = time.monotonic()
    try:
        what = str(build_into(folder, _show)) if folder else library(_show)
    except NoKernels as error:
        text, failed = f"{error}; plain torch is used instead", "did not compile" in str(error)
    else:
        text, failed = f"{what}, {time.monotonic() - began:.0f} s", False
    end_of_line = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{end_of_line}kernels: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
