"""What a process holds, for those who look for leaks: open tasks, and whatever else its parts count and list."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import inspection_pb2, inspection_pb2_grpc


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The block table of one sequence, see BlockTable in inspection.proto."""

    worker_id: str
    epoch: int
    sequence_id: int
    slot: int | None
    block_ids: Sequence[int]
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds besides its tasks."""

    counts: dict[str, int]
    tables: list[HeldBlocks] = field(default_factory=list)


def open_tasks() -> dict[str, int]:
    """The tasks of the running event loop that have not ended, by the name of their coroutine.

    Raises RuntimeError where no loop runs.
    """
    return Counter(_name(task) for task in asyncio.all_tasks())


def add_inspection(server: Any, look: Callable[[], Awaitable[Holdings]]) -> None:
    """Serve tandem.v1.InspectionService on the server; `look` is asked each time, on the event loop."""
    inspection_pb2_grpc.add_InspectionServiceServicer_to_server(_InspectionServicer(look), server)


class _InspectionServicer(inspection_pb2_grpc.InspectionServiceServicer):
    def __init__(self, look: Callable[[], Awaitable[Holdings]]) -> None:
        self._look = look

    async def Inspect(self, request: Any, context: Any) -> Any:
        holdings = await self._look()
        response = inspection_pb2.InspectResponse(tasks=open_tasks(), held=holdings.counts)
        for table in holdings.tables:
            response.tables.add(
                worker_id=table.worker_id,
                epoch=table.epoch,
                sequence_id=table.sequence_id,
                slot=table.slot,
                block_ids=table.block_ids,
                ended=table.ended,
            )
        return response


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", type(coroutine).__name__))
