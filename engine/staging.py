"""Small arrays of integers on their way from the host to the device, once a step.

They lie in two flat buffers, one per width of integer, which grow by doubling and are used again every step; each array
starts at a multiple of 64 bytes. On a CPU what the device reads are views of the buffers that were filled. On a GPU the
host's buffers are pinned and copied to buffers of the same shape there, one copy each, behind whatever the stream still
runs; from memory that isn't pinned a copy would wait for the stream, and so would the host.

Two steps may be on their way at once, so there are two sets of buffers, used in turn. A set that is filled again waits
for its own last copy. On a CPU there is no copy to wait for: whoever runs a step later than it was staged must have run
it before the next but one is staged.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch

_ALIGNMENT = 64
"""bytes"""
_SMALLEST = 4096
"""bytes of a buffer at first"""


class _Buffer:
    """One flat, reused run of integers: filled on the host, read on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._align = _ALIGNMENT // dtype.itemsize
        self._reserve(_SMALLEST // dtype.itemsize)

    def fill(self, arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        """The arrays' values on the device, valid until the next call."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.size // self._align) * self._align
        if size > len(self._host):
            self._reserve(max(size, 2 * len(self._host)))
        for start, array in zip(starts, arrays, strict=True):
            self._numbers[start : start + array.size].reshape(array.shape)[...] = array
        if self._on_device is not self._host:
            self._on_device[:size].copy_(self._host[:size], non_blocking=True)
        pairs = zip(starts, arrays, strict=True)
        return [self._on_device[start : start + array.size].view(array.shape) for start, array in pairs]

    def _reserve(self, size: int) -> None:
        on_gpu = self._device.type == "cuda"
        # Buffers grow inside inference mode, and what is made there can't be copied to outside of it.
        with torch.inference_mode(False):
            self._host = torch.zeros(size, dtype=self._dtype, pin_memory=on_gpu)
            self._on_device = torch.zeros(size, dtype=self._dtype, device=self._device) if on_gpu else self._host
        self._numbers = self._host.numpy()


class _Buffers:
    """What the arrays of one step lie in."""

    def __init__(self, device: torch.device) -> None:
        self._int64 = _Buffer(torch.int64, device)
        self._int32 = _Buffer(torch.int32, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def put(
        self, int64: tuple[np.ndarray, ...], int32: tuple[np.ndarray, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._copied:
            self._copied.synchronize()
        found = self._int64.fill(int64), self._int32.fill(int32)
        if self._copied:
            self._copied.record()
        return found


class Staging:
    """For one device; not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._turns = cycle((_Buffers(device), _Buffers(device)))

    def put(
        self, int64: tuple[np.ndarray, ...], int32: tuple[np.ndarray, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The arrays, of any shape, where the device can read them; valid until the next but one call."""
        return next(self._turns).put(int64, int32)
