"""Metrics in Prometheus' text format, served on a port of their own.

The page is made on the event loop that owns the numbers, so that a gauge may simply read live state, is never stale
while the process is idle, and needs no lock. Label values come from configuration or from closed sets, never from
requests; where a value comes from outside all the same, `LabelValues` bounds how many there can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from cluster.inspection import open_tasks
from cluster.server import CannotBind, PortInUse, why_not_bound

# Seconds, from a fast inter-token gap to a slow end-to-end answer.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

OTHER = "other"
_REQUEST_TIMEOUT_S = 5.0
_MAX_HEADER_LINES = 100


class LabelValues:
    """At most `limit` distinct label values; whatever comes later is counted under "other"."""

    def __init__(self, limit: int = 100) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def of(self, value: str) -> str:
        """The value to use as a label."""
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value


class _TaskCollector:
    """Open tasks by the name of their coroutine, so that one that is never ended shows."""

    def collect(self) -> Iterator[Metric]:
        tasks = GaugeMetricFamily("tandem_tasks", "Open asyncio tasks, by coroutine.", labels=("coroutine",))
        try:
            counts = open_tasks()
        except RuntimeError:
            counts = {}  # nobody's loop runs here
        for name, count in sorted(counts.items()):
            tasks.add_metric([name], count)
        yield tasks


class Telemetry:
    """The metrics of one process. Names get the prefix `tandem_`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._server: asyncio.Server | None = None
        ProcessCollector(registry=self.registry)
        self.registry.register(_TaskCollector())
        build = Info("tandem_build", "What runs here.", registry=self.registry)
        build.info({"service": service, "version": version()})

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; exposed as tandem_<name>_total."""
        return Counter(f"tandem_{name}", description, labels, registry=self.registry)

    def gauge(
        self, name: str, description: str, labels: Sequence[str] = (), read: Callable[[], float] | None = None
    ) -> Gauge:
        """A number that is. With `read`, each scrape asks it (on the event loop); only for gauges without labels."""
        gauge = Gauge(f"tandem_{name}", description, labels, registry=self.registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(
        self, name: str, description: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """How a number is distributed; the default buckets are for seconds."""
        return Histogram(f"tandem_{name}", description, labels, registry=self.registry, buckets=buckets)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    async def serve(self, host: str, port: int) -> int | None:
        """Serve GET /metrics; return the port. 0: any free one; below 0: serve nothing, None. Raises CannotBind."""
        if port < 0:
            return None
        try:
            self._server = await asyncio.start_server(self._answer, host, port, limit=16 * 1024)
        except OSError as error:
            why = why_not_bound(host, port)
            raise why if isinstance(why, PortInUse) else CannotBind(host, port, error.strerror or str(error)) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                status, kind, body = self._respond(await _request_line(reader))
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            pass  # a scraper that left, stalled or talked nonsense
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _respond(self, request_line: list[str]) -> tuple[str, str, bytes]:
        if len(request_line) != 3 or request_line[0] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"only GET\n"
        if request_line[1].partition("?")[0] not in ("/", "/metrics"):
            return "404 Not Found", "text/plain", b"metrics are at /metrics\n"
        return "200 OK", CONTENT_TYPE_LATEST, self.render() if request_line[0] == "GET" else b""


def version() -> str:
    """The installed version of Tandem."""
    try:
        return importlib.metadata.version("tandem-serving")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def _request_line(reader: asyncio.StreamReader) -> list[str]:
    first = (await reader.readline()).decode("latin-1").split()
    for _ in range(_MAX_HEADER_LINES):
        if (await reader.readline()) in (b"\r\n", b"\n", b""):
            break
    return first
