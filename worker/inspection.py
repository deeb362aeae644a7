"""What a worker holds: its own inventory of slots and block tables."""

from __future__ import annotations

from cluster.inspection import HeldBlocks, Holdings
from worker.executor import Executor
from worker.sequences import SequenceTable
from worker.stepping import StepThread


async def look(worker_id: str, epoch: int, steps: StepThread) -> Holdings:
    """Read between two steps. Ended sequences stay in their slots until the scheduler releases them."""

    def inventory(executor: Executor) -> Holdings:
        table = executor.sequences
        tables = [_held_blocks(worker_id, epoch, table, slot) for slot in table.slots()]
        return Holdings({"sequences": len(table), "live_sequences": sum(not one.ended for one in tables)}, tables)

    found: Holdings = await steps.call(inventory)
    return found


def _held_blocks(worker_id: str, epoch: int, table: SequenceTable, slot: int) -> HeldBlocks:
    sequence = table.get(slot)
    assert sequence is not None
    block_ids = table.block_tables[slot, : sequence.num_blocks].tolist()
    return HeldBlocks(worker_id, epoch, sequence.sequence_id, slot, block_ids, sequence.ended)
