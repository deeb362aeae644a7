"""One attachment: slots, releases, and what is adopted of an earlier one."""

from __future__ import annotations

import pytest

from scheduler.core.block_tables import find_prefix, open_table
from scheduler.core.sequence import Sequence, State
from scheduler.core.step import Admission
from scheduler.core.worker_state import Resident, WorkerState
from tests.scheduler.core.builders import attached, sequence_of, worker_spec


def enter(worker: WorkerState, sequence: Sequence) -> Admission:
    """What the scheduler does on admission, as far as the worker's state goes."""
    sequence.limit = 40
    open_table(sequence, worker.pool, find_prefix(sequence, worker.pool))
    sequence.state = State.RUNNING
    sequence.slot = worker.enter(sequence)
    worker.prefill_backlog += sequence.prefill_end - sequence.planned
    admission = Admission(sequence.slot, sequence, (), (), 0)
    worker.admissions.append(admission)
    worker.check_integrity()
    return admission


def leave(worker: WorkerState, sequence: Sequence) -> None:
    worker.leave(sequence)
    sequence.state = State.LEAVING


def test_running_is_kept_in_order() -> None:
    worker = attached()
    sequences = [sequence_of(number, number, priority=priority) for number, priority in ((2, 0), (1, 0), (3, 1))]
    for sequence in sequences:
        enter(worker, sequence)
    assert [one.sequence_id for one in worker.running] == [3, 1, 2]


def test_a_sequence_that_was_sent_is_released_and_its_blocks_stay_until_settled() -> None:
    worker = attached()
    sequence = sequence_of(prompt=5)
    enter(worker, sequence)
    worker.admissions.clear()  # sent
    slot = sequence.slot
    leave(worker, sequence)
    assert worker.released_slots == [slot]
    assert slot in worker.free_slots
    assert worker.prefill_backlog == 0
    assert worker.pool.num_referenced == 2
    worker.settle(sequence)
    assert worker.pool.num_free == 16
    worker.check_integrity()


def test_an_admission_that_was_never_sent_is_withdrawn_and_nothing_is_released() -> None:
    worker = attached()
    first, second = sequence_of("a", 1), sequence_of("b", 2)
    enter(worker, first)
    kept = enter(worker, second)
    leave(worker, first)
    assert worker.released_slots == []
    assert worker.admissions == [kept]


def test_a_slot_is_reused_only_together_with_its_release() -> None:
    """A leaves slot s, B takes it before any step: the step carries both, releases first."""
    worker = attached(worker_spec(max_sequences=1))
    first, second = sequence_of("a", 1), sequence_of("b", 2)
    enter(worker, first)
    worker.admissions.clear()
    leave(worker, first)
    worker.settle(first)
    enter(worker, second)
    assert worker.released_slots == [second.slot]
    leave(worker, second)  # never sent: the first one's release is still owed, once
    worker.settle(second)
    assert worker.released_slots == [0]
    assert worker.admissions == []


def test_one_suspect_at_a_time_is_known() -> None:
    worker = attached()
    suspect = sequence_of("a", 1)
    suspect.crashes = 2
    enter(worker, sequence_of("b", 2))
    assert worker.suspect is None
    enter(worker, suspect)
    assert worker.suspect is suspect
    leave(worker, suspect)
    assert worker.suspect is None


# ------------------------------------------------------------------------------------------------------- residents

TOKENS = tuple(range(50, 63))


def hit(worker: WorkerState, tokens: tuple[int, ...], salt: str = "") -> list[int]:
    return find_prefix(sequence_of(prompt=tokens, limit=60, cache_salt=salt), worker.pool)[0]


def adopted(*residents: Resident) -> WorkerState:
    worker = attached(worker_spec(residents=residents))
    worker.check_integrity()
    return worker


def test_full_computed_blocks_of_residents_become_hits() -> None:
    worker = adopted(Resident(TOKENS, (9, 4, 2, 7), 13))
    assert hit(worker, (*TOKENS, 1)) == [9, 4, 2]
    assert worker.pool.num_cached == 3
    assert worker.released_slots == [0, 1, 2, 3]


@pytest.mark.parametrize(("computed", "blocks"), [(0, 0), (3, 0), (4, 1), (11, 2), (12, 3), (500, 3)])
def test_what_is_not_computed_is_not_adopted(computed: int, blocks: int) -> None:
    assert adopted(Resident(TOKENS, (9, 4, 2, 7), computed)).pool.num_cached == blocks


def test_residents_that_share_blocks_adopt_them_once() -> None:
    other = (*TOKENS[:8], 1, 2, 3, 4)
    worker = adopted(Resident(TOKENS, (9, 4, 2), 12), Resident(other, (9, 4, 5), 12))
    assert hit(worker, (*TOKENS, 1)) == [9, 4, 2]
    assert hit(worker, (*other, 1)) == [9, 4, 5]
    assert worker.pool.num_cached == 4


def test_a_second_copy_stays_free() -> None:
    worker = adopted(Resident(TOKENS, (9, 4, 2), 12), Resident(TOKENS, (0, 1, 3), 12))
    assert hit(worker, (*TOKENS, 1)) == [9, 4, 2]
    assert worker.pool.num_free == 13


def test_a_block_that_two_residents_claim_for_different_content_serves_only_the_first() -> None:
    other = tuple(range(80, 93))
    worker = adopted(Resident(TOKENS, (9, 4, 2), 12), Resident(other, (9, 5), 8))
    assert hit(worker, (*TOKENS, 1)) == [9, 4, 2]
    assert hit(worker, (*other, 1)) == []


@pytest.mark.parametrize("blocks", [(16, 4), (-1, 4), (9999,)])
def test_blocks_outside_the_pool_are_not_believed(blocks: tuple[int, ...]) -> None:
    assert adopted(Resident(TOKENS, blocks, 12)).pool.num_cached == 0


def test_a_resident_serves_its_own_salt_only() -> None:
    worker = adopted(Resident(TOKENS, (9, 4, 2), 12, "mine"))
    assert hit(worker, TOKENS) == []
    assert hit(worker, TOKENS, "mine") == [9, 4, 2]


def test_adopted_prefixes_outlive_their_continuations() -> None:
    worker = adopted(Resident(TOKENS, (1, 4, 9), 12))
    worker.pool.allocate(13)  # all the free ones
    assert worker.pool.allocate(1) == [9]
    assert hit(worker, (*TOKENS, 1)) == [1, 4]


def test_without_residents_nothing_is_released() -> None:
    assert adopted().released_slots == []
