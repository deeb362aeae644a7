"""Zeroed memory on the host that costs nothing until it is touched."""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 64
"""bytes: a cache line, and the widest vector"""


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that begin at a cache line's start and are readable for one line beyond their end.

    They are pages that the system hands out at first touch, big ones where it has them (numpy asks for those).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + 2 * _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
