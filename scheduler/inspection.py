"""What a scheduler holds: requests, sessions, links, and the block tables it has assigned."""

from __future__ import annotations

from cluster.inspection import HeldBlocks, Holdings
from scheduler.loop import Cell


async def look(cell: Cell) -> Holdings:
    """Everything that should be gone once no request is live, and what each worker's blocks are assigned to."""
    core, gateways = cell.core, cell.gateways
    counts = {
        "requests": len(core.requests),
        "owners": len(gateways.owners),
        "sessions": len(gateways.sessions),
        "pending_outputs": sum(session.num_pending for session in gateways.sessions.values()),
        "workers": len(cell.links),
        "draft_workers": len(cell.drafters),
        "referenced_blocks": sum(worker.pool.num_referenced for worker in core.workers.values()),
    }
    tables = [
        HeldBlocks(worker_id, cell.links[worker_id].epoch, sequence.sequence_id, sequence.slot, sequence.blocks)
        for worker_id, worker in core.workers.items()
        for sequence in worker.sequences
    ]
    return Holdings(counts, tables)
