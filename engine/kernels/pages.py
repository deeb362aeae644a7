"""Zeroed memory on the host that costs nothing until it is touched."""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 64
"""bytes: a cache line, and the widest vector"""
_BIG_PAGE = 2 << 20
_WORTH_BIG_PAGES = 4 << 20
"""bytes from which numpy asks for them"""


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that begin at a cache line's start and are readable for one line beyond their end.

    They are pages that the system hands out at first touch, big ones where it has them (numpy asks for those). Large
    memory begins with a big page: its first part, which is used most, would otherwise lie in hundreds of small ones,
    each of which interrupts the step that first writes to it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    alignment = _BIG_PAGE if num_bytes >= _WORTH_BIG_PAGES else _ALIGNMENT
    memory = np.zeros(num_bytes + alignment + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
