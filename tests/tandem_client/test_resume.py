"""What a client accepts of a stream after a break."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_client.resume import BrokenStream, StreamProgress, collect
from tandem_client.types import Chunk, Delta, FinishReason, PositionLogprobs, Request, Usage

SEED = 7


def chunk(*deltas: Delta, usage: Usage | None = None, seed: int = SEED) -> Chunk:
    return Chunk(request_id="r", model="m", seed=seed, deltas=deltas, usage=usage)


def delta(first: int, *token_ids: int, index: int = 0, finish: FinishReason | None = None) -> Delta:
    text = "".join(f"<{token}>" for token in token_ids)
    return Delta(index=index, text=text, first_token_index=first, token_ids=token_ids, finish_reason=finish)


def test_nothing_binds_the_answer_before_the_first_chunk() -> None:
    progress = StreamProgress(Request(prompt="x", n=2))
    assert progress.delivered == {}
    progress.accept(chunk(delta(0, 5, index=1)))
    assert progress.delivered == {0: [], 1: [5]}
    assert progress.seed == SEED


def test_a_gap_is_refused() -> None:
    progress = StreamProgress(Request(prompt="x"))
    progress.accept(chunk(delta(0, 5)))
    with pytest.raises(BrokenStream, match="1 was next"):
        progress.accept(chunk(delta(2, 6)))


def test_a_half_repeated_delta_is_refused() -> None:
    """Its text can't be split."""
    progress = StreamProgress(Request(prompt="x"))
    progress.accept(chunk(delta(0, 5, 6)))
    with pytest.raises(BrokenStream):
        progress.accept(chunk(delta(1, 6, 7)))


def test_another_seed_is_refused() -> None:
    progress = StreamProgress(Request(prompt="x"))
    progress.accept(chunk(delta(0, 5)))
    with pytest.raises(BrokenStream, match="seed"):
        progress.accept(chunk(delta(1, 6), seed=8))


def test_a_last_message_before_the_end_is_refused() -> None:
    progress = StreamProgress(Request(prompt="x", n=2))
    progress.accept(chunk(delta(0, 5, finish=FinishReason.STOP)))
    with pytest.raises(BrokenStream, match=r"\[1\]"):
        progress.accept(chunk(usage=Usage()))
    assert not progress.complete


def test_a_choice_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(BrokenStream, match="choice 1"):
        StreamProgress(Request(prompt="x")).accept(chunk(delta(0, 5, index=1)))


def test_a_finished_choice_stays_finished() -> None:
    progress = StreamProgress(Request(prompt="x"))
    progress.accept(chunk(delta(0, 5, finish=FinishReason.STOP)))
    assert progress.accept(chunk(delta(0, 5, finish=FinishReason.STOP))) is None
    assert progress.accept(chunk(usage=Usage(prompt_tokens=1))) is not None
    assert progress.complete


def test_text_without_tokens_passes() -> None:
    """What was held back for a possible stop string comes at the end, with no new token."""
    progress = StreamProgress(Request(prompt="x"))
    progress.accept(chunk(delta(0, 5)))
    tail = Delta(index=0, text="tail", first_token_index=1, token_ids=(), finish_reason=FinishReason.STOP)
    accepted = progress.accept(chunk(tail))
    assert accepted is not None
    assert accepted.text == "tail"


def test_prompt_logprobs_come_once() -> None:
    progress = StreamProgress(Request(prompt="x"))
    prompt = (PositionLogprobs(chosen=None, top=()),)
    message = Chunk(request_id="r", model="m", seed=SEED, deltas=(), prompt_logprobs=prompt)
    first = progress.accept(message)
    assert first is not None
    assert first.prompt_logprobs == prompt
    assert progress.accept(message) is None


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    breaks=st.lists(st.integers(0, 6), max_size=5),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    replays=st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_any_breaks_join_to_the_whole_answer(
    lengths: list[int], breaks: list[int], sizes: list[int], replays: list[bool]
) -> None:
    """The oracle is the answer itself; a stream after a break goes on from what is held, or repeats it first."""
    answer = {index: [index * 1000 + i for i in range(length)] for index, length in enumerate(lengths)}
    progress = StreamProgress(Request(prompt="x", n=len(lengths)))
    accepted: list[Chunk] = []
    for attempt, limit in enumerate([*breaks, 10_000]):
        held = {index: list(tokens) for index, tokens in progress.delivered.items()}
        messages = []
        for index, tokens in answer.items():
            position = len(held.get(index, []))
            if replays[attempt % len(replays)] and position:
                messages.append(chunk(delta(0, *tokens[:position], index=index)))
            step = 0
            while position < len(tokens):
                part = tokens[position : position + sizes[step % len(sizes)]]
                ends = position + len(part) == len(tokens)
                messages.append(
                    chunk(delta(position, *part, index=index, finish=FinishReason.LENGTH if ends else None))
                )
                position += len(part)
                step += 1
        messages.append(chunk(usage=Usage(completion_tokens=sum(lengths))))
        accepted += [new for new in map(progress.accept, messages[:limit]) if new is not None]
        if progress.complete:
            break
        progress.stream_lost()
    assert progress.complete
    whole = collect(accepted)
    assert {choice.index: list(choice.token_ids) for choice in whole.choices} == answer
    assert [choice.text for choice in whole.choices] == [
        "".join(f"<{token}>" for token in tokens) for tokens in answer.values()
    ]
