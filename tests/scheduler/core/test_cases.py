"""Cases from the field that are the scheduler's, driven through simulated workers whose tokens depend on every cell.

Cases 20, 22, 47, 50, 52 and 63 are in test_scheduler.py, 58 in test_load.py, 43 and 45 in cancel_in_flight.txt.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from scheduler.core.config import CoreConfig
from scheduler.core.sequence import RequestSpec
from scheduler.core.worker_state import WorkerSpec
from tests.scheduler.core.builders import request_spec, worker_spec
from tests.scheduler.core.model_worker import WireAdmission, prompt_logprob, to_wire
from tests.scheduler.core.simulation import Simulation


def cell(worker: WorkerSpec | None = None, **config: Any) -> Simulation:
    simulation = Simulation(CoreConfig(**config))
    simulation.start("w0", worker or worker_spec(num_blocks=64, max_model_len=256))
    return simulation


def answers(simulation: Simulation, *specs: RequestSpec) -> list[list[int]]:
    """Submit together, run to the end, and give what each client received."""
    for spec in specs:
        assert simulation.submit(spec) is None
    simulation.run_dry()
    simulation.check_over()
    return [simulation.clients[spec.key].tokens[0] for spec in specs]


def admissions(simulation: Simulation, spec: RequestSpec) -> list[WireAdmission]:
    """Run a request alone and give all that the worker was told of it."""
    told: list[WireAdmission] = []
    assert simulation.submit(spec) is None
    while simulation.core.requests:
        simulation.place()
        while simulation.plan("w0"):
            assert simulation.last_step is not None
            told += to_wire(simulation.last_step).admissions
        simulation.run("w0")
        simulation.apply("w0")
    return told


def test_case_28_a_warm_worker_is_told_as_much_of_the_prompt_as_a_cold_one() -> None:
    """Penalties count prompt tokens, so a hit must not hide any."""
    simulation = cell()
    prompt = tuple(range(33))
    (cold,) = admissions(simulation, request_spec("cold", prompt, max_tokens=4))
    (warm,) = admissions(simulation, request_spec("warm", prompt, max_tokens=4))
    assert (cold.num_computed, warm.num_computed) == (0, 32)
    assert warm.token_ids == cold.token_ids == prompt
    assert warm.num_prompt == cold.num_prompt == 33
    assert simulation.clients["cold"].tokens == simulation.clients["warm"].tokens


def test_case_33_prompt_logprobs_of_a_cached_prompt_equal_the_first_ones() -> None:
    simulation = cell()
    prompt = tuple(range(33))
    specs = [request_spec(key, prompt, max_tokens=2, wants_prompt_logprobs=True) for key in ("first", "second")]
    for spec in specs:
        answers(simulation, spec)
    first, second = (simulation.clients[spec.key].prompt_logprobs for spec in specs)
    assert first == second == [prompt_logprob(prompt, position) for position in range(33)]
    assert simulation.core.counters.cached_tokens == 0


@pytest.mark.parametrize("order", list(permutations(["short", "long", "other"])))
def test_case_34_prompt_logprobs_do_not_depend_on_who_came_before(order: tuple[str, ...]) -> None:
    prompts = {"short": tuple(range(9)), "long": tuple(range(30)), "other": (*range(12), 60, 61, 62)}
    simulation = cell()
    for key in order:
        answers(simulation, request_spec(key, prompts[key], max_tokens=2, wants_prompt_logprobs=key != "other"))
    for key in ("short", "long"):
        entries = simulation.clients[key].prompt_logprobs
        assert entries == [prompt_logprob(prompts[key], position) for position in range(len(prompts[key]))]


def test_case_35_chunks_and_preemption_leave_prompt_logprobs_whole_and_once() -> None:
    simulation = cell(worker_spec(num_blocks=13), token_budget=2, watermark=0.0)
    simulation.submit(request_spec("old", 8, max_tokens=40))
    for _ in range(20):
        simulation.round()
    spec = request_spec("new", 15, max_tokens=4, wants_prompt_logprobs=True)
    simulation.submit(spec)
    preempted_within_the_prompt = False
    while simulation.round():
        request = simulation.core.requests.get("new")
        if request is not None and request.sequences[0].state.name == "WAITING":
            preempted_within_the_prompt |= 0 < request.prompt_logprobs_done < 15
    assert preempted_within_the_prompt
    simulation.check_over()
    assert len(simulation.clients["new"].prompt_logprobs) == 15


def test_case_55_a_preempted_output_is_the_unpreempted_one_each_token_once() -> None:
    specs = [request_spec(key, 6, max_tokens=24, seed=key) for key in range(3)]
    undisturbed = answers(cell(), *specs)
    small = cell(worker_spec(num_blocks=12), watermark=0.0)
    assert answers(small, *specs) == undisturbed
    assert small.core.counters.preemptions > 0
    assert len({tuple(tokens) for tokens in undisturbed}) == 3
    assert all(len(set(tokens)) > 12 for tokens in undisturbed)


def test_case_56_output_stays_output_after_a_preemption() -> None:
    """What was emitted counts for penalties and usage as output: the prompt's length never changes."""
    small = cell(worker_spec(num_blocks=12), watermark=0.0)
    told: list[WireAdmission] = []
    for key in range(2):
        small.submit(request_spec(key, 6, max_tokens=24))
    while small.core.requests:
        small.place()
        while small.plan("w0"):
            assert small.last_step is not None
            told += to_wire(small.last_step).admissions
        small.run("w0")
        small.apply("w0")
    again = [one for one in told if len(one.token_ids) > 6]
    assert again
    assert {(one.num_prompt, one.max_tokens) for one in told} == {(6, 24)}
    assert [len(small.clients[key].tokens[0]) for key in range(2)] == [24, 24]


def test_case_60_a_shared_prefix_gives_the_same_tokens_with_and_without_the_cache() -> None:
    prompts = [(*range(48), 90, key) for key in range(6)]
    specs = [request_spec(key, prompt, max_tokens=12, seed=5) for key, prompt in enumerate(prompts)]
    shared = cell(worker_spec(num_blocks=128, max_model_len=256))
    one_by_one = [answers(shared, spec)[0] for spec in specs]
    assert shared.core.counters.cached_tokens == 5 * 48
    apart = cell(worker_spec(num_blocks=128, max_model_len=256))
    salted = [replace(spec, cache_salt=str(spec.key)) for spec in specs]
    assert answers(apart, *salted) == one_by_one
    assert apart.core.counters.cached_tokens == 0


def test_a_lost_scheduler_changes_nothing_but_the_time_it_takes() -> None:
    """Promise 2 at the core's level: workers offer what they hold, gateways resubmit what they have."""
    specs = [request_spec(key, 6, max_tokens=24, seed=key) for key in range(3)]
    undisturbed = answers(cell(), *specs)
    simulation = cell()
    for spec in specs:
        simulation.submit(spec)
    for _ in range(3):
        for _ in range(4):
            simulation.round()
        simulation.restart()
        simulation.attach("w0")
    assert simulation.resumed_with_tokens == 9
    simulation.run_dry()
    simulation.check_over()
    assert simulation.core.counters.cached_tokens > 0
    assert [client.tokens[0] for client in simulation.clients.by_key.values()] == undisturbed
