"""`make mutants`: plant named faults one at a time; each must turn a test red.

A mutant is a replacement of one piece of text by another, in one file, and the tests that must notice. The repository
is copied once; each mutant is planted in the copy, its tests run with -x, and the file is put back. A mutant that
survives, or whose text is not found exactly once, fails the run. `run.py NAME…` runs only those.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
TIMEOUT_S = 240
KERNELS_TIMEOUT_S = 900
"""the first faulty kernel compiles all of them, the others only what changed"""


def run_tests(copy: Path, tests: tuple[str, ...], *, own_kernels: bool = False) -> tuple[bool, str]:
    """Whether the tests pass in the copy, and the last lines they printed. `own_kernels`: compiled from the copy, and
    kept out of the user's cache.
    """
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'protos'}", "PYTHONDONTWRITEBYTECODE": "1"}
    timeout_s = TIMEOUT_S
    if own_kernels:
        environment["TANDEM_CACHE"] = str(copy.parent / "cache")
        environment["TANDEM_KERNEL_OBJECTS"] = str(copy.parent / "objects")
        timeout_s = KERNELS_TIMEOUT_S
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"timed out after {timeout_s} s"
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {' '.join(tests)}:\n{done.stdout}\n{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, failed[0][:110] if failed else ""


def plant(copy: Path, mutant: Mutant) -> str:
    """Put the fault into the copy; the file's text before. Raises SystemExit unless its place is found once."""
    path = copy / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {before.count(mutant.old)} times in {mutant.file}, not once")
    path.write_text(before.replace(mutant.old, mutant.new))
    return before


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in chosen}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder:
        copy = Path(folder) / "tandem"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        everything = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
        green, first = run_tests(copy, everything)
        if not green:
            raise SystemExit(f"the tests fail without any mutant: {first}")
        for mutant in chosen:
            began = time.monotonic()
            before = plant(copy, mutant)
            green, first = run_tests(copy, mutant.tests, own_kernels="/csrc/" in mutant.file)
            (copy / mutant.file).write_text(before)
            verdict = "SURVIVED" if green else "caught  "
            print(f"{verdict} {mutant.name:32} {time.monotonic() - began:5.1f} s  {first}", flush=True)
            if green:
                survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
