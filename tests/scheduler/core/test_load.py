"""Heavy load on small pools: throughput goes on, nothing thrashes, nothing leaks (cases 22, 55, 58)."""

from __future__ import annotations

import random

import pytest

from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.sequence import RequestSpec
from scheduler.core.worker_state import WorkerSpec
from tests.scheduler.core.model_worker import VOCAB, Params, mix
from tests.scheduler.core.simulation import Simulation

STOP = frozenset(range(0, VOCAB, 30))


def mixed_request(key: int, dice: random.Random) -> RequestSpec:
    """Any request that fits 40 tokens."""
    shared = tuple(range(dice.choice([0, 8, 16])))
    own = tuple(dice.randrange(VOCAB) for _ in range(dice.randint(1, 8)))
    return RequestSpec(
        key=key,
        model="m",
        prompt_token_ids=shared + own,
        params=Params(STOP if dice.random() < 0.5 else frozenset()),
        max_tokens=dice.choice([None, 1, 4, 16]),
        wants_prompt_logprobs=dice.random() < 0.1,
        seed=dice.randrange(1 << 32),
        choices=tuple((index, ()) for index in range(dice.choice([1, 1, 1, 2]))),
        priority=dice.choice([0, 0, 1]),
        client=dice.choice("abc"),
        max_draft_tokens=dice.choice([None, 0, 2]),
    )


@pytest.mark.parametrize(
    ("seed", "mode"), [(0, SpeculationMode.FIXED), (1, SpeculationMode.AUTO), (2, SpeculationMode.FIXED)]
)
def test_256_mixed_requests_leave_nothing_behind(seed: int, mode: SpeculationMode) -> None:
    dice = random.Random(seed)
    simulation = Simulation(CoreConfig(token_budget=24, max_waiting=1000, speculation=mode, draft_token_budget=16))
    spec = WorkerSpec("m", "x", num_blocks=20, block_size=4, max_sequences=12, max_model_len=40)

    def draft(known: int, budget: int) -> tuple[int, int]:
        count = mix(seed, known) % (budget + 1)
        return count, mix(seed, -known) % (count + 1)

    simulation.start("w0", spec, draft)
    simulation.start("w1", spec)
    for key in range(256):
        assert simulation.submit(mixed_request(key, dice)) is None
        if key % 2:
            simulation.round()
        if dice.random() < 0.1 and simulation.core.requests:
            simulation.cancel(dice.choice(list(simulation.core.requests)))
    simulation.run_dry()
    simulation.check_over()
    counters = simulation.core.counters
    model = simulation.machines["w0"].model
    assert counters.preemptions > 20, "the pools were too large to test anything"
    assert 0 < model.accepted < model.drafted
    assert counters.cached_tokens > 0
    assert sum(worker.pool.evictions for worker in simulation.core.workers.values()) > 0
    for worker in simulation.core.workers.values():
        assert worker.pool.num_free + worker.pool.num_cached == worker.pool.num_blocks
