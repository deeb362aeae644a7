"""Every Triton kernel becomes machine code for the GPUs that matter, by the compiler that a GPU's machine would use.

What can be seen without running it: it compiles, fits the GPU's shared memory, keeps its accumulators in registers, and
uses the instructions that the kernels' texts promise. One capability and one variant of each kind here; `python
tests/engine/kernels/triton_compilation.py 80 full` compiles the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton isn't installed (pip install triton==3.7.1)")

SCRIPT = Path(__file__).with_name("triton_compilation.py")
ROOT = Path(__file__).parents[3]
CAPABILITY = 90
SHARED_MEMORY = 99 << 10
"""bytes that one program can have on the least of the GPUs from 8.0 on; what bfloat16 keeps within"""
UNFUSED = {"rotate_write_kernel", "attention_kernel", "finish_kernel", "scores_kernel", "noise_kernel"}


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"),  # a second run takes no time
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(SCRIPT), str(CAPABILITY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_fits(kernels: list[dict[str, Any]]) -> None:
    assert {entry["kernel"] for entry in kernels} == {
        "product_kernel",
        "epilogue_kernel",
        "rms_norm_kernel",
        "layer_norm_kernel",
        "embed_kernel",
        "rotate_write_kernel",
        "attention_kernel",
        "finish_kernel",
        "peaks_kernel",
        "scores_kernel",
        "winner_kernel",
        "noise_kernel",
    }
    for entry in kernels:
        assert entry["shared"] <= SHARED_MEMORY, entry
        # Heads of 256 elements are the widest; what they spill is a few addresses.
        assert entry["spilled"] <= (128 if entry["kernel"] == "attention_kernel" else 0), entry


def test_what_promises_bits_is_not_fused(kernels: list[dict[str, Any]]) -> None:
    entries = [entry for entry in kernels if entry["kernel"] in UNFUSED]
    assert {entry["kernel"] for entry in entries} == UNFUSED
    for entry in entries:
        assert not entry["fp_fusion"], entry
        assert entry["fused"] == 0, entry
    assert all(entry["div_rn"] for entry in entries if entry["kernel"] == "scores_kernel")


def test_products_use_the_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    products = [entry for entry in kernels if entry["kernel"] == "product_kernel"]
    assert len(products) >= 8
    assert all(entry["wgmma"] for entry in products)
    assert all(entry["mma"] for entry in kernels if entry["kernel"] == "attention_kernel")
    assert not any(entry["tf32"] for entry in kernels)
