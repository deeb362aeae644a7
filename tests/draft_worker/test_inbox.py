"""The inbox: what merges, and in which order it is applied."""

from __future__ import annotations

import threading

from cluster.draft_news import Close, Commit, News, Open
from draft_worker.inbox import Inbox
from drafting.mirror import ALWAYS, SHARED_CORES


def opening(slot: int, generation: int) -> Open:
    return Open(slot, generation, [1, 2], 2, 0, 0.0, 4)


def test_commits_of_a_slot_concatenate() -> None:
    inbox = Inbox()
    for base, tokens in ((5, [1]), (6, [2, 3]), (8, [4])):
        inbox.put(1, News(commits=[Commit(0, 1, base, tokens, base)]))
    inbox.put(1, News(commits=[Commit(1, 1, 0, [9], 0)]))
    inbox.put(2, News(commits=[Commit(0, 1, 0, [8], 0)]))
    delivery = inbox.take(wait=False)
    assert delivery.news[1].commits == [Commit(0, 1, 5, [1, 2, 3, 4], 8), Commit(1, 1, 0, [9], 0)]
    assert delivery.news[2].commits == [Commit(0, 1, 0, [8], 0)]
    assert inbox.take(wait=False).news == {}


def test_a_gap_keeps_only_the_newest() -> None:
    inbox = Inbox()
    inbox.put(1, News(commits=[Commit(0, 1, 5, [1], 0)]))
    inbox.put(1, News(commits=[Commit(0, 1, 9, [2], 0)]))
    assert inbox.take(wait=False).news[1].commits == [Commit(0, 1, 9, [2], 0)]


def test_an_opening_replaces_what_waited_and_a_close_goes_first() -> None:
    inbox = Inbox()
    inbox.put(1, News(opens=[opening(0, 1)], commits=[Commit(0, 1, 2, [3], 0)]))
    inbox.put(1, News(closes=[Close(0, 1)]))
    inbox.put(1, News(opens=[opening(0, 2)], commits=[Commit(0, 2, 2, [4], 0)]))
    news = inbox.take(wait=False).news[1]
    assert (news.closes, news.opens, news.commits) == ([Close(0, 1)], [opening(0, 2)], [Commit(0, 2, 2, [4], 0)])


def test_an_opening_makes_earlier_commits_pointless() -> None:
    inbox = Inbox()
    inbox.put(1, News(commits=[Commit(0, 1, 2, [3], 0)]))
    inbox.put(1, News(opens=[opening(0, 2)]))
    news = inbox.take(wait=False).news[1]
    assert (news.opens, news.commits) == ([opening(0, 2)], [])


def test_an_ended_stream_leaves_nothing_behind() -> None:
    inbox = Inbox()
    inbox.put(1, News(opens=[opening(0, 1)]))
    inbox.end_stream(1)
    delivery = inbox.take(wait=True)
    assert (delivery.news, delivery.ended_streams, delivery.stopped) == ({}, [1], False)


def test_how_far_guesses_go_is_known_before_a_streams_first_news() -> None:
    inbox = Inbox()
    inbox.begin_stream(1, SHARED_CORES)
    inbox.begin_stream(2, ALWAYS)
    inbox.end_stream(2)
    inbox.put(1, News(opens=[opening(0, 1)]))
    delivery = inbox.take(wait=True)
    assert (delivery.begun_streams, list(delivery.news)) == ({1: SHARED_CORES}, [1])
    assert not inbox.take(wait=False).begun_streams


def test_waiting_ends_with_news_or_a_stop() -> None:
    inbox = Inbox()
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(wait=True).stopped))
    thread.start()
    inbox.stop()
    thread.join(5)
    assert taken == [True]
