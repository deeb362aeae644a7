"""Health: the grpc.health.v1 service, and readiness that follows forward progress instead of process life.

The servicer is our own. grpcio-health-checking's forgets every other watcher of a service when one of them leaves, and
writes to watchers under a lock that `set` needs, so that one slow watcher could hold up a shutdown. Here each watcher
has an event of its own and nothing waits for anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""Whether the process can still do its work: what a supervisor asks before it ends a process. Stays SERVING while one
loads, stands by, waits for others or drains; a loop that stands still doesn't answer at all."""
READINESS = "readiness"
"""Whether new work is taken: what a load balancer asks. Another name of the empty one."""


class Health(health_pb2_grpc.HealthServicer):
    """The states of named services. The name "" is the process as a whole; it starts as NOT_SERVING, and alive.

    Not thread-safe: everything happens on the event loop of the server.
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {"": False, READINESS: False, LIVENESS: True}
        self._watchers: set[asyncio.Event] = set()
        self._shutting_down = False
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Report a service as SERVING or NOT_SERVING from now on. Without effect once a shutdown has begun."""
        if not self._shutting_down:
            self._put(service, serving)

    def set_alive(self, alive: bool) -> None:
        """Report the process as able to go on, or not, from now on."""
        self._put(LIVENESS, alive)

    def clear(self, service: str) -> None:
        """Forget a service that is gone for good: Check answers NOT_FOUND, Watch SERVICE_UNKNOWN."""
        self._serving.pop(service, None)
        self._notify()

    def serving(self, service: str = "") -> bool:
        """Whether the service is known and SERVING."""
        return self._serving.get(service, False)

    def services(self) -> list[str]:
        """Every known name, "" included."""
        return sorted(self._serving)

    def enter_graceful_shutdown(self) -> None:
        """Report every service as NOT_SERVING, for good; the process is alive all the same."""
        self._shutting_down = True
        for service in self._serving.keys() - {LIVENESS}:
            self._put(service, False)

    def close(self) -> None:
        """End every Watch, so that watchers don't hold up the server's stop for its whole grace."""
        self._closed = True
        self._notify()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """NOT_FOUND for a name that was never set."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """The state now and after each change; SERVICE_UNKNOWN for an unknown name, and the stream stays open."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last = None
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status  # it may have changed while the last one was written
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _status(self, service: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if service not in self._serving:
            return kinds.SERVICE_UNKNOWN
        return kinds.SERVING if self._serving[service] else kinds.NOT_SERVING

    def _put(self, service: str, serving: bool) -> None:
        self._serving[service] = serving
        if not service:
            self._serving[READINESS] = serving
        self._notify()

    def _notify(self) -> None:
        for changed in self._watchers:
            changed.set()


class Progress:
    """Whether work moves on. Time comes as an argument, in seconds of any steady clock.

    Hung means: something is running and its last sign of progress is older than it may take. Idle is never hung.
    """

    def __init__(self, stalled_after_s: float = 30.0) -> None:
        self.stalled_after_s = stalled_after_s
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Work runs from now on, or has just moved on."""
        self._since_s = now_s

    def ended(self) -> None:
        """Nothing runs any more."""
        self._since_s = None

    def running_s(self, now_s: float) -> float:
        """Seconds since the last sign of progress of what runs; 0 when idle."""
        since_s = self._since_s  # once: another thread's work may end meanwhile
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def hung(self, now_s: float, expected_s: float = 0.0, times: float = 1.0) -> bool:
        """Beyond max(stalled_after_s, 10 × what such work is expected to take), or so many times that."""
        return self.running_s(now_s) > times * max(self.stalled_after_s, 10.0 * expected_s)
