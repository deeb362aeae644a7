"""Rows to sample, for the tests of the sampler and of its processors."""

from __future__ import annotations

from engine.sampler import SampleRow
from engine.sampling_params import SamplingParams


def row(
    params: SamplingParams,
    *,
    seed: int = 1,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    draft: list[int] | None = None,
) -> SampleRow:
    prompt, output, draft = prompt or [0], output or [], draft or []
    return SampleRow(params, seed, len(output) + len(draft), prompt + output, len(prompt), draft)
