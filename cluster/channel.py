"""How a process calls another: channels that notice a dead peer, and the waits between attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc

# Ping every 2 s, give up 2 s later: a peer that is stopped or cut off, whose TCP connection looks fine, is seen in
# under 5 s. Only our own servers allow such a pace (see cluster/server.py).
KEEPALIVE_TIME_S = 2.0
KEEPALIVE_TIMEOUT_S = 2.0

_MAX_DOUBLINGS = 32


def connect(
    address: str,
    *,
    keepalive_time_s: float = KEEPALIVE_TIME_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    use_proxy: bool = False,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT; connects lazily and reconnects by itself. `options` go last and win.

    Messages are unlimited in both directions: the receiving server has the say. HTTP proxies from the environment are
    ignored unless asked for, since a cluster's own links never go through one.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.keepalive_time_ms", round(keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(keepalive_timeout_s * 1000)),
            # What counts in today's core: without it an unanswered keepalive ping is waited for a whole minute.
            ("grpc.http2.ping_timeout_ms", round(keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Two channels of one process never share a connection, nor its failures.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", int(use_proxy)),
            *options,
        ],
        interceptors=list(interceptors),
    )


def abandon(call: Any) -> None:
    """Cancel a streaming call for good; harmless on one that is over.

    After a failed write grpcio takes a call for ended and no longer cancels it in its core. If messages were still
    unread, the call stays there, with them and the task that waits for its status, as long as the process lives.
    """
    call.cancel()
    inner = getattr(call, "_cython_call", None)
    if inner is not None:
        inner.cancel("abandoned")


async def until_one_ends(parts: list[asyncio.Task[None]]) -> None:
    """Wait until one of a stream's parts has ended; raise what it has raised. `end_all` is to follow.

    An error's traceback keeps the frames that it has passed, and they their variables: one that keeps a task that has
    raised it is a cycle, and so lives until the garbage collector comes by. The call in it keeps its connection open
    and answers pings, for minutes in a process that is at rest. Hence no such variable is left here.
    """
    await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    try:
        for part in parts:
            if part.done():
                part.result()
    finally:
        del part


async def end_all(parts: list[asyncio.Task[None]]) -> None:
    """Cancel a stream's parts and forget them, whatever they raise."""
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
    parts.clear()


STREAM_ERRORS = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError)
"""how a call's end shows; a write to a stream that has just ended raises InvalidStateError"""


def end_if_cancelled() -> None:
    """For loops that live through STREAM_ERRORS: raise the cancellation that one of them may have taken the place of.

    A task that is cancelled while its call ends may see the call's own status, and would go on as if nobody had asked.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def why_ended(error: BaseException) -> str:
    """One of STREAM_ERRORS, or an error of ours, in words for a log; never empty."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__


def backoff_delay_s(attempt: int, *, first_s: float = 0.1, max_s: float = 2.0, chance: float | None = None) -> float:
    """Seconds to wait before attempt number `attempt` (from 0): doubling from `first_s`, never above `max_s`.

    Jittered to between half and all of it, so that peers that lost the same scheduler don't return in one instant.
    `chance` in [0, 1) replaces the random draw.
    """
    if attempt < 0:
        raise ValueError(f"attempts count from 0, not {attempt}")
    full_s = min(max_s, first_s * 2.0 ** min(attempt, _MAX_DOUBLINGS))
    drawn = random.random() if chance is None else chance
    return full_s * (0.5 + 0.5 * drawn)


async def backoff(attempt: int, *, first_s: float = 0.1, max_s: float = 2.0) -> float:
    """Sleep `backoff_delay_s(attempt)`; return how long that was, in seconds."""
    delay_s = backoff_delay_s(attempt, first_s=first_s, max_s=max_s)
    await asyncio.sleep(delay_s)
    return delay_s
