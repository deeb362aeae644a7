"""The judges themselves: what they must call a loss."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tandem.v1 import generation_pb2, types_pb2

from tests.chaos import leaks
from tests.chaos.cells import Cell
from tests.chaos.client import Answer, Failure, Record
from tests.chaos.faults import Strike, Struck
from tests.chaos.judgement import Result, blamed, has_hit, judge, slow_to_rest, unexcused
from tests.chaos.lag import Lag
from tests.chaos.leaks import Rest
from tests.chaos.loads import Ask
from tests.chaos.record import Verdict
from tests.chaos.run import slow_recoveries

ASK = Ask((1, 2, 3), 4)
LENGTH = types_pb2.FINISH_REASON_LENGTH


def response(*tokens: int, at: int, finish: int = 0, usage: tuple[int, int] | None = None) -> Any:
    message = generation_pb2.GenerateStreamResponse(seed=7)
    message.deltas.add(token_ids=tokens, first_token_index=at, finish_reason=finish)
    if usage is not None:
        message.usage.prompt_tokens, message.usage.completion_tokens = usage
    return message


def answered(*tokens: int, resumptions: int = 0) -> Answer:
    answer = Answer(1)
    answer.take(response(*tokens, at=0, finish=LENGTH, usage=(3, len(tokens))), True)
    answer.usage.resumptions = resumptions
    return answer


def record(answer: Answer, *times: float, failures: tuple[Failure, ...] = ()) -> Record:
    return Record(ASK, answer, times[0], times[-1], list(times[1:-1]), list(failures))


def struck(fault: str, target: str, name: str, at: float = 5.0) -> Struck:
    return Struck(Strike(fault, target, 1), name, at, settled_s=100.0)


def losses(records: list[Record], strikes: list[Struck], wanted: Answer) -> list[str]:
    result = Result(Cell("plain", ()), strikes, records)
    judge(result, {ASK: wanted}, Lag(), ())
    return result.losses + result.missed


def test_a_gap_and_a_repeated_token_are_refused() -> None:
    for at in (0, 2):
        answer = Answer(1)
        answer.take(response(5, at=0), True)
        with pytest.raises(AssertionError, match="where 1 was next"):
            answer.take(response(6, at=at), False)


def test_nothing_comes_after_an_end_but_its_repetition_at_another_gateway() -> None:
    answer = Answer(2)
    answer.take(response(5, at=0, finish=LENGTH), True)
    answer.take(response(at=1, finish=LENGTH), True)
    with pytest.raises(AssertionError, match="had finished"):
        answer.take(response(6, at=1), True)
    with pytest.raises(AssertionError, match="before every choice"):
        answer.take(response(at=1, usage=(3, 1)), True)


def test_an_equal_answer_is_no_loss_and_another_is() -> None:
    assert losses([record(answered(5, 6), 0.0, 1.0)], [], answered(5, 6)) == []
    assert "another answer" in losses([record(answered(5, 7), 0.0, 1.0)], [], answered(5, 6))[0]


def test_inexact_usage_is_a_loss() -> None:
    answer = answered(5, 6)
    answer.usage.completion_tokens = 3
    assert "usage (3, 3)" in losses([record(answer, 0.0, 1.0)], [], answered(5, 6))[0]


def test_a_long_pause_is_a_loss_unless_the_machine_stood_still() -> None:
    paused = record(answered(5, 6), 0.0, 1.0, 13.0, 13.5)
    assert losses([paused], [], answered(5, 6)) == ["nothing came for 12.0 s"]
    late = Lag()
    late.note(6.0, 2.5)
    assert late.between(1.0, 13.0) == 2.5
    assert late.between(7.0, 13.0) == 0.0


def test_a_fault_that_hit_nobody_is_a_loss() -> None:
    kill = struck("kill", "worker", "worker-0")
    untouched, resumed = answered(5, 6), answered(5, 6, resumptions=1)
    assert not has_hit(kill, [record(untouched, 0.0, 9.0)])
    assert not has_hit(kill, [record(resumed, 6.0, 9.0)]), "it began later"
    assert has_hit(kill, [record(resumed, 0.0, 9.0)])
    assert "hit nobody" in losses([record(untouched, 0.0, 9.0)], [kill], untouched)[0]


def test_a_gateway_that_was_cut_off_is_hit_if_a_stream_stood_still_for_so_long() -> None:
    cut, answer = struck("cut", "gateway", "gateway-0"), answered(5, 6)
    cut.lifted_at = 8.0
    still, late = record(answer, 0.0, 4.0, 4.9, 8.1, 9.0), record(answer, 0.0, 4.0, 6.0, 8.1, 9.0)
    assert has_hit(cut, [late, still])
    assert not has_hit(cut, [late])
    stopped = struck("stop", "worker", "worker-0")
    stopped.lifted_at = 8.0
    assert not has_hit(stopped, [still])


@pytest.mark.parametrize(
    ("code", "held", "killed", "excused"),
    [
        ("UNAVAILABLE", 0, False, True),
        ("UNAVAILABLE", 3, False, False),
        ("UNAVAILABLE", 3, True, True),
        ("INTERNAL", 0, False, False),
        ("DEADLINE_EXCEEDED", 0, False, False),
    ],
)
def test_which_errors_are_excused(code: str, held: int, killed: bool, excused: bool) -> None:
    strikes = [struck("kill" if killed else "stop", "gateway", "gateway-0")]
    failed = record(answered(5, 6), 0.0, 9.0, failures=(Failure("gateway-0", code, "", held, 6.0),))
    assert (unexcused(failed, strikes) == []) == excused


def test_pauses_count_from_the_strike() -> None:
    waited = record(answered(5, 6), 0.0, 4.0, 8.0, 8.5, 9.0)
    assert waited.longest_pause_s(5.0, 105.0) == 3.0
    assert Result(Cell("plain", ()), [], [waited]).pauses_s(struck("kill", "worker", "worker-0")) == [3.0]


def test_more_tasks_or_sockets_than_before_are_left_over() -> None:
    before = Rest(Counter({"serve": 1}), 10)
    assert leaks.compare("w", before, Rest(Counter({"serve": 1}), 12)) == {}
    assert leaks.compare("w", before, Rest(Counter({"serve": 2}), 10)) == {"w: tasks": {"serve": 1}}
    assert leaks.compare("w", before, Rest(Counter(), 13)) == {"w: sockets": (10, 13)}


def test_the_verdict_is_one_line() -> None:
    verdict = Verdict("matrix, fake engine", commit="abc")
    result = Result(Cell("plain", ()), [struck("kill", "worker", "worker-0")], [record(answered(5, 6), 0.0, 9.0)])
    result.tokens_compared = 2
    verdict.add(result)
    assert "1 cells, 1 faults, 1 streams, 2 tokens" in verdict.line()
    assert verdict.line().endswith("holds")
    verdict.losses.append("a token")
    assert verdict.line().endswith("1 losses, 0 min: FAILED")
    assert "\n" not in verdict.line()


def test_only_random_faults_may_miss() -> None:
    result = Result(Cell("plain", ()), [], [], missed=["a kill hit nobody"])
    for may_miss in (False, True):
        verdict = Verdict("soak", may_miss=may_miss, commit="abc")
        verdict.add(result)
        assert "0 faults (1 hit nobody), 0 streams" in verdict.line()
        assert verdict.line().endswith("holds") == may_miss


def test_only_killed_workers_are_crashes() -> None:
    killed, cut = Strike("kill", "worker", 1), Strike("cut", "worker", 1)
    assert blamed(1, Cell("plain", (killed, cut))) == []
    assert blamed(2, Cell("plain", (killed, cut))) == ["2 ends of workers were taken for crashes, 1 were"]
    assert blamed(1, Cell("plain", (Strike("kill", "draft", 1), cut)))


def test_what_goes_only_after_long_is_a_leak() -> None:
    lag = Lag()
    assert slow_to_rest(5.0, 24.0, lag) == []
    assert slow_to_rest(5.0, 26.0, lag) == ["it took 21.0 s until nothing was left"]
    lag.note(10.0, 2.0)
    assert slow_to_rest(5.0, 26.0, lag) == []


def test_recoveries_are_held_to_their_medians() -> None:
    verdict = Verdict("recovery", commit="abc")
    verdict.pauses_s = {
        ("worker", "kill"): [0.1, 1.9, 9.0],
        ("leader", "kill"): [1.0, 3.5, 3.6],
        ("redis", "kill"): [9.0],
    }
    assert slow_recoveries(verdict) == ["leader kill: a median pause of 3.50 s, not 3 s"]
