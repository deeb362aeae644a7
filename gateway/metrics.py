"""What the gateway counts. Labels are served model names and closed sets, never anything that a client wrote."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from cluster.telemetry import LATENCY_BUCKETS_S, Telemetry
from gateway.requests import LiveRequest

OUTCOMES = ("stop", "length", "cancelled", "failed")


class TokenTally:
    """What is counted with every token of a model: plain numbers, since the library's take a lock for each."""

    __slots__ = ("gaps", "gaps_s", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps = [0] * (len(LATENCY_BUCKETS_S) + 1)
        """by bucket, not cumulated; the last one is for what is beyond all bounds"""
        self.gaps_s = 0.0


class GatewayMetrics:
    """The gateway's numbers, on one event loop."""

    def __init__(self, telemetry: Telemetry, num_live: Callable[[], float], session_up: Callable[[], float]) -> None:
        """`num_live` and `session_up` are read at each scrape."""
        self._requests = telemetry.counter("gateway_requests", "Requests by how they ended.", ["model", "outcome"])
        self._refused = telemetry.counter("gateway_refused", "Requests refused before they ran, by code.", ["code"])
        self._prompt = telemetry.counter("gateway_prompt_tokens", "Prompt tokens of requests that ran.", ["model"])
        self._cached = telemetry.counter("gateway_cached_tokens", "Prompt tokens found in a prefix cache.", ["model"])
        self._drafted = telemetry.counter("gateway_drafted_tokens", "Tokens drafted and verified.", ["model"])
        self._accepted = telemetry.counter("gateway_accepted_tokens", "Drafted tokens that were right.", ["model"])
        self._resumptions = telemetry.counter("gateway_resumptions", "Choices taken up again.", ["model"])
        self._first = telemetry.histogram(
            "gateway_time_to_first_token_seconds", "From a request's arrival to its first token.", ["model"]
        )
        self._whole = telemetry.histogram("gateway_request_seconds", "From arrival to end.", ["model"])
        self._sessions = telemetry.counter("gateway_sessions", "Sessions opened with a scheduler.")
        self._resubmitted = telemetry.counter("gateway_resubmissions", "Live requests given to a scheduler again.")
        self._gaps = telemetry.counter("gateway_index_gaps", "Missing tokens noticed, and asked for again.")
        self._tallies: dict[str, TokenTally] = {}
        telemetry.registry.register(self)
        telemetry.gauge("gateway_requests_running", "Live requests.", read=num_live)
        telemetry.gauge("gateway_session_up", "1 while the session with the scheduler stands.", read=session_up)

    def tokens_received(self, request: LiveRequest, num_tokens: int, now: float) -> None:
        """New tokens of a request came at `now`, on the event loop's clock."""
        model = request.spec.model
        tally = self._tallies.get(model)
        if tally is None:
            tally = self._tallies[model] = TokenTally()
        tally.tokens += num_tokens
        if request.last_token_at is None:
            self._first.labels(model).observe(now - request.arrived)
        else:
            gap_s = (now - request.last_token_at) / num_tokens
            tally.gaps[bisect_left(LATENCY_BUCKETS_S, gap_s)] += 1
            tally.gaps_s += gap_s
        request.last_token_at = now

    def request_ended(self, request: LiveRequest, outcome: str, now: float) -> None:
        """A request that ran is over; `outcome` is one of OUTCOMES."""
        model, usage = request.spec.model, request.usage()
        self._requests.labels(model, outcome).inc()
        self._whole.labels(model).observe(now - request.arrived)
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._drafted.labels(model).inc(usage.drafted_tokens)
        self._accepted.labels(model).inc(usage.accepted_tokens)
        self._resumptions.labels(model).inc(usage.resumptions)

    def request_refused(self, code: str) -> None:
        """A request was refused before it ran, with this gRPC code's name."""
        self._refused.labels(code).inc()

    def session_opened(self, num_resubmitted: int) -> None:
        """A scheduler welcomed this gateway, and was given so many requests that had run before."""
        self._sessions.inc()
        self._resubmitted.inc(num_resubmitted)

    def gap(self) -> None:
        """A choice's tokens came with a gap."""
        self._gaps.inc()

    def collect(self) -> Iterator[Metric]:
        """The tallies, for a scrape."""
        output = CounterMetricFamily(
            "tandem_gateway_generation_tokens", "Tokens received from workers.", labels=("model",)
        )
        between = HistogramMetricFamily(
            "tandem_gateway_inter_token_seconds", "Between the tokens of a request, per token.", labels=("model",)
        )
        bounds = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
        for model, tally in self._tallies.items():
            output.add_metric([model], tally.tokens)
            between.add_metric([model], list(zip(bounds, accumulate(tally.gaps), strict=True)), tally.gaps_s)
        yield from (output, between)
