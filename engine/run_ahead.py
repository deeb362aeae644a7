"""The next step without the host: tokens that were chosen stay on the device and are read there.

    host      launch n ─ launch n + 1 ────────── tokens of n ─ launch n + 2 ────────── tokens of n + 1 …
    device             [ step n              ][ step n + 1               ][ step n + 2 …
                         forward → logits → choose → chosen ──┬─▶ remembered by slot             (device)
                                                              └─▶ copied to the host, behind it  (PendingTokens)

Step n + 1 is built while n still runs: positions, places in the cache and noise keys don't depend on which tokens were
chosen. Rows whose token the host doesn't know are *fed*: its id is read on the device, from the memory of its slot. So
n + 1 is launched before anybody has seen n's tokens, and the device goes from one to the other without a gap.

A row that turns out to have ended in step n was computed in vain in n + 1: its tokens are dropped, and what it wrote
lies beyond what its sequence counts as computed, in a block that is still its own.

A choice that failed (-1) is fed as token 0; the host learns of it with the tokens and drops the row.

What a step does is in two parts: `AheadSteps.launch` stages its inputs at once, on the caller's thread, and submits the
rest to a stream (`engine.stream`). At most two steps are in flight, as many as staging has buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine import noise
from engine.batch import Batch, LaunchedRows
from engine.staging import Staging
from engine.stream import Mark, Stream

NOT_THERE = -(1 << 62)
"""what a token reads as before it is there: no id and no failure"""

Forward = Callable[[], torch.Tensor]
"""the part of a step that runs on the device: logits float32 [L, vocab_size]"""
Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`engine.kernels.ops.Ops.choose`, with all tensors and the result, int64 [L], on the device"""


@dataclass(frozen=True, slots=True)
class Fed:
    """Which tokens of a batch are still on the device; both int64 [n] and there, too."""

    at: torch.Tensor
    """flat tokens of the batch; their token ids there are of no account"""
    slots: torch.Tensor
    """the slots whose last chosen tokens they are"""


class PendingTokens:
    """Chosen tokens on their way to the host."""

    def __init__(self, host: torch.Tensor, mark: Mark) -> None:
        """host int64 [L]: where they will be once the mark is reached."""
        self._host = host
        self._mark = mark

    @property
    def is_there(self) -> bool:
        """Whether `token_ids` would return at once."""
        return self._mark.is_reached

    def wait(self) -> None:
        """Return when they are there; from any thread. Raises what went wrong on the device."""
        self._mark.wait()

    def token_ids(self) -> list[int]:
        """Waits for them, and for nothing that was launched later."""
        self._mark.wait()
        tokens: list[int] = self._host.tolist()
        return tokens


class TokenFeed:
    """By slot, the token that was chosen last. For work on a stream; nothing here waits for the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._last = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def remember(self, slots: torch.Tensor, chosen: torch.Tensor) -> None:
        """slots int64 [L], each once: whose next tokens `chosen`, int64 [L], are; both on the device."""
        self._last.index_copy_(0, slots, chosen.clamp(min=0).to(torch.int32))

    def fill(self, token_ids: torch.Tensor, fed: Fed) -> None:
        """Put the remembered tokens into token_ids, int32 [T] on the device, where they are fed."""
        if len(fed.at):
            token_ids.index_copy_(0, fed.at, self._last.index_select(0, fed.slots))


class AheadSteps:
    """Steps that are launched, not waited for. One thread launches; at most two steps are in flight."""

    def __init__(
        self,
        prepare: Callable[[Batch, Fed], Forward],
        choose: Choose,
        feed: TokenFeed,
        device: torch.device,
        stream: Stream,
    ) -> None:
        """`prepare` stages a batch; what it returns fills in the fed tokens from `feed` and runs it."""
        self._prepare = prepare
        self._choose = choose
        self._feed = feed
        self._stream = stream
        self._on_gpu = device.type == "cuda"
        self._staging = Staging(device)

    def launch(self, rows: LaunchedRows) -> PendingTokens:
        """See `engine.batch.AheadEngine`."""
        choices = rows.choices
        temperatures = np.array(choices.temperatures, np.float32)
        (keys, slots, at, fed_slots), (temperature_bits,) = self._staging.put(
            (noise.row_keys(choices.seeds, choices.output_indices), rows.slots, rows.fed_at, rows.fed_slots),
            (temperatures.view(np.int32),),
        )
        forward = self._prepare(rows.batch, Fed(at, fed_slots))
        host = torch.full((len(temperatures),), NOT_THERE, dtype=torch.int64, pin_memory=self._on_gpu)

        def run() -> None:
            with torch.inference_mode():
                logits = forward()
                if not len(host):
                    return  # chunks of prompts, none of them the last
                chosen = self._choose(logits, temperature_bits.view(torch.float32), keys)
                self._feed.remember(slots, chosen)
                host.copy_(chosen, non_blocking=True)

        self._stream.submit(run)
        return PendingTokens(host, self._stream.mark())
