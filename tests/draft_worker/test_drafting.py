"""The drafting thread's work: answers, rounds, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.draft_news import Commit, News, Open, Source, Tail
from draft_worker.drafting import Drafter, DraftThread
from draft_worker.inbox import Delivery
from drafting.mirror import Mirror
from drafting.mirrors import MirrorTable
from drafting.ngram_proposer import NgramProposer
from drafting.rounds import MAX_FAILURES
from engine.prefix_hash import prefix_hash

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


class Counting:
    """Guesses 0, 1, 2, …, one token a round; fails when told to."""

    name = "counting"
    sources = frozenset(Source)

    def __init__(self) -> None:
        self.fail = False
        self.rounds: list[int] = []
        self.forgotten: list[Mirror] = []

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        if self.fail:
            raise RuntimeError("broken")
        self.rounds.append(len(mirrors))
        for mirror in mirrors:
            mirror.guess.append(len(mirror.guess))

    def fork(self, branch: Mirror) -> bool:
        return False

    def forget(self, mirror: Mirror) -> None:
        self.forgotten.append(mirror)


def opening(slot: int, generation: int = 1) -> Open:
    return Open(slot, generation, list(PROMPT), len(PROMPT), 0, 0.0, 4)


def news(**values: list) -> Delivery:
    return Delivery(news={1: News(**values)})


def drafter(max_mirrors: int = 8) -> tuple[Drafter, Counting]:
    proposer = Counting()
    return Drafter(proposer, MirrorTable(max_mirrors, 8)), proposer


def test_openings_and_commits_are_answered_even_with_nothing() -> None:
    made, _ = drafter(max_mirrors=1)
    # The one that is taken in will be answered with its first tokens.
    assert made.update(news(opens=[opening(0), opening(1)])) == {}
    assert [made.guess() for _ in range(2)] == [{}, {1: [Tail(0, 1, len(PROMPT), prefix_hash(PROMPT), [0, 1])]}]
    # A commit for a slot that was refused, or is not followed: no tail, but an answer.
    assert made.update(news(commits=[Commit(1, 1, len(PROMPT), [1], 0)])) == {1: []}
    assert made.update(Delivery()) == {}


def test_it_drafts_on_while_the_target_verifies_and_keeps_what_agrees() -> None:
    made, proposer = drafter()
    made.update(news(opens=[opening(0)]))
    sent = []
    while not made.idle:
        sent += [len(tails[0].token_ids) for tails in made.guess().values()]
    assert sent == [2, 4, 9]
    tokens = [0, 1, 2, 3, 4]
    known = [*PROMPT, *tokens]
    answer = made.update(news(commits=[Commit(0, 1, len(PROMPT), tokens, prefix_hash(known))]))
    # The next draft is there before another round is run.
    assert answer == {1: [Tail(0, 1, len(known), prefix_hash(known), [5, 6, 7, 8])]}
    assert len(proposer.rounds) == 9
    assert not made.idle


def test_a_failing_round_costs_its_mirrors_and_many_end_the_thread() -> None:
    made, proposer = drafter()
    made.update(news(opens=[opening(0), opening(1)]))
    proposer.fail = True
    for _ in range(MAX_FAILURES - 1):
        assert made.guess() == {1: []}
        assert len(made.mirrors) == 0
        made.update(news(opens=[opening(0), opening(1)]))
    with pytest.raises(RuntimeError):
        made.guess()
    assert len(proposer.forgotten) == 2 * (MAX_FAILURES - 1)


def test_a_success_in_between_forgives() -> None:
    made, proposer = drafter()
    for _ in range(3 * MAX_FAILURES):
        made.update(news(opens=[opening(0)]))
        proposer.fail = True
        made.guess()
        made.update(news(opens=[opening(0)]))
        proposer.fail = False
        made.guess()


def test_an_ended_stream_gives_everything_back() -> None:
    made, proposer = drafter()
    made.update(news(opens=[opening(0), opening(1)]))
    made.update(Delivery(ended_streams=[1]))
    assert len(made.mirrors) == 0
    assert len(proposer.forgotten) == 2
    assert made.idle


async def test_the_thread_waits_drafts_and_stops() -> None:
    arrived: asyncio.Queue[list[Tail]] = asyncio.Queue()
    thread = DraftThread(lambda stream, tails: arrived.put_nowait(tails))
    await thread.start(lambda: Drafter(NgramProposer(), MirrorTable(8, 8)))
    thread.inbox.put(1, News(opens=[opening(0)]))
    (tail,) = await asyncio.wait_for(arrived.get(), 30)
    assert tail.token_ids == [3, 1, 2, 3, 1, 2, 3, 1, 2]
    await asyncio.wait_for(thread.close(), 5)
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    await asyncio.wait_for(thread.ended, 5)


async def test_what_breaks_the_thread_is_told() -> None:
    def broken() -> Drafter:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await DraftThread(lambda stream, tails: None).start(broken)
    made, proposer = drafter()
    proposer.fail = True
    thread = DraftThread(lambda stream, tails: None)
    await thread.start(lambda: made)
    for generation in range(1, MAX_FAILURES + 1):
        thread.inbox.put(1, News(opens=[opening(0, generation)]))
        while len(proposer.forgotten) < min(generation, MAX_FAILURES - 1):  # noqa: ASYNC110  (another thread's)
            await asyncio.sleep(0.001)
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(thread.ended, 5)
