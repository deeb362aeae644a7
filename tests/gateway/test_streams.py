"""One choice: whatever way its tokens arrive, and wherever it is taken up again, its client gets the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams import ChoiceStream, Delta, Finish, FinishReason, IndexGap, OutputNews, StopRules
from gateway.text import ModelText

EOS = 258
PROMPT = list(b"hi")


def choice(text: ModelText, rules: StopRules, prompt_text: str = "") -> ChoiceStream:
    return ChoiceStream(
        0,
        text.detokenizer(PROMPT),
        rules,
        token_text=lambda token_id: text.decode([token_id], skip_special_tokens=False),
        prompt_text=prompt_text,
    )


def news(ids: list[int], first: int, reason: FinishReason | None = None, stop_id: int | None = None) -> OutputNews:
    return OutputNews(
        handle=1,
        choice=0,
        first_token_index=first,
        token_ids=ids,
        logprobs=[("logprob of", token_id) for token_id in ids],
        reason=reason,
        stop_token_id=stop_id,
    )


def merged(deltas: list[Delta]) -> tuple[str, list[int], list[Any], Finish | None]:
    finishes = [delta.finish for delta in deltas if delta.finish is not None]
    assert len(finishes) <= 1
    return (
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs],
        finishes[0] if finishes else None,
    )


def play(stream: ChoiceStream, ids: list[int], first: int, cuts: list[int], take_each: bool) -> list[Delta]:
    """Deliver ids[first:] in batches that end at the cuts; the last one carries the end of the choice."""
    deltas = []
    edges = sorted({cut for cut in cuts if first < cut < len(ids)} | {len(ids)})
    begin = first
    for end in edges:
        last = end == len(ids)
        stopped = last and ids[-1] == EOS
        reason = (FinishReason.STOP if stopped else FinishReason.LENGTH) if last else None
        stream.accept(news(ids[begin:end], begin, reason, EOS if stopped else None))
        begin = end
        if take_each and (delta := stream.take()) is not None:
            deltas.append(delta)
    if (delta := stream.take()) is not None:
        deltas.append(delta)
    assert stream.take() is None
    return deltas


letters = st.sampled_from([*b"ab\n", *"好".encode(), 0xFF, 257])
outputs = st.tuples(st.lists(letters, min_size=1, max_size=16), st.booleans()).map(
    lambda drawn: drawn[0] + [EOS] * drawn[1]
)
stop_rules = st.builds(
    lambda strings, include, min_tokens, shown: StopRules(
        strings=tuple(strings),
        token_ids=frozenset({EOS}),
        shown_token_ids=frozenset({EOS} if shown else ()),
        include=include,
        min_tokens=min_tokens,
    ),
    st.lists(st.text(alphabet="ab\n好", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 6),
    st.booleans(),
)
cut_lists = st.lists(st.integers(1, 16), max_size=6)


@settings(max_examples=300, deadline=None)
@given(outputs, stop_rules, cut_lists, st.booleans())
def test_batches_make_no_difference(
    byte_text: ModelText, ids: list[int], rules: StopRules, cuts: list[int], take_each: bool
) -> None:
    whole = merged(play(choice(byte_text, rules), ids, 0, [], take_each=False))
    assert merged(play(choice(byte_text, rules), ids, 0, cuts, take_each)) == whole
    _, token_ids, logprobs, finish = whole
    assert token_ids == ids[: len(token_ids)]
    assert logprobs == [("logprob of", token_id) for token_id in token_ids]
    assert finish is not None


@settings(max_examples=300, deadline=None)
@given(outputs, stop_rules, st.integers(1, 5))
def test_what_has_waited_comes_in_parts_that_each_have_the_text_of_their_tokens(
    byte_text: ModelText, ids: list[int], rules: StopRules, most: int
) -> None:
    """Who goes on elsewhere from a part's tokens is told no text twice, and misses none."""
    singly = play(choice(byte_text, rules), ids, 0, list(range(1, len(ids))), take_each=True)
    waiting = choice(byte_text, rules)
    stopped = ids[-1] == EOS
    waiting.accept(news(ids, 0, FinishReason.STOP if stopped else FinishReason.LENGTH, EOS if stopped else None))
    parts: list[Delta] = []
    while waiting.has_pending:
        part = waiting.take(most)
        assert part is not None
        assert len(part.token_ids) == len(part.logprobs) <= most
        parts.append(part)
        end = part.first_token_index + len(part.token_ids)
        told = [one for one in singly if one.first_token_index + len(one.token_ids) <= end]
        assert merged(parts) == merged(told)
    assert merged(parts) == merged(singly)


@settings(max_examples=300, deadline=None)
@given(outputs, stop_rules, st.integers(0, 16))
def test_taking_up_again_anywhere_makes_no_difference(
    byte_text: ModelText, ids: list[int], rules: StopRules, held: int
) -> None:
    """Also where text is held back at that moment: what a client has got with its tokens comes never, the rest once."""
    first = choice(byte_text, rules)
    whole = merged(play(choice(byte_text, rules), ids, 0, [], take_each=False))
    held = min(held, len(whole[1]))
    if held == len(ids):
        held -= 1  # the last token came with the choice's end, after which nobody comes back
    first.accept(news(ids[:held], 0))
    before = first.take()
    got = [] if before is None else [before]
    again = choice(byte_text, rules)
    again.restore(ids[:held], max_tokens=100)
    assert len(again.tokens) == held
    if again.finish is not None:
        assert first.finish == again.finish
        rest = []
    else:
        rest = play(again, ids, held, [], take_each=False)
    assert merged([*got, *rest]) == whole


@settings(max_examples=200, deadline=None)
@given(outputs, st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=12))
def test_repeated_and_overlapping_news_count_once(
    byte_text: ModelText, ids: list[int], spans: list[tuple[int, int]]
) -> None:
    rules = StopRules(token_ids=frozenset({EOS}))
    stream = choice(byte_text, rules)
    body = [token_id for token_id in ids if token_id != EOS]
    for begin, end in spans:
        known = len(stream.tokens)
        if begin > known:
            with pytest.raises(IndexGap):
                stream.accept(news(body[begin:end], begin))
            assert len(stream.tokens) == known
        else:
            stream.accept(news(body[begin:end], begin))
        assert stream.tokens == body[: len(stream.tokens)]
    deltas = play(stream, body or [97], 0, [], take_each=False)
    assert merged(deltas)[1] == (body or [97])


def test_a_stop_string_may_end_with_the_last_token_of_min_tokens(byte_text: ModelText) -> None:
    stream = choice(byte_text, StopRules(strings=("b",), min_tokens=3))
    assert stream.accept(news(list(b"bbbb"), 0)) == 3
    assert stream.finish == Finish(FinishReason.STOP, stop_string="b")


def test_text_after_a_stop_has_no_tokens_either(byte_text: ModelText) -> None:
    stream = choice(byte_text, StopRules(strings=("!",)))
    assert stream.accept(news(list(b"ab!cd"), 0)) == 3
    text, token_ids, logprobs, finish = merged(play(stream, list(b"ab!cd"), 3, [], take_each=False))
    assert (text, bytes(token_ids), len(logprobs)) == ("ab", b"ab!", 3)
    assert finish == Finish(FinishReason.STOP, stop_string="!")


def test_the_prompts_text_comes_with_the_first_delta_of_a_fresh_choice(byte_text: ModelText) -> None:
    stream = choice(byte_text, StopRules(), prompt_text="hi")
    first, second = play(stream, list(b"ab"), 0, [1], take_each=True)
    assert (first.prompt_text, second.prompt_text) == ("hi", "")
    resumed = choice(byte_text, StopRules(), prompt_text="hi")
    resumed.restore(b"a", max_tokens=9)
    (delta,) = play(resumed, list(b"ab"), 1, [], take_each=True)
    assert delta.prompt_text == ""


def test_counters_add_up_over_submissions(byte_text: ModelText) -> None:
    stream = choice(byte_text, StopRules())
    stream.accept(OutputNews(1, 0, token_ids=[97], drafted_tokens=4, accepted_tokens=3, resumptions=1))
    stream.accept(OutputNews(1, 0, first_token_index=1, token_ids=[97], drafted_tokens=5, accepted_tokens=3))
    stream.new_submit(resumed=True)
    stream.accept(OutputNews(2, 0, first_token_index=2, token_ids=[97], drafted_tokens=2, accepted_tokens=1))
    assert (stream.drafted_tokens, stream.accepted_tokens, stream.resumptions) == (7, 4, 2)


def test_a_resumed_end_is_seen_where_it_is(byte_text: ModelText) -> None:
    for rules, held, finish, count in [
        (StopRules(strings=("b",)), b"abc", Finish(FinishReason.STOP, stop_string="b"), 2),
        (StopRules(token_ids=frozenset({97})), b"aab", Finish(FinishReason.STOP, stop_token_id=97), 1),
        (StopRules(token_ids=frozenset({97}), min_tokens=1), b"aab", Finish(FinishReason.STOP, stop_token_id=97), 2),
        (StopRules(), b"abcd", Finish(FinishReason.LENGTH), 4),
        (StopRules(), b"abc", None, 3),
    ]:
        stream = choice(byte_text, rules)
        stream.restore(list(held), max_tokens=4)
        assert (stream.finish, len(stream.tokens)) == (finish, count)
