"""What is refused at once, by which field, and how an unset max_tokens is clamped (cases 20 and 52)."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.fit import capacity_of, check_fit, check_spec, clamped_limit
from scheduler.core.step import Refusal, RefusalKind
from scheduler.core.worker_state import WorkerSpec
from tests.scheduler.core.builders import choices, request_spec, sequence_of, worker_spec

ROOMY = worker_spec(num_blocks=100, max_model_len=64)
SMALL_POOL = worker_spec(num_blocks=8, max_model_len=512)


@pytest.mark.parametrize(
    ("worker", "capacity"),
    [(ROOMY, 64), (SMALL_POOL, 32), (worker_spec(num_blocks=16, block_size=4, max_model_len=64), 64)],
)
def test_capacity_is_the_context_or_the_pool(worker: WorkerSpec, capacity: int) -> None:
    assert capacity_of(worker) == capacity


@pytest.mark.parametrize(
    ("worker", "prompt", "max_tokens", "field"),
    [
        (ROOMY, 63, 1, None), (ROOMY, 63, None, None), (ROOMY, 64, None, "prompt"), (ROOMY, 65, None, "prompt"),
        (ROOMY, 60, 4, None), (ROOMY, 60, 5, "stop.max_tokens"),
        (SMALL_POOL, 31, 1, None), (SMALL_POOL, 32, 1, "prompt"), (SMALL_POOL, 200, None, "prompt"),
        (SMALL_POOL, 10, 22, None), (SMALL_POOL, 10, 23, "stop.max_tokens"),
    ],
)  # fmt: skip
def test_what_no_worker_holds_is_refused_by_field(
    worker: WorkerSpec, prompt: int, max_tokens: int | None, field: str | None
) -> None:
    spec = request_spec(prompt=prompt, max_tokens=max_tokens)
    if field is None:
        check_fit(spec, [worker])
        return
    with pytest.raises(Refusal) as caught:
        check_fit(spec, [worker])
    assert (caught.value.kind, caught.value.field_name) == (RefusalKind.INVALID, field)


def test_context_and_pool_must_be_one_workers() -> None:
    """40 tokens fit the one's context and the other's pool, but neither worker."""
    long_context = worker_spec(num_blocks=4, block_size=4, max_model_len=512)
    large_pool = worker_spec(num_blocks=1000, block_size=4, max_model_len=32)
    with pytest.raises(Refusal):
        check_fit(request_spec(prompt=10, max_tokens=30), [long_context, large_pool])
    check_fit(request_spec(prompt=10, max_tokens=22), [long_context, large_pool])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"choices": ()}, "choices"),
        ({"choices": ((1, ()), (1, ()))}, "choices"),
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"max_tokens": 3, "choices": choices(2, 3)}, "resume"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_spec(request_spec(**fields))
    assert (caught.value.kind, caught.value.field_name) == (RefusalKind.INVALID, field)


def test_an_unset_limit_is_the_least_capacity_that_leaves_room() -> None:
    workers = [ROOMY, SMALL_POOL]
    assert clamped_limit(sequence_of(prompt=10), workers) == 32
    assert clamped_limit(sequence_of(prompt=31), workers) == 32
    assert clamped_limit(sequence_of(prompt=32), workers) == 64
    assert clamped_limit(sequence_of(prompt=64), workers) is None
