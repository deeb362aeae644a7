"""The default model's real weights on the decoder route, against transformers' float64 forward."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import Sequences
from tests.engine.test_decoder import greedy, reference_logits

pytestmark = pytest.mark.real_model

PROMPTS = {
    "chat": [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "story": [1, 4093, 198, 31530, 549, 253, 1890, 1977, 563, 253, 33059, 40061, 30, 2, 198, 1, 520, 9531, 198],
    "code": [1604, 3987, 46477, 24, 94, 727, 2367],
    "facts": [504, 1085, 2981, 282, 260, 3508, 2260, 2287, 592],
    "list": [28134, 2925, 327, 354, 1573, 10059, 42, 198, 33, 30],
}
NEW_TOKENS = 64
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.15}
"""float64 gap between two logits under which the other may be chosen"""
MAX_NEAR_TIES = {"float32": 0, "bfloat16": 8}
"""of 320 tokens"""
MAX_ERROR = {"float32": 1e-3, "bfloat16": 1.0}
"""of a logit; the largest are about 40"""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request, default_model, load_runner):
    return load_runner(default_model, route="decoder", dtype=request.param)


def test_greedy_tokens_are_transformers_own(runner, default_model):
    """Each token is the one that the float64 forward over what comes before it likes best, or nearly so."""
    dtype = "float32" if "dtype=float32" in runner.info.fingerprint else "bfloat16"
    outputs = greedy(Sequences(runner), PROMPTS, NEW_TOKENS)
    near_ties = 0
    for name, prompt in PROMPTS.items():
        tokens = prompt + outputs[name]
        expected = reference_logits(default_model, torch.float64, tokens)
        rows = expected[len(prompt) - 1 : -1]
        gaps = rows.max(dim=-1).values - rows.gather(1, torch.tensor(outputs[name])[:, None])[:, 0]
        assert gaps.max() < MAX_GAP[dtype], name
        near_ties += int((gaps > 0).sum())
        error = Sequences(runner, seed=2).run((name, 0, tokens)).double() - expected
        assert error.abs().max() < MAX_ERROR[dtype], name
        if dtype == "bfloat16":
            theirs = reference_logits(default_model, torch.bfloat16, tokens) - expected
            assert error.square().mean() < theirs.square().mean(), "less exact than transformers in bfloat16"
    assert near_ties <= MAX_NEAR_TIES[dtype]
    assert len({token for out in outputs.values() for token in out}) > NEW_TOKENS


def test_same_bits_alone_and_in_a_batch(runner):
    """Real weights have outliers that random ones lack."""
    outputs = greedy(Sequences(runner), PROMPTS, 24)
    for name, prompt in PROMPTS.items():
        assert greedy(Sequences(runner, seed=5), {name: prompt}, 24)[name] == outputs[name]
    known = {name: prompt + outputs[name] for name, prompt in PROMPTS.items()}
    state = Sequences(runner, seed=6)
    together = state.run(*((name, 0, tokens) for name, tokens in known.items()))
    start = 0
    for name, tokens in known.items():
        alone = [Sequences(runner, seed=7).run((name, 0, tokens[:-1])), state.run((name, len(tokens) - 1, tokens[-1:]))]
        assert torch.equal(torch.cat(alone), together[start : start + len(tokens)]), name
        start += len(tokens)
