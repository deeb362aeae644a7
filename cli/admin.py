"""What the scheduler's AdminService is asked: protobuf ends here."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc

from cluster.errors import TandemError, from_rpc_error

_TIMEOUT_S = 5.0
_STATES = {
    admin_pb2.WORKER_STATE_UNSPECIFIED: "unknown",
    admin_pb2.WORKER_STATE_SERVING: "serving",
    admin_pb2.WORKER_STATE_DRAINING: "draining",
}


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker; the fields are those of `admin.proto`."""

    worker_id: str
    model: str
    fingerprint: str
    epoch: int
    state: str
    running: int
    max_sequences: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    referenced_blocks: int
    steps_in_flight: int
    steps: int
    last_step_s: float
    drafting: bool
    generated_tokens: int
    decode_rows: int
    draft_budget_tokens: int
    accepted_tokens: int
    acceptance: tuple[float, ...]
    """by position"""
    speculation_gain: float
    position_drafted_tokens: tuple[int, ...]
    """verified behind right ones, by position"""
    position_accepted_tokens: tuple[int, ...]
    plain_steps: tuple[tuple[float, float], ...]
    """(tokens, seconds), by tokens"""
    drafting_steps: tuple[tuple[float, float], ...]
    drafting_s: float
    """of its steps, guessing drafts or waiting for them"""


@dataclass(frozen=True, slots=True)
class DraftWorkerStatus:
    """One draft worker."""

    worker_id: str
    model: str
    address: str
    proposer: str


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """One gateway."""

    gateway_id: str
    live_requests: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the scheduler's start."""

    requests_accepted: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    resumptions: int
    fingerprint_crossings: int
    evictions: int


@dataclass(frozen=True, slots=True)
class CellStatus:
    """The cell at one moment."""

    term: int
    uptime_s: float
    workers: tuple[WorkerStatus, ...]
    draft_workers: tuple[DraftWorkerStatus, ...]
    gateways: tuple[str, ...]
    gateway_sessions: tuple[GatewayStatus, ...]
    waiting: int
    running: int
    counters: Counters
    draining: bool
    cell: str
    leading: bool
    """the scheduler that answered leads the cell; a standby knows nothing of the rest"""
    leader: str
    """HOST:PORT of the scheduler that does; empty: nobody"""


def status(scheduler: str) -> CellStatus:
    """Ask the scheduler at HOST:PORT, or the leader if that one is a standby and its leader answers.

    Raises TandemError.
    """
    found = cell_status(_call(scheduler, "GetStatus", admin_pb2.GetStatusRequest()))
    if found.leading or not found.leader:
        return found
    try:
        return cell_status(_call(found.leader, "GetStatus", admin_pb2.GetStatusRequest()))
    except TandemError:
        return found


SCHEDULER = "scheduler"
"""names the scheduler that is asked, to `drain`"""


def drain(scheduler: str, name: str) -> str:
    """Begin to drain the process of that name, the scheduler at that address, or the whole cell if it is empty.

    A standby says who leads, and that one is asked, except to drain the standby itself. Returns what is draining.
    Raises TandemError.
    """
    if name == SCHEDULER:
        _call(scheduler, "Drain", admin_pb2.DrainRequest(scheduler=True))
        return f"the scheduler at {scheduler}"
    if name:
        found = status(scheduler)
        if name in found.gateways:
            _drain(scheduler, admin_pb2.DrainRequest(gateway_id=name))
            return f"gateway {name}"
        if name in (drafter.worker_id for drafter in found.draft_workers):
            _drain(scheduler, admin_pb2.DrainRequest(draft_worker_id=name))
            return f"draft worker {name}"
    _drain(scheduler, admin_pb2.DrainRequest(worker_id=name))
    return f"worker {name}" if name else "the whole cell"


def _drain(scheduler: str, request: admin_pb2.DrainRequest) -> None:
    try:
        _call(scheduler, "Drain", request)
    except TandemError as error:
        leader = error.metadata.get("leader", "")
        if error.reason != "NOT_LEADER" or not leader:
            raise
        _call(leader, "Drain", request)


def cell_status(message: admin_pb2.GetStatusResponse) -> CellStatus:
    """The answer of the scheduler in our own types."""
    return CellStatus(
        term=message.term,
        uptime_s=message.uptime_s,
        workers=tuple(_worker(worker) for worker in message.workers),
        draft_workers=tuple(
            DraftWorkerStatus(draft.worker_id, draft.model, draft.address, draft.proposer)
            for draft in message.draft_workers
        ),
        gateways=tuple(message.gateways),
        gateway_sessions=tuple(
            GatewayStatus(gateway.gateway_id, gateway.live_requests, gateway.draining)
            for gateway in message.gateway_sessions
        ),
        waiting=message.waiting,
        running=message.running,
        counters=Counters(**{name: getattr(message.counters, name) for name in Counters.__slots__}),
        draining=message.draining,
        cell=message.cell,
        leading=message.leading,
        leader=message.leader,
    )


def _worker(message: admin_pb2.WorkerStatus) -> WorkerStatus:
    values = {name: getattr(message, name) for name in WorkerStatus.__slots__}
    changed: dict[str, object] = {"state": _STATES.get(message.state, "unknown")}
    for name in ("acceptance", "position_drafted_tokens", "position_accepted_tokens"):
        changed[name] = tuple(values[name])
    for name in ("plain_steps", "drafting_steps"):
        changed[name] = tuple((step.num_tokens, step.seconds) for step in values[name])
    return WorkerStatus(**{**values, **changed})


def _call(scheduler: str, method: str, request: object) -> admin_pb2.GetStatusResponse:
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(scheduler, options=options) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer: admin_pb2.GetStatusResponse = getattr(stub, method)(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return answer
