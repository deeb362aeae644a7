"""Stop strings against a brute-force search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.stop_strings import StopMatcher


def oracle(text: str, stops: list[str], include: bool, armed_from: int = 0) -> tuple[str, str | None]:
    """The shown text and the matched string, by trying every end in order."""
    for end in range(armed_from + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False, disarmed: int = 0) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for number, piece in enumerate(pieces):
        text, match = matcher.feed(piece, armed=number >= disarmed)
        shown += text
        if match is not None:
            return shown, match.string
    return shown + matcher.flush(), None


texts = st.text(alphabet="ab", max_size=10)
pieces = st.lists(texts, max_size=8)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(pieces, stop_lists, st.booleans())
def test_equals_brute_force(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == oracle("".join(pieces), stops, include)


@given(pieces, stop_lists, st.booleans(), st.integers(0, 8))
@example(pieces=["aa", "a"], stops=["aa"], include=False, disarmed=1)
@example(pieces=["abab", "abc"], stops=["abab"], include=True, disarmed=1)
def test_unarmed_text_matches_nothing_that_ends_in_it(
    pieces: list[str], stops: list[str], include: bool, disarmed: int
) -> None:
    armed_from = len("".join(pieces[:disarmed]))
    assert run(pieces, stops, include, disarmed) == oracle("".join(pieces), stops, include, armed_from)


@given(pieces, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    fed = ""
    for piece in pieces:
        _, match = matcher.feed(piece)
        if match is not None:
            return
        fed += piece
        prefixes = [stop[:size] for stop in stops for size in range(1, len(stop)) if fed.endswith(stop[:size])]
        assert matcher.held == max(prefixes, key=len, default="")


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "text", "matched"),
    [
        (["QR", "S", "TU"], ["QRSTU"], False, "", "QRSTU"),
        (["a b", " cd"], ["b c"], False, "a ", "b c"),
        (["a b", " cd"], ["b c"], True, "a b c", "b c"),
        (["the", " end"], ["end###"], False, "the end", None),
        (["stop"], ["stop"], False, "", "stop"),
        (["xaab"], ["aab", "ab"], False, "x", "aab"),
        (["abcd"], ["abcd", "bc"], False, "a", "bc"),
        (["aaab"], ["aab"], False, "a", "aab"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], include: bool, text: str, matched: str | None) -> None:
    assert run(pieces, stops, include) == (text, matched)


def test_nothing_is_shown_of_a_stop_before_it_is_complete() -> None:
    matcher = StopMatcher(["QRSTU"])
    assert [matcher.feed(piece)[0] for piece in ("QR", "S", "TU")] == ["", "", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
