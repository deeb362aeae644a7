"""Mirrors: rollback by common prefix, and what makes a mirror worthless."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_news import Close, Commit, News, Open, Source
from drafting.branching import COPIED_RIGHT
from drafting.mirror import LOOKAHEAD, SHARED_CORES, Mirror, RunnerUp, Worth
from drafting.mirrors import MirrorTable
from engine.prefix_hash import prefix_hash

PROMPT = [5, 6, 7]


def opening(slot: int = 0, generation: int = 1, **changes: Any) -> Open:
    values: dict[str, Any] = {
        "token_ids": list(PROMPT),
        "num_prompt_tokens": 3,
        "seed": 9,
        "temperature": 0.0,
        "max_draft_tokens": 4,
    }
    return Open(slot, generation, **{**values, **changes})


def commit(before: list[int], tokens: list[int], slot: int = 0, generation: int = 1, **changes: Any) -> Commit:
    values: dict[str, Any] = {"base": len(before), "prefix_hash": prefix_hash(before + tokens)}
    return Commit(slot=slot, generation=generation, token_ids=tokens, **{**values, **changes})


@pytest.fixture
def table() -> MirrorTable:
    made = MirrorTable(max_mirrors=4, max_draft_tokens=8)
    made.apply(1, News(opens=[opening()]))
    return made


def mirror_of(table: MirrorTable) -> Mirror:
    mirror = table.get(1, 0)
    assert mirror is not None
    return mirror


@pytest.mark.parametrize(
    ("guess", "computed", "committed", "left", "valid"),
    [
        # all right, more to come: nothing is lost
        ([10, 11, 12, 13], 6, [10, 11], [12, 13], 6),
        # all right, and the bonus beyond the guess
        ([10, 11], 4, [10, 11, 12], [], 4),
        # wrong at once, in the middle, at the end
        ([10, 11, 12], 5, [99], [], 3),
        ([10, 11, 12], 5, [10, 99], [], 4),
        ([10, 11, 12], 5, [10, 11, 99], [], 5),
        # nothing was guessed, or less was computed
        ([], 3, [10], [], 3),
        ([10, 11], 1, [10, 12], [], 1),
    ],
)
def test_rollback_keeps_the_common_prefix(
    guess: list[int], computed: int, committed: list[int], left: list[int], valid: int
) -> None:
    mirror = Mirror(1, 0, 1, list(PROMPT), 3, 9, 0.0, 4, prefix_hash(PROMPT), guess=guess, computed=computed)
    mirror.commit(committed)
    assert mirror.tokens == PROMPT + committed
    assert (mirror.guess, mirror.computed) == (left, valid)
    assert mirror.base_hash == prefix_hash(PROMPT + committed)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 8))
def test_kv_is_never_kept_for_a_token_that_changed(guess: list[int], committed: list[int], computed: int) -> None:
    computed = min(computed, 3 + max(0, len(guess) - 1))
    mirror = Mirror(1, 0, 1, list(PROMPT), 3, 9, 0.0, 4, prefix_hash(PROMPT), guess=list(guess), computed=computed)
    before = PROMPT + guess
    mirror.commit(committed)
    after = mirror.tokens + mirror.guess
    assert after[: mirror.computed] == before[: mirror.computed]
    assert mirror.computed < len(after)
    assert after[: 3 + len(committed)] == PROMPT + committed
    # What could be kept was kept.
    common = 0
    while common < min(len(before), len(after)) and before[common] == after[common]:
        common += 1
    assert mirror.computed == min(computed, common)


def test_gaps_and_wrong_hashes_end_a_mirror_and_other_generations_are_ignored(table: MirrorTable) -> None:
    assert table.apply(1, News(commits=[commit(PROMPT, [1], generation=2)])) == []
    assert table.apply(2, News(commits=[commit(PROMPT, [1])])) == []
    assert mirror_of(table).tokens == PROMPT
    assert len(table.apply(1, News(commits=[commit([*PROMPT, 1], [2])]))) == 1
    assert len(table) == 0
    table.apply(1, News(opens=[opening(generation=2)]))
    assert len(table.apply(1, News(commits=[commit(PROMPT, [1], generation=2, prefix_hash=3)]))) == 1


def test_closes_opens_and_streams(table: MirrorTable) -> None:
    first = mirror_of(table)
    assert table.apply(1, News(opens=[opening(generation=2)])) == [first]
    assert table.apply(1, News(closes=[Close(0, 1)])) == []
    assert len(table.apply(1, News(closes=[Close(0, 2)]))) == 1
    table.apply(1, News(opens=[opening(), opening(1)]))
    table.apply(2, News(opens=[opening()]))
    assert [mirror.stream for mirror in table.drop_stream(1)] == [1, 1]
    assert [mirror.stream for mirror in table] == [2]


def test_mirrors_are_bounded(table: MirrorTable) -> None:
    table.apply(1, News(opens=[opening(slot) for slot in range(10)]))
    assert len(table) == 4
    assert table.num_refused == 6
    table.apply(1, News(closes=[Close(0, 1)], opens=[opening(7), opening(8, token_ids=[])]))
    assert table.get(1, 7) is not None
    assert table.get(1, 8) is None


def test_the_urgent_come_first_then_those_that_run_ahead(table: MirrorTable) -> None:
    table.apply(1, News(opens=[opening(1)]))
    ahead, urgent = mirror_of(table), table.get(1, 1)
    ahead.guess = [1, 2, 3, 4]
    assert table.hungry() == [urgent]
    assert urgent is not None
    urgent.guess = [1] * (LOOKAHEAD * 4 + 1)
    assert table.hungry() == [ahead]
    ahead.exhausted = True
    assert table.hungry() == []
    ahead.commit([1])
    assert table.hungry() == [ahead]
    assert ahead.urgent


def test_tails_are_sent_in_blocks(table: MirrorTable) -> None:
    mirror = mirror_of(table)
    assert not mirror.wants_sending()
    sent = []
    while mirror.wanted:
        mirror.guess.append(1)
        if mirror.wants_sending():
            sent.append(len(mirror.tail().token_ids))
    assert sent == [2, 4, 9]
    mirror.commit([1])
    assert mirror.wants_sending()
    tail = mirror.tail()
    assert (tail.base, tail.prefix_hash, tail.token_ids) == (4, prefix_hash([*PROMPT, 1]), [1] * 8)
    # After a wrong guess there is nothing to send until there is a first part again, or nothing more to be had.
    mirror.commit([9])
    assert not mirror.wants_sending()
    mirror.exhausted = True
    assert mirror.wants_sending()


def test_on_the_targets_cores_the_next_draft_goes_out_whole(table: MirrorTable) -> None:
    table.begin_stream(1, SHARED_CORES)
    table.apply(1, News(opens=[opening(generation=2)]))
    mirror, sent = mirror_of(table), []
    while mirror.wanted:
        mirror.guess.append(1)
        if mirror.wants_sending():
            sent.append(len(mirror.tail().token_ids))
    assert sent == [4, 9]


def test_whoever_wants_another_proposer_gets_no_mirror() -> None:
    table = MirrorTable(max_mirrors=4, max_draft_tokens=8, sources=frozenset({Source.ANY, Source.NGRAM}))
    wishes = [Source.ANY, Source.NGRAM, Source.MODEL, Source.COMBINED]
    table.apply(1, News(opens=[opening(slot, source=source) for slot, source in enumerate(wishes)]))
    assert [mirror.source for mirror in table] == [Source.ANY, Source.NGRAM]
    assert table.num_refused == 2
    # The slot of one that is refused is free again.
    table.apply(1, News(opens=[opening(0, 2, source=Source.MODEL)]))
    assert table.get(1, 0) is None


def test_an_opening_of_fewer_tokens_than_its_prompt_has_is_refused() -> None:
    """Its next output index would be below 0, where there is no noise: the round of all mirrors would fail."""
    table = MirrorTable(max_mirrors=4, max_draft_tokens=8)
    for token_ids in ([], [1, 2]):
        table.apply(1, News(opens=[Open(0, 1, token_ids, 3, 7, 0.7, 4)]))
    assert (len(table), table.num_refused) == (0, 2)
    table.apply(1, News(opens=[Open(0, 1, [1, 2, 3], 3, 7, 0.7, 4)]))
    assert len(table) == 1


def test_a_guess_ends_where_it_is_unlikely_to_be_reached() -> None:
    """Sooner beyond what the next step can use; a commit makes what is left likelier."""
    table = MirrorTable(max_mirrors=4, max_draft_tokens=8)
    table.begin_stream(1, Worth(next=0.2, ahead=0.6))
    table.apply(1, News(opens=[opening()]))
    mirror = mirror_of(table)
    assert mirror.wanted == LOOKAHEAD * 4 + 1
    close = table.odds.right(0.1)  # the guess only just won
    assert close**2 < 0.2 < close
    for margin, wanted in ((9.0, True), (0.1, True), (0.1, False)):
        mirror.runner_ups[mirror.known] = RunnerUp(77, margin)
        mirror.guess.append(10 + len(mirror.guess))
        mirror.reach = table.odds.reach(mirror)
        assert (mirror.wanted > 0) is wanted
    assert mirror.reach == pytest.approx(table.odds.right(9.0) * close**2)
    table.apply(1, News(commits=[commit(PROMPT, [10, 11])]))
    assert mirror.guess == [12]
    assert mirror.wanted > 0
    assert mirror.reach == pytest.approx(table.odds.right(0.1))
    # Copies are likely right, and run on beyond the next draft until they aren't.
    mirror.guess, mirror.runner_ups = [10] * 6, {}
    mirror.reach = table.odds.reach(mirror)
    assert mirror.reach == pytest.approx(COPIED_RIGHT**6)
    assert mirror.wanted == LOOKAHEAD * 4 + 1 - 6
    mirror.reach = 0.5
    assert mirror.wanted == 0, "no further ahead"
    mirror.guess = [10] * 3
    assert mirror.wanted > 0, "but as far as the next step can use it"
