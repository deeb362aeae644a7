"""Which worker: what is cached there against what is to be done there."""

from __future__ import annotations

from scheduler.core.block_tables import open_table, register_full_blocks
from scheduler.core.config import CoreConfig
from scheduler.core.placement import can_admit, choose_worker, has_room, is_eligible
from scheduler.core.worker_state import WorkerState
from tests.scheduler.core.builders import sequence_of, worker_spec

CONFIG = CoreConfig(token_budget=32, row_cost=8, crossing_cost=100)


def worker_of(name: str, **fields: object) -> WorkerState:
    return WorkerState.attach(name, worker_spec(**fields))


def occupy(worker: WorkerState, prompt: int | tuple[int, ...], key: str = "other") -> None:
    """A sequence runs there, its prompt computed."""
    sequence = sequence_of(key, prompt=prompt, limit=60)
    open_table(sequence, worker.pool, ([], []))
    sequence.slot = worker.enter(sequence)
    sequence.computed = sequence.planned = len(sequence.token_ids) - 1
    register_full_blocks(sequence, worker.pool)


def chosen(*workers: WorkerState, **fields: object) -> str | None:
    sequence = sequence_of(limit=fields.pop("limit", 20), **fields)  # type: ignore[arg-type]
    placement = choose_worker(sequence, workers, CONFIG)
    return placement and placement.worker.worker_id


def test_equal_workers_go_by_name_whatever_their_order() -> None:
    a, b = worker_of("a"), worker_of("b")
    assert chosen(a, b) == chosen(b, a) == "a"


def test_a_busy_worker_is_avoided() -> None:
    a, b = worker_of("a"), worker_of("b")
    occupy(a, 8)
    assert chosen(a, b) == "b"


def test_backlog_weighs_as_much_as_its_tokens() -> None:
    a, b = worker_of("a"), worker_of("b")
    a.prefill_backlog = 9
    occupy(b, 8)  # 8
    assert chosen(a, b) == "b"
    a.prefill_backlog = 7
    assert chosen(a, b) == "a"


def test_a_longer_prefix_outweighs_load_up_to_its_length() -> None:
    a, b = worker_of("a"), worker_of("b")
    prompt = tuple(range(13))
    occupy(b, prompt)  # 12 tokens cached there, one row of weight 8
    assert chosen(a, b, prompt=(*prompt, 1)) == "b"
    occupy(b, 4, "second")  # now 16
    assert chosen(a, b, prompt=(*prompt, 1)) == "a"


def test_another_fingerprint_is_taken_only_for_much() -> None:
    a, b = worker_of("a", fingerprint="x"), worker_of("b", fingerprint="y")
    sequence = sequence_of(limit=20)
    sequence.fingerprint = "y"
    b.prefill_backlog = 63
    placement = choose_worker(sequence, [a, b], CONFIG)
    assert placement is not None
    assert placement.worker is b
    b.free_slots.clear()
    placement = choose_worker(sequence, [a, b], CONFIG)
    assert placement is not None
    assert placement.worker is a


def test_eligibility_is_about_size_and_draining_only() -> None:
    worker = worker_of("a", num_blocks=8, max_model_len=40)
    worker.free_slots.clear()
    assert is_eligible(sequence_of(limit=32), worker)
    assert not is_eligible(sequence_of(limit=33), worker)
    assert is_eligible(sequence_of(prompt=31), worker)
    assert not is_eligible(sequence_of(prompt=32), worker)
    worker.draining = True
    assert not is_eligible(sequence_of(limit=32), worker)


def test_no_room_without_a_slot_or_behind_a_long_backlog_or_with_a_row_per_budget_token() -> None:
    sequence = sequence_of(limit=20)
    worker = worker_of("a")
    assert has_room(sequence, worker, CONFIG)
    worker.prefill_backlog = 64
    assert not has_room(sequence, worker, CONFIG)
    worker.prefill_backlog = 0
    worker.free_slots.clear()
    assert not has_room(sequence, worker, CONFIG)
    busy = worker_of("b")
    occupy(busy, 4)
    assert not has_room(sequence, busy, CoreConfig(token_budget=1))


def test_two_suspects_are_kept_apart() -> None:
    worker = worker_of("a")
    first, second = sequence_of("one"), sequence_of("two")
    first.crashes = second.crashes = 2
    open_table(sequence_of("one", limit=9), worker.pool, ([], []))
    first.slot = worker.enter(first)
    assert not has_room(second, worker, CONFIG)
    worker.leave(first)  # an issued step may still contain it
    assert not has_room(second, worker, CONFIG)
    worker.leaving.clear()
    assert has_room(second, worker, CONFIG)


def test_the_watermark_holds_only_while_something_runs() -> None:
    worker = worker_of("a", num_blocks=8)
    sequence = sequence_of(prompt=27, limit=32)  # 7 blocks
    assert can_admit(sequence, worker, ([], []), CONFIG)
    occupy(worker, 3)  # 7 left, one of them for it to grow, two at least
    assert not can_admit(sequence, worker, ([], []), CONFIG)
    assert can_admit(sequence_of(prompt=19, limit=32), worker, ([], []), CONFIG)
    assert not can_admit(sequence_of(prompt=20, limit=32), worker, ([], []), CONFIG)


def test_admissions_leave_a_block_for_each_that_runs() -> None:
    worker = worker_of("a")
    for key in range(3):
        occupy(worker, 3, str(key))  # 1 block each, 13 of 16 left
    assert can_admit(sequence_of(prompt=39, limit=60), worker, ([], []), CONFIG)
    assert not can_admit(sequence_of(prompt=40, limit=60), worker, ([], []), CONFIG)


def test_a_hit_that_nobody_holds_is_not_counted_as_room() -> None:
    worker = worker_of("a", num_blocks=4)
    prompt = tuple(range(13))
    owner = sequence_of("owner", prompt=prompt, limit=16)
    open_table(owner, worker.pool, ([], []))
    owner.computed = 12
    register_full_blocks(owner, worker.pool)
    worker.pool.release(reversed(owner.blocks))
    assert (worker.pool.num_cached, worker.pool.num_free) == (3, 1)
    assert chosen(worker, prompt=(*prompt, 1), limit=16) == "a"
    worker.pool.allocate(1)
    assert chosen(worker, prompt=(*prompt, 1), limit=16) is None
