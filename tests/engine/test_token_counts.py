"""Counts that grow against counts made anew, and against Counter."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts, count_tokens

IDS = st.integers(0, 200)


def as_dict(counts: TokenCounts, draft: list[int]) -> dict[int, float]:
    ids, times = counts.with_draft(draft)
    assert len(set(ids.tolist())) == len(ids) == len(times)
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


@given(
    st.lists(IDS, min_size=1, max_size=90), st.lists(st.lists(IDS, max_size=40), max_size=5), st.lists(IDS, max_size=5)
)
def test_growing_counts_equal_counter(prompt: list[int], runs: list[list[int]], draft: list[int]) -> None:
    counts, known = TokenCounts(), list(prompt)
    for run in [[], *runs]:
        known += run
        counts.catch_up(known, len(prompt))
        output = Counter(known[len(prompt) :])
        assert as_dict(counts, []) == {token_id: output[token_id] for token_id in set(known)}
        output.update(draft)
        assert as_dict(counts, draft) == {token_id: output[token_id] for token_id in {*known, *draft}}
        assert as_dict(counts, draft) == as_dict(count_tokens(known, len(prompt)), draft)
        assert as_dict(counts, []) == as_dict(count_tokens(known, len(prompt)), []), "a draft leaves nothing behind"
