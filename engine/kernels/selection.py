"""Which implementation of the operations runs, and at which level."""

from __future__ import annotations

import logging

import torch

from engine.errors import UnsupportedModel
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps

logger = logging.getLogger(__name__)

KERNELS = ("auto", "avx512bf16", "avx512", "avx2", "torch")


def select_ops(device: torch.device, kernels: str = "auto", *, fast_numerics: bool = False) -> Ops:
    """The operations for a device: `auto` is the best that it has, `torch` the fallback, the rest levels of a CPU.

    Raises UnsupportedModel if a level was asked for by name and can't be had.
    """
    if kernels == "torch":
        return TorchOps(device)
    if device.type != "cpu":
        return _gpu_ops(device, kernels, fast_numerics)
    try:
        return _cpp_ops(kernels)
    except (ImportError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        if kernels != "auto":
            raise UnsupportedModel(f"kernels {kernels!r} can't be used here: {why}") from error
        logger.warning("the C++ kernels can't be used, plain torch is: %s", why)
        return TorchOps(device)


def _cpp_ops(kernels: str) -> Ops:
    from engine.kernels.cpp_ops import CppOps

    return CppOps(None if kernels == "auto" else kernels)


def _gpu_ops(device: torch.device, kernels: str, fast_numerics: bool) -> Ops:
    if kernels != "auto":
        raise UnsupportedModel(f"kernels {kernels!r} are for CPUs; {device} takes auto or torch")
    try:
        from engine.kernels.triton_ops import TritonOps
    except ImportError as error:
        logger.warning("the Triton kernels can't be used, plain torch is: %s", error)
        return TorchOps(device)
    return TritonOps(device, "fast" if fast_numerics else "exact")
