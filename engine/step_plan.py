"""From a batch, which lives in numpy on the host, to a step's index arrays on the device (`engine.staging`).

int64   [ slots T | logit_indices L ]
int32   [ token_ids T | positions T | query_starts R + 1 | context_lens R | block_tables R × B ]
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Batch
from engine.kernels.ops import StepPlan
from engine.staging import Staging


class StepPlanBuilder:
    """Makes plans for one device; a plan is valid until the next but one is built. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device)

    def build(self, batch: Batch) -> StepPlan:
        """The batch's arrays where the device can read them; the batch itself isn't kept."""
        (slots, logit_indices), (token_ids, positions, query_starts, context_lens, block_tables) = self._staging.put(
            (batch.slot_mapping, batch.logit_indices),
            (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables),
        )
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
