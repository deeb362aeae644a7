"""Compiles every Triton kernel down to a GPU's machine code, on a machine without one; prints what came out as JSON.

    python triton_compilation.py 90           for compute capability 9.0, one variant of each kind
    python triton_compilation.py 80 full      every shape, dtype and epilogue: minutes

The operations are called as in a step, on tensors without memory (device "meta"). A driver that only names the GPU
stands in for CUDA's, and launches end after compiling. So what is compiled is what the launches ask for: their
constants, their warps and stages, their alignments.

Output: one object per compiled variant of a kernel, with its shared memory (bytes), registers, bytes spilled to the
stack, and how many of certain PTX instructions it has. Runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.kernels import triton_choose
from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, PackedLinear, Rotary, StepPlan
from engine.kernels.triton_linear import Epilogue, finish
from engine.kernels.triton_ops import TritonCache, TritonOps

BF16, F32 = torch.bfloat16, torch.float32
PTX = {
    "fused": r"\bfma\.rn(\.\w+)*\.f32",
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tf32": r"\.tf32",
    "div_rn": r"\bdiv\.rn\.f32",
}


class NoGpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def _meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plan(num_tokens: int, num_rows: int, context: int) -> StepPlan:
    int32, int64 = torch.int32, torch.int64
    return StepPlan(
        token_ids=_meta(num_tokens, dtype=int32),
        positions=_meta(num_tokens, dtype=int32),
        slots=_meta(num_tokens, dtype=int64),
        query_starts=_meta(num_rows + 1, dtype=int32),
        context_lens=_meta(num_rows, dtype=int32),
        block_tables=_meta(num_rows, context // 16, dtype=int32),
        logit_indices=_meta(num_rows, dtype=int64),
        max_query_len=1,
        max_context_len=context,
    )


def products(ops: TritonOps, full: bool) -> None:
    """Every tiling and every epilogue, at the widths of an 8B model and at odd ones."""
    for dtype in (BF16, F32) if full else (BF16,):
        for out_features, in_features in ((128256, 4096), (8192, 4096), (4096, 14336), (77, 91)):
            weight = PackedLinear(_meta(out_features, in_features, dtype=dtype), None, in_features, out_features)
            x = _meta(5, in_features, dtype=dtype)
            ops.linear(x, weight, _meta(5, out_features))
            if full or out_features == 4096:
                ops.linear_add(x, weight, 1.0, _meta(5, out_features))
        biased = PackedLinear(_meta(4096, 4096, dtype=dtype), _meta(4096), 4096, 4096)
        ops.linear(x=_meta(5, 4096, dtype=dtype), weight=biased, out=_meta(5, 4096), scale=0.5, softcap=30.0)
        for activation in ("silu", "gelu", "gelu_tanh", "relu") if full else ("gelu_tanh",):
            ops.linear_activation(_meta(5, 4096, dtype=dtype), biased, activation, _meta(5, 4096, dtype=dtype))
        for activation in ("silu", "gelu", "gelu_tanh", "relu") if full else ("silu",):
            for size in (14336, 1536):
                gated = PackedLinear(_meta(2 * size, 4096, dtype=dtype), None, 4096, size, gated=True)
                ops.linear_gated(_meta(5, 4096, dtype=dtype), gated, activation, _meta(5, size, dtype=dtype))


def library_epilogues(ops: TritonOps, full: bool) -> None:
    """Of numerics "fast"."""
    sums = _meta(5, 2 * 14336)
    for gated in (True, False) if full else (True,):
        weight = PackedLinear(_meta(2 * 14336, 8, dtype=BF16), None, 8, 14336 if gated else 28672, gated)
        finish(sums, weight, Epilogue(activation="silu" if gated else ""), _meta(5, weight.out_features, dtype=BF16))


def rows(ops: TritonOps, full: bool) -> None:
    for dtype in (BF16, F32) if full else (BF16,):
        for width in (576, 4096, 16384) if full else (4096,):
            x, weight = _meta(5, width), _meta(width)
            ops.rms_norm(x, weight, 1e-5, _meta(5, width, dtype=dtype))
            ops.layer_norm(x, weight, weight, 1e-5, _meta(5, width, dtype=dtype))
            ops.rms_norm_add(x, weight, 1e-5, 1.0, x)
        ops.embed(_meta(5, dtype=torch.int32), _meta(1000, 4096, dtype=dtype), 1.0, _meta(5, 4096))


SHAPES = ((32, 8, 128), (24, 1, 256), (9, 3, 64), (32, 32, 80), (12, 12, 96))


def attention(ops: TritonOps, full: bool) -> None:
    """Head dimensions and groups, with everything a rule can hold."""
    plan = _plan(5, 5, 4096)
    for dtype in (BF16, F32) if full else (BF16,):
        for num_heads, kv_heads, head_dim in SHAPES if full else SHAPES[:2]:
            heads = HeadShape(num_heads, kv_heads, head_dim)
            cache = _meta(100, kv_heads, 16, head_dim, dtype=dtype)
            layer = TritonCache(cache, cache, 16)
            qkv, queries = _meta(5, (num_heads + 2 * kv_heads) * head_dim), _meta(5, num_heads, head_dim, dtype=dtype)
            norms = HeadNorms(_meta(head_dim), _meta(head_dim), 1e-6)
            partial = Rotary(_meta(4096, head_dim // 2), head_dim // 2)
            ops.rotate_write(qkv, heads, norms, partial, plan, layer, queries)
            ops.rotate_write(qkv, heads, None, Rotary(_meta(4096, head_dim), head_dim, True), plan, layer, queries)
            out = _meta(5, num_heads * head_dim, dtype=dtype)
            if full or num_heads == 32:
                ops.attend(queries, heads, AttentionRule(0.1), plan, layer, out)
            ops.attend(queries, heads, AttentionRule(0.1, 128, 50.0, _meta(num_heads)), plan, layer, out)


def choice(ops: TritonOps, full: bool) -> None:
    triton_choose.choose(_meta(5, 128256), _meta(5), _meta(5, 2, dtype=torch.int64))
    triton_choose.noise_of((1, 2), 1000, torch.device("meta"))


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def _described(kernel: Any, capability: int) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.metadata.name,
        "capability": capability,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "bf16": ".bf16" in ptx or "b16" in ptx,
        "fp_fusion": kernel.metadata.enable_fp_fusion,
        **_resources(kernel.asm["cubin"]),
        **{name: len(re.findall(pattern, ptx)) for name, pattern in PTX.items()},
    }


def compiled(capability: int, full: bool) -> list[dict[str, Any]]:
    """Everything that is launched, for one capability."""
    triton.runtime.driver.set_active(NoGpu(capability))
    found: dict[int, Any] = {}
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[id(kernel)] = kernel

    JITFunction.run = compile_only
    try:
        ops = TritonOps(torch.device("cuda"))
        for part in (products, library_epilogues, rows, attention, choice):
            part(ops, full)
    finally:
        JITFunction.run = run
    return [_described(kernel, capability) for kernel in found.values()]


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), full="full" in sys.argv)))
