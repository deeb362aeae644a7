"""What the gateway counts with every token, beside what the metrics library makes of the same observations."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from cluster.telemetry import LATENCY_BUCKETS_S, Telemetry
from gateway.metrics import GatewayMetrics

NAMES = ("tandem_gateway_inter_token_seconds", "tandem_gateway_generation_tokens")


def samples(page: str) -> dict[str, float]:
    """Of those metrics, by name and labels, without the times at which the library made them."""
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(NAMES) and "_created" not in line]
    return {name: round(float(value), 9) for name, value in lines}


def test_tallies_are_what_the_library_would_have_counted() -> None:
    telemetry = Telemetry("gateway")
    metrics = GatewayMetrics(telemetry, lambda: 0.0, lambda: 0.0)
    registry = CollectorRegistry()
    between = Histogram(NAMES[0], "…", ["model"], registry=registry, buckets=LATENCY_BUCKETS_S)
    output = Counter(NAMES[1], "…", ["model"], registry=registry)
    chance = random.Random(7)
    gaps = [*LATENCY_BUCKETS_S, 0.0, 1e6, *(10 ** chance.uniform(-5, 3) for _ in range(200))]
    for model in ("small", "large"):
        request: Any = SimpleNamespace(spec=SimpleNamespace(model=model), last_token_at=None, arrived=0.0)
        metrics.tokens_received(request, 1, 0.0)
        output.labels(model).inc()
        for gap in gaps:
            num_tokens = chance.choice((1, 2, 4))
            request.last_token_at = 0.0  # so that a gap on a bound stays on it
            metrics.tokens_received(request, num_tokens, gap * num_tokens)
            between.labels(model).observe(gap)
            output.labels(model).inc(num_tokens)
    expected = samples(generate_latest(registry).decode())
    assert len(expected) == 2 * (1 + len(LATENCY_BUCKETS_S) + 3)
    assert samples(telemetry.render().decode()) == expected
