"""The event loop of a process that speaks gRPC, with two of the library's costs taken out.

gRPC's asyncio layer learns of finished operations on a thread of its own and tells the loop through a socket pair:

    core ─▶ completion queue ─▶ poller thread ─▶ queue, and one byte a completion ─▶ loop: recv(1), empty the queue

The first reader empties the queue, so all further bytes wake the loop for nothing: a step that pushes 32 tokens costs
31 idle turns. `_OneTurn` takes all bytes but one before the reader runs; each byte stands for an entry that is in the
queue already, so no entry is left without one.

The other cost is a second thread that watches the sockets and hands what came to the poller thread. Without the
experiment named below the poller thread watches them itself, as it did in all earlier releases; a message received
takes one thread less. Both were measured with grpcio 1.81 (docs/performance.md); with another release that does
neither, this is a plain event loop.

Where uvloop is installed it is the loop beneath: its turns are cheaper, gRPC is the same. Its clock has milliseconds
only; `_OneTurn` puts the usual one in its place, since latencies are read off it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EXPERIMENTS = "GRPC_EXPERIMENTS"
SWITCH_INTERVAL_S = 0.0002
"""Longest that the Python of one thread keeps the others waiting. The model's thread comes back from native code
hundreds of times in a forward pass, and at the interpreter's own 5 ms a busy event loop makes the pass a third longer.
Planning a step fits into it, so the next pass begins before the loop takes its turn."""
_ONE_POLLER = "-event_engine_poller_for_python"
_MOST_BYTES = 4096
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def choose_poller() -> None:
    """To be called before the process imports gRPC, which reads this when it is loaded. The user's own choice wins."""
    os.environ.setdefault(EXPERIMENTS, _ONE_POLLER)


def share_with_model() -> None:
    """For a process whose model computes on a thread beside the loop: neither keeps the other from Python for long."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


class _OneTurn:
    """See the module's text; stands before the class of a loop."""

    def time(self) -> float:
        """Seconds, as `time.monotonic` has them."""
        return time.monotonic()

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        if _is_grpc(callback) and isinstance(fd, socket.socket):
            super().add_reader(fd, _read_once, fd, callback)  # type: ignore[misc]
        else:
            super().add_reader(fd, callback, *args)  # type: ignore[misc]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        base: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    else:
        base = uvloop.Loop
    loop: asyncio.AbstractEventLoop = type("OneTurnLoop", (_OneTurn, base), {})()
    return loop


def _is_grpc(callback: Callable[..., Any]) -> bool:
    """Whether it is the bound reader of gRPC's completions; its class is private, its module is not."""
    bound = callback.func if isinstance(callback, functools.partial) else callback
    owner = getattr(bound, "__self__", None)
    return type(owner).__module__ == "grpc._cython.cygrpc"


def _read_once(wakeups: socket.socket, callback: Callable[[], Any]) -> None:
    """One call for all completions so far."""
    waiting = len(wakeups.recv(_MOST_BYTES, _LOOK))
    if waiting > 1:
        wakeups.recv(waiting - 1)
    callback()
