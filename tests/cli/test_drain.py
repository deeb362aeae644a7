"""`tandem drain`: which request each name becomes, asked of the leader."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tandem.v1 import admin_pb2, admin_pb2_grpc

from cli.__main__ import main
from cluster import errors


class Scheduler(admin_pb2_grpc.AdminServiceServicer):
    """Has a worker, a draft worker and a gateway, or is a standby that knows who leads."""

    def __init__(self) -> None:
        self.leader = ""
        self.asked: list[admin_pb2.DrainRequest] = []

    def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        if self.leader:
            return admin_pb2.GetStatusResponse(leader=self.leader)
        return admin_pb2.GetStatusResponse(
            leading=True,
            workers=[admin_pb2.WorkerStatus(worker_id="worker-1")],
            draft_workers=[admin_pb2.DraftWorkerStatus(worker_id="draft-1")],
            gateways=["gateway-5f"],
        )

    def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        self.asked.append(request)
        if self.leader and not request.scheduler:
            refused = errors.Unavailable("a standby", reason="NOT_LEADER", leader=self.leader)
            context.set_trailing_metadata(((errors.DETAILS_KEY, errors.to_status(refused).SerializeToString()),))
            context.abort(refused.code, refused.message)
        return admin_pb2.DrainResponse()


@pytest.fixture
def pair() -> Iterator[tuple[Scheduler, Scheduler, str]]:
    """A leader, its standby, and the standby's address."""
    leader, standby, address = Scheduler(), Scheduler(), ""
    servers = []
    for scheduler in (leader, standby):
        server = grpc.server(ThreadPoolExecutor(2))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(scheduler, server)
        standby.leader, address = address, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
    yield leader, standby, address
    for server in servers:
        server.stop(None)


@pytest.mark.parametrize(
    ("names", "request_fields", "told"),
    [
        (["worker-1"], {"worker_id": "worker-1"}, "worker worker-1"),
        (["draft-1"], {"draft_worker_id": "draft-1"}, "draft worker draft-1"),
        (["gateway-5f"], {"gateway_id": "gateway-5f"}, "gateway gateway-5f"),
        (["nobody"], {"worker_id": "nobody"}, "worker nobody"),
        ([], {}, "the whole cell"),
    ],
)
def test_names(pair: Any, capsys: pytest.CaptureFixture[str], names: list[str], request_fields: Any, told: str) -> None:
    leader, _, at = pair
    assert main(["drain", *names, "--scheduler", at]) == 0
    assert leader.asked == [admin_pb2.DrainRequest(**request_fields)]
    assert capsys.readouterr().out == f"draining {told}\n"


def test_a_standby_is_drained_itself(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    leader, standby, at = pair
    assert main(["drain", "scheduler", "--scheduler", at]) == 0
    assert (leader.asked, standby.asked) == ([], [admin_pb2.DrainRequest(scheduler=True)])
    assert capsys.readouterr().out == f"draining the scheduler at {at}\n"
