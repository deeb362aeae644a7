"""Servers and channels: ports, message sizes, dead peers, and the order of shutdown."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.channel import backoff, backoff_delay_s, connect
from cluster.server import (
    CannotBind,
    PortInUse,
    add_health,
    bind,
    create_server,
    is_loopback,
    join_address,
    reachable_host,
    run_until_signal,
    split_address,
)
from tests.chaos.lag import measuring

_spec = importlib.util.spec_from_file_location("cluster_test_peer", Path(__file__).with_name("peer.py"))
assert _spec is not None
assert _spec.loader is not None
peer_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer_module)
ECHO = peer_module.ECHO


async def test_two_servers_never_share_a_port() -> None:
    first, second = create_server(), create_server()
    port = bind(first, "127.0.0.1", 0)
    assert port > 0
    with pytest.raises(PortInUse) as caught:
        bind(second, "127.0.0.1", port)
    assert f"can't listen on 127.0.0.1:{port}: the port is in use" in str(caught.value)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    await first.stop(None)


async def test_two_processes_never_share_a_port(start_peer, read_line) -> None:
    port = int(await read_line(await start_peer("echo")))
    with pytest.raises(PortInUse):
        bind(create_server(), "127.0.0.1", port)


async def test_a_port_of_something_else_is_in_use_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortInUse):
        bind(create_server(), "127.0.0.1", other.getsockname()[1])


async def test_an_address_that_is_not_ours_is_another_error() -> None:
    with pytest.raises(CannotBind) as caught:
        bind(create_server(), "192.0.2.1", 0)
    assert not isinstance(caught.value, PortInUse)
    with pytest.raises(CannotBind, match="no such host"):
        bind(create_server(), "no-such-host.invalid", 0)


async def _echo_once(message: bytes, max_message_mib: float = 64) -> bytes:
    server = create_server(max_message_mib=max_message_mib)
    server.add_generic_rpc_handlers((peer_module.Echo(),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            stream = channel.stream_stream(ECHO)(timeout=20)
            await stream.write(message)
            answer = await stream.read()
            if answer is grpc.aio.EOF:
                raise grpc.aio.AioRpcError(await stream.code(), None, None, await stream.details())
            return answer
    finally:
        await server.stop(0)


async def test_messages_far_above_grpcs_default_of_4_mib_pass() -> None:
    message = bytes(20 * 2**20)
    assert await _echo_once(message) == message


async def test_the_limit_on_received_messages_holds() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _echo_once(bytes(2 * 2**20), max_message_mib=1)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stopped_peer_is_noticed_by_both_sides_within_5_s(start_peer, read_line) -> None:
    """SIGSTOP leaves the TCP connection up: only keepalive can tell."""
    remote_server = await start_peer("echo")
    channel = connect(f"127.0.0.1:{await read_line(remote_server)}")
    stream = channel.stream_stream(ECHO)()
    await stream.write(b"x")
    assert await stream.read() == b"x"

    server, echo = create_server(), peer_module.Echo()
    server.add_generic_rpc_handlers((echo,))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    remote_client = await start_peer("hold", str(port))
    assert await read_line(remote_client) == "open"
    assert not echo.ended.is_set()

    began = time.monotonic()
    remote_server.send_signal(signal.SIGSTOP)
    remote_client.send_signal(signal.SIGSTOP)

    async def client_notices() -> float:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return time.monotonic() - began

    async def server_notices() -> float:
        await echo.ended.wait()
        return time.monotonic() - began

    async with measuring() as lag:
        waits = await asyncio.wait_for(asyncio.gather(client_notices(), server_notices()), 60)
    assert max(waits) < 5.0 + lag.between(began, time.monotonic()), waits
    await channel.close()
    await server.stop(0)


async def test_frequent_pings_are_not_punished() -> None:
    """A server with gRPC's defaults answers such a client with GOAWAY too_many_pings."""
    server = create_server()
    server.add_generic_rpc_handlers((peer_module.Echo(),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with connect(f"127.0.0.1:{port}", keepalive_time_s=0.02) as channel:
        stream = channel.stream_stream(ECHO)()
        await stream.write(b"x")
        assert await stream.read() == b"x"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(stream.read())), 0.5)
        await stream.write(b"y")
        assert not stream.done()
    await server.stop(0)


async def test_proxies_from_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert await _echo_once(b"direct") == b"direct"


async def test_sigterm_reports_not_serving_then_drains_then_closes(start_peer, read_line) -> None:
    peer = await start_peer("echo")
    port = await read_line(peer)
    async with connect(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        peer.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF, "a watcher does not hold up the end"
    assert await read_line(peer) == "draining"
    assert await read_line(peer) == "closed"
    assert await peer.wait() == 0


async def test_a_second_signal_cuts_the_drain_short(start_peer, read_line) -> None:
    peer = await start_peer("echo", "--never")
    await read_line(peer)
    peer.send_signal(signal.SIGINT)
    assert await read_line(peer) == "draining"
    peer.send_signal(signal.SIGINT)
    assert await read_line(peer) == "closed"
    assert await peer.wait() == 0


async def test_a_failing_drain_is_told_and_the_signals_are_given_back() -> None:
    server, stop = create_server(), asyncio.Event()
    health = add_health(server)
    health.set("", True)
    bind(server, "127.0.0.1", 0)
    await server.start()
    stop.set()

    async def drain() -> None:
        assert not health.serving("")
        raise RuntimeError("drain failed")

    with pytest.raises(RuntimeError, match="drain failed"):
        await run_until_signal(server, drain, health=health, stop=stop)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    await server.stop(0)


def test_addresses() -> None:
    for host, port, text in [
        ("127.0.0.1", 1, "127.0.0.1:1"),
        ("::1", 2, "[::1]:2"),
        ("gateway", 65535, "gateway:65535"),
    ]:
        assert join_address(host, port) == text
        assert split_address(text) == (host, port)
    for wrong in ("host", "host:", ":1", "host:x", "host:70000", "::1:5", "host:-1", ""):
        with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
            split_address(wrong)
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_backoff_doubles_is_jittered_and_bounded() -> None:
    assert [backoff_delay_s(n, first_s=0.1, max_s=2.0, chance=0.0) for n in range(3)] == pytest.approx([0.05, 0.1, 0.2])
    assert backoff_delay_s(10**9, max_s=2.0, chance=0.999999) == pytest.approx(2.0)
    drawn = {backoff_delay_s(3) for _ in range(50)}
    assert len(drawn) > 40, "peers that lost the same scheduler don't return in one instant"
    assert all(0.4 <= delay <= 0.8 for delay in drawn)
    with pytest.raises(ValueError, match="count from 0"):
        backoff_delay_s(-1)


async def test_backoff_sleeps_what_it_says() -> None:
    began = time.monotonic()
    slept = await backoff(0, first_s=0.02, max_s=0.02)
    assert 0.01 <= slept <= 0.02
    assert time.monotonic() - began >= slept * 0.9


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_a_wildcard_is_no_address_to_dial(host: str) -> None:
    assert reachable_host(host) == socket.gethostname()
    assert reachable_host("127.0.0.1") == "127.0.0.1"
