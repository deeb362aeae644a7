"""`make gpu-check` itself, on a toy: every section runs, in Triton's interpreter, and finds nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed (pip install triton==3.7.1)")

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_the_same_code_on_a_toy(tmp_path: Path) -> None:
    done = run("--tiny", "--device", "cpu", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"]
    names = [check["name"] for check in found["checks"]]
    for name in ("linear, bfloat16", "attend", "noise, bit by bit", "own bits: verified 5 at a time", "graphs"):
        assert name in names
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["memory, read or copied"]["value"] > 0
    assert figures["decode, 2 rows, graph"]["floor"] > 0
    assert "gap, 2 rows, running ahead" in figures
    assert figures["head, 2 rows, 64×64×64"]["note"] in ("same bits", "other bits")
    assert "own bits" in done.stdout
    assert "× floor" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "sees no CUDA GPU" in done.stderr


def test_a_cpu_runs_toys_only() -> None:
    done = run("--device", "cpu")
    assert done.returncode == 2
    assert "--tiny" in done.stderr
