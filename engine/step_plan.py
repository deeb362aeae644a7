"""From a batch, which lives in numpy on the host, to a step's index arrays on the device.

The arrays lie in two flat buffers, one per width of integer, which grow by doubling and are used again every step:

    int64   [ slots T | logit_indices L ]
    int32   [ token_ids T | positions T | query_starts R + 1 | context_lens R | block_tables R × B ]

Each part starts at a multiple of 64 bytes. On a CPU the plan's tensors are views of the buffers that were filled. On a
GPU the host's buffers are pinned and copied to buffers of the same shape there, one copy each, behind whatever the
stream still runs. A step may still run, or a copy still read its source, when the next plan is built: there are two
sets of buffers, used in turn, and a set waits for its own last copy.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch

from engine.batch import Batch
from engine.kernels.ops import StepPlan

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
        self._host = torch.zeros(size, dtype=self._dtype, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._on_device = torch.zeros(size, dtype=self._dtype, device=self._device) if on_gpu else self._host


class _Buffers:
    """What one plan lies in."""

    def __init__(self, device: torch.device) -> None:
        self._int64 = _Buffer(torch.int64, device)
        self._int32 = _Buffer(torch.int32, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def build(self, batch: Batch) -> StepPlan:
        if self._copied:
            self._copied.synchronize()
        slots, logit_indices = self._int64.fill((batch.slot_mapping, batch.logit_indices))
        token_ids, positions, query_starts, context_lens, block_tables = self._int32.fill(
            (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
        )
        if self._copied:
            self._copied.record()
        return StepPlan(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            logit_indices=logit_indices,
            max_query_len=int(np.diff(batch.query_starts).max(initial=0)),
            max_context_len=int(batch.context_lens.max(initial=0)),
        )


class StepPlanBuilder:
    """Makes plans for one device; a plan is valid until the next but one is built. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._turns = cycle((_Buffers(device), _Buffers(device)))

    def build(self, batch: Batch) -> StepPlan:
        """The batch's arrays where the device can read them; the batch itself isn't kept."""
        return next(self._turns).build(batch)
