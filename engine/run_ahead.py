"""The next step's tokens without the host: what was chosen stays on the device and is read there.

    step n      forward → logits → choose_on_device → chosen ──┬─▶ remembered by slot            (device)
                                                               └─▶ copied to the host, behind it (PendingTokens)
    step n+1    built on the host while n still runs: positions, slots of the cache and noise keys don't depend on which
                token was chosen. Rows whose token the host doesn't know are *fed*: their token id is read from the
                memory of their slot, on the device.

So step n + 1 is launched before anybody has seen step n's tokens; the device goes from one to the other without a gap.
A row that turns out to have ended in step n was computed in vain in n + 1: its tokens are dropped, and what it wrote
lies beyond its sequence's end.

A choice that failed (-1) is fed as token 0; the host learns of it with the tokens and drops the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Fed:
    """Which tokens of a batch are still on the device."""

    at: np.ndarray
    """int64 [n]: flat tokens of the batch; their token ids there are of no account"""
    slots: np.ndarray
    """int64 [n]: the slots whose last chosen tokens they are"""


class PendingTokens:
    """Chosen tokens on their way to the host."""

    def __init__(self, chosen: torch.Tensor) -> None:
        """chosen int64 [L] on the device; the copy is queued behind what computes it."""
        on_gpu = chosen.device.type == "cuda"
        self._host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=on_gpu)
        self._host.copy_(chosen, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_there(self) -> bool:
        """Whether `token_ids` would return at once."""
        return self._copied is None or self._copied.query()

    def token_ids(self) -> list[int]:
        """Waits for the copy, and for nothing that was queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class TokenFeed:
    """By slot, the token that was chosen last. All calls are queued on the current stream, in order; none waits."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._last = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._device = device

    def remember(self, slots: np.ndarray, chosen: torch.Tensor) -> PendingTokens:
        """slots int64 [L], each once: whose next tokens `chosen`, int64 [L] on the device, are."""
        usable = chosen.clamp(min=0).to(torch.int32)
        self._last.index_copy_(0, self._on_device(slots), usable)
        return PendingTokens(chosen)

    def fill(self, token_ids: torch.Tensor, fed: Fed) -> None:
        """Put the remembered tokens into token_ids, int32 [T] on the device, where they are fed."""
        if len(fed.at):
            token_ids.index_copy_(0, self._on_device(fed.at), self._last.index_select(0, self._on_device(fed.slots)))

    def _on_device(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64)).to(self._device, non_blocking=True)
