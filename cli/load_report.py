"""What a load took: percentiles, rates, errors, and the generator's own share. Pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from cli.load import Record, Workload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one kind of time, in seconds. All None without a sample."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run."""

    workload: Workload
    duration_s: float
    """from the first request's start to the last one's end"""
    completed: int
    errors: dict[str, int]
    """by code"""
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution
    """from when a request was due to its first token"""
    inter_token_s: Distribution
    """between deliveries of one request; with speculation a delivery may bring several tokens"""
    time_per_output_token_s: Distribution
    """a request's time after its first token, divided by the tokens after it"""
    end_to_end_s: Distribution
    """from when a request was due to its end"""
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    input_tokens_per_s: float
    """prompt tokens of completed requests that no prefix cache held, over the whole run"""
    client_cpu_s: float
    """CPU time of the load generator"""
    client_cpu_share: float
    """the same per second of the run: 1.0 is one whole core"""
    late_start_s: float
    """open loop: by how much the generator missed a request's due time, at worst"""

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def as_json(self) -> dict[str, object]:
        """For a file: everything, with plain values."""
        return {**dataclasses.asdict(self), "acceptance": self.acceptance}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of an ascending, non-empty sequence, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(samples: Sequence[float]) -> Distribution:
    """Mean, percentiles and maximum of samples in any order."""
    if not samples:
        return Distribution(None, None, None, None, None)
    ordered = sorted(samples)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summarise(workload: Workload, records: Sequence[Record], cpu_s: float) -> Report:
    """Times count completed requests only; tokens count them all."""
    completed = [record for record in records if record.error is None]
    start_s = min((record.started_s for record in records), default=0.0)
    duration_s = max((record.ended_s for record in records), default=0.0) - start_s
    output_tokens = sum(record.num_tokens for record in records)
    input_tokens = sum(workload.input_tokens - record.cached_tokens for record in completed)
    return Report(
        workload=workload,
        duration_s=duration_s,
        completed=len(completed),
        errors=dict(collections.Counter(record.error for record in records if record.error is not None)),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else 0.0,
        requests_per_s=len(completed) / duration_s if duration_s > 0 else 0.0,
        ttft_s=distribution([r.first_token_s - r.due_s for r in completed if r.first_token_s is not None]),
        inter_token_s=distribution([gap for record in completed for gap in record.gaps_s]),
        time_per_output_token_s=distribution(
            [
                (record.ended_s - record.first_token_s) / (record.num_tokens - 1)
                for record in completed
                if record.first_token_s is not None and record.num_tokens > 1
            ]
        ),
        end_to_end_s=distribution([record.ended_s - record.due_s for record in completed]),
        cached_tokens=sum(record.cached_tokens for record in records),
        drafted_tokens=sum(record.drafted_tokens for record in records),
        accepted_tokens=sum(record.accepted_tokens for record in records),
        input_tokens_per_s=input_tokens / duration_s if duration_s > 0 else 0.0,
        client_cpu_s=cpu_s,
        client_cpu_share=cpu_s / duration_s if duration_s > 0 else 0.0,
        late_start_s=max((record.started_s - record.due_s for record in records), default=0.0),
    )
