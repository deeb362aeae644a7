"""How a process is called: gRPC servers with our options, their ports, reflection, and the order of shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from cluster.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S
from cluster.decoding import RefuseUndecodable
from cluster.health import Health
from cluster.logs import event
from cluster.reflection import add_reflection as add_reflection

logger = logging.getLogger(__name__)


class CannotBind(OSError):
    """A server's address can't be used; the message is fit for a user."""

    def __init__(self, host: str, port: int, why: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"can't listen on {join_address(host, port)}: {why}")


class PortInUse(CannotBind):
    """Another process listens there."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, "the port is in use; stop what uses it, or choose another port (0: any free one)")


def create_server(
    *,
    max_message_mib: float = 64,
    keepalive_time_s: float = KEEPALIVE_TIME_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_concurrent_rpcs: int | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Server:
    """A server, not yet bound nor started. `options` go last and win.

    Two processes never share a port. A peer that is stopped or cut off is noticed after keepalive_time_s +
    keepalive_timeout_s at the latest, and its streams end; peers may ping as often as they like. Received messages are
    limited to max_message_mib, sent ones are not. A request that is no protobuf is refused as INVALID_ARGUMENT.
    """
    return grpc.aio.server(
        interceptors=[RefuseUndecodable(), *interceptors],
        maximum_concurrent_rpcs=max_concurrent_rpcs,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", round(max_message_mib * 2**20)),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", round(keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(keepalive_timeout_s * 1000)),
            ("grpc.http2.ping_timeout_ms", round(keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # The key that counts. The name with `recv` in it, which is found in the wild, does nothing.
            ("grpc.http2.min_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            *options,
        ],
    )


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listen on host and port (0: any free one); return the port. Raises PortInUse, or CannotBind with the reason."""
    try:
        bound: int = server.add_insecure_port(join_address(host, port))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise why_not_bound(host, port)
    return bound


def add_health(server: grpc.aio.Server) -> Health:
    """Serve grpc.health.v1 on the server; everything is NOT_SERVING until `set`."""
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return health


async def run_until_signal(
    server: grpc.aio.Server,
    drain: Callable[[], Awaitable[None]],
    *,
    health: Health | None = None,
    grace_s: float = 5.0,
    stop: asyncio.Event | None = None,
    ready: str | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then NOT_SERVING, `drain()`, stop(grace_s). The server is started already.

    `drain` refuses new work and returns when the old has ended; it bounds its own time. A second signal cuts it short:
    what still runs is cancelled at once. `ready` is a line for stdout, printed once signals are watched, so that who
    reads it may send one right away.
    """
    loop = asyncio.get_running_loop()
    first, second = stop or asyncio.Event(), asyncio.Event()

    def on_signal(name: str) -> None:
        event(logger, "stopping at once" if first.is_set() else "draining", signal=name)
        (second if first.is_set() else first).set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number.name)
    if ready is not None:
        print(ready, flush=True)
    try:
        await first.wait()
        if health is not None:
            health.enter_graceful_shutdown()
        await _unless(second, drain())
        if health is not None:
            health.close()
        await server.stop(0 if second.is_set() else grace_s)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """What others dial: a wildcard address says nothing about where this machine, or this container, is."""
    return socket.gethostname() if host.strip("[]") in ("0.0.0.0", "::", "") else host


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT; ValueError says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is HOST:PORT, for instance 127.0.0.1:50051, not {address!r}")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"an IPv6 address needs brackets, for instance [::1]:50051, not {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def _unless(cut: asyncio.Event, work: Awaitable[None]) -> None:
    """Await the work, or cancel it once `cut` is set. The work's own errors are raised."""
    running = asyncio.ensure_future(work)
    cutting = asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({running, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            return
        running.result()
    finally:
        running.cancel()
        cutting.cancel()


def why_not_bound(host: str, port: int) -> CannotBind:
    """gRPC only says that binding failed; a plain socket says why."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        return CannotBind(host, port, f"no such host ({error.strerror})")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortInUse(host, port)
        return CannotBind(host, port, error.strerror or str(error))
    # It was free a moment later: somebody held it when gRPC tried.
    return PortInUse(host, port)
