"""Metrics: the page, fresh gauges, bounded labels, and a port that can't be shared."""

from __future__ import annotations

import asyncio

import pytest

from cluster.server import CannotBind, PortInUse
from cluster.telemetry import LabelValues, Telemetry


async def fetch(port: int, request: str) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    page = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    head, _, body = page.partition("\r\n\r\n")
    return head, body


async def test_the_page() -> None:
    telemetry, waiting = Telemetry("scheduler"), [3]
    telemetry.counter("requests", "Requests.", ["model"]).labels("m").inc(2)
    telemetry.gauge("num_requests_waiting", "Waiting.", read=lambda: waiting[0])
    telemetry.gauge("plain", "Plain.").set(7)
    telemetry.histogram("time_to_first_token_seconds", "TTFT.").observe(0.3)
    port = await telemetry.serve("127.0.0.1", 0)
    assert port
    head, body = await fetch(port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "text/plain" in head
    assert f"Content-Length: {len(body.encode())}" in head
    for line in (
        'tandem_requests_total{model="m"} 2.0',
        "tandem_num_requests_waiting 3.0",
        "tandem_plain 7.0",
        'tandem_time_to_first_token_seconds_bucket{le="0.5"} 1.0',
        'tandem_build_info{service="scheduler"',
        "process_resident_memory_bytes",
    ):
        assert line in body
    waiting[0] = 0
    _, body = await fetch(port, "GET / HTTP/1.0\r\n\r\n")
    assert "tandem_num_requests_waiting 0.0" in body, "a gauge is never stale"
    await telemetry.close()
    with pytest.raises(OSError):  # noqa: PT011
        await fetch(port, "")


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET /other HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", "200"),
        ("nonsense\r\n\r\n", "405"),
    ],
)
async def test_other_requests(request_text: str, status: str) -> None:
    telemetry = Telemetry("x")
    port = await telemetry.serve("127.0.0.1", 0)
    assert port
    head, body = await fetch(port, request_text)
    assert head.split()[1] == status
    assert "process_" not in body
    await telemetry.close()


async def test_a_header_without_end_is_cut_off() -> None:
    telemetry = Telemetry("x")
    port = await telemetry.serve("127.0.0.1", 0)
    assert port
    head, _ = await fetch(port, "GET /metrics HTTP/1.1" + "x" * 100_000)
    assert head == ""
    head, _ = await fetch(port, "GET /metrics HTTP/1.1\r\n\r\n")
    assert "200" in head
    await telemetry.close()


async def test_ports() -> None:
    first, second = Telemetry("a"), Telemetry("b")
    assert await first.serve("127.0.0.1", -1) is None
    port = await first.serve("127.0.0.1", 0)
    assert port
    with pytest.raises(PortInUse):
        await second.serve("127.0.0.1", port)
    with pytest.raises(CannotBind):
        await second.serve("192.0.2.1", 0)
    await first.close()
    await second.close()


def test_label_values_are_bounded() -> None:
    values = LabelValues(limit=2)
    assert [values.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
