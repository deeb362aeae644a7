"""Whom to believe, from what came."""

from __future__ import annotations

from drafting.trust import INDEX_PRIORS, LENGTHS, MODEL_PRIOR, Trust


def test_at_first_a_long_match_is_believed_and_a_short_one_is_not() -> None:
    trust = Trust()
    assert [trust.prefers_index(True, length) for length in (2, 3, 4, 5, 24)] == [False, False, True, True, True]


def test_lengths_share_a_bucket_with_the_next_shorter_bound() -> None:
    trust = Trust()
    for index, (length, prior) in enumerate(zip(LENGTHS, INDEX_PRIORS, strict=True)):
        last = LENGTHS[index + 1] - 1 if index + 1 < len(LENGTHS) else 99
        assert trust.index(True, length) is trust.index(True, last)
        assert trust.index(True, length).value == prior
    assert trust.index(True, 4) is not trust.index(False, 4)


def test_what_comes_outweighs_what_was_expected_and_is_forgotten_again() -> None:
    trust = Trust()
    for _ in range(40):
        trust.index(False, 5).observe(False)
        trust.index(True, 2).observe(True)
        trust.model(False).observe(True)
    assert not trust.prefers_index(False, 5)
    assert trust.prefers_index(True, 2)
    assert trust.prefers_index(True, 5), "greedy and sampled are apart"
    for _ in range(600):
        trust.index(False, 5).observe(True)
        trust.model(False).observe(False)
    assert trust.index(False, 5).value > 0.85 > MODEL_PRIOR > trust.model(False).value
    assert trust.prefers_index(False, 5)
