"""The C++ choice at every level of this CPU: noise against plain Python, the rest against torch, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import noise
from engine.kernels import cpp_choose
from engine.kernels.cpp_choose import CppChoose, Cuts
from engine.logprobs import position_logprobs
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.noise_oracle import EDGES, M32, f32, oracle_bits, oracle_gumbel

GOLDEN_FILE = Path(__file__).parents[1] / "golden_noise.txt"
SEED = 0xFEED_BEEF_0BAD_CAFE


@pytest.fixture(scope="module")
def kernels(cpp_level: str) -> CppChoose:
    return CppChoose(cpp_level)


@pytest.fixture(autouse=True)
def _torch_path() -> Iterator[None]:
    """What `sample` and `position_logprobs` do here is the oracle's: without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_choose, "kernels_for", lambda logits: None)
        yield


def choose(kernels: CppChoose, logits: torch.Tensor, params: list[SamplingParams], *, cut: bool = True) -> list[int]:
    temperatures = torch.tensor([0.0 if wish.greedy else wish.temperature for wish in params])
    keys = torch.tensor([noise.row_key(SEED + row, row) for row in range(len(params))], dtype=torch.int64)
    cuts = Cuts(
        torch.tensor([wish.top_k for wish in params]),
        torch.tensor([wish.top_p for wish in params], dtype=torch.float64),
        torch.tensor([wish.min_p for wish in params]),
    )
    chosen: list[int] = kernels.choose(logits, temperatures, keys, cuts if cut else None).tolist()
    return chosen


def expected(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    rows = [SampleRow(wish, SEED + row, row, [0], 1) for row, wish in enumerate(params)]
    return [-1 if token_id is None else token_id for token_id in sample(logits, rows).token_ids]


def test_noise_equals_plain_python_and_the_golden_vectors(kernels: CppChoose) -> None:
    rng = random.Random(2)
    near_the_branch = [round((1 - math.sqrt(0.5)) * 2**32) + d for d in range(-400, 400, 7)]
    bits = EDGES + near_the_branch + [1 << k for k in range(32)] + [rng.getrandbits(32) for _ in range(4000)]
    bits += [rng.getrandbits(rng.randrange(1, 32)) for _ in range(2000)]
    bits += [M32 - rng.getrandbits(20) for _ in range(501)]
    assert kernels.gumbels(torch.tensor(bits)).tolist() == [oracle_gumbel(b) for b in bits]
    golden = [line.split() for line in GOLDEN_FILE.read_text().splitlines() if line.startswith("bits")]
    assert len(golden) >= 10
    assert kernels.gumbels(torch.tensor([int(b, 16) for _, b, _ in golden])).tolist() == [
        float.fromhex(g) for _, _, g in golden
    ]


def test_a_choice_equals_plain_python(kernels: CppChoose) -> None:
    rng = random.Random(5)
    winners = set()
    for row in range(60):
        temperature = f32(rng.choice([1e-5, 0.3, 0.7, 1.0, 2.5, 40.0]))
        logits = [f32(rng.gauss(0, 3)) for _ in range(rng.choice([1, 15, 33, 200]))]
        if row % 2:
            logits = [float(round(x)) for x in logits]
        seed, index = rng.getrandbits(64), rng.randrange(5000)
        totals = [
            f32(f32(f32(x - max(logits)) / temperature) + oracle_gumbel(oracle_bits(seed, index, v)))
            for v, x in enumerate(logits)
        ]
        key = torch.tensor([noise.row_key(seed, index)], dtype=torch.int64)
        (winner,) = kernels.choose(torch.tensor([logits]), torch.tensor([temperature]), key).tolist()
        assert winner == totals.index(max(totals))
        winners.add(winner == logits.index(max(logits)))
    assert winners == {True, False}


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 0.7, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 39, 40, 500]),
    top_p=st.sampled_from([1.0, 1.0, 1e-300, 0.05, 0.5, 0.83, 0.99, 1 - 2**-53]),
    min_p=st.sampled_from([0.0, 0.0, 1e-38, 0.01, 0.3, 1.0]),
)
LOGITS = st.lists(
    st.sampled_from([-math.inf, -8.0, -2.5, -1.0, -0.0, 0.0, 0.5, 3.0, 3.25, 7.0, 1e-42, 3e38, -3e38])
    | st.floats(-30, 30, width=32),
    min_size=1,
    max_size=70,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOGITS, PARAMS)
def test_any_row_equals_torch(kernels: CppChoose, values: list[float], params: SamplingParams) -> None:
    logits = torch.tensor([values])
    assert choose(kernels, logits, [params]) == expected(logits, [params])


SHAPES = [(0.0, 1.0), (0.01, 1.0), (1.0, 0.7), (3.0, 0.7), (3.0, 2.0), (8.0, 1.0), (1.0, 1e-5)]


@pytest.mark.parametrize("vocab_size", [203, 20_011])
def test_large_rows_equal_torch(kernels: CppChoose, vocab_size: int) -> None:
    """From flat to peaked, with ties, banned ids and every cut, whole vectors and what is left of one."""
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    seen = set()
    for spread, temperature in SHAPES:
        logits = torch.randn(16, vocab_size, generator=generator) * spread
        logits[::2] = logits[::2].round()
        logits[::3, ::4] = -torch.inf
        params = [
            SamplingParams(
                temperature=temperature,
                top_k=rng.choice([0, 1, 50, 3000, 19_000]),
                top_p=rng.choice([1.0, 0.2, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 0.05, 1e-9]),
            )
            for _ in range(16)
        ]
        chosen = choose(kernels, logits, params)
        assert chosen == expected(logits, params)
        plain = [SamplingParams(temperature=temperature)] * 16
        assert choose(kernels, logits, plain, cut=False) == expected(logits, plain)
        seen.update(chosen)
    assert len(seen) > 40


@pytest.mark.usefixtures("four_threads")
def test_rows_in_pieces_equal_whole_rows(kernels: CppChoose) -> None:
    """Few rows are split between threads; equal sums in two pieces go to the lower id."""
    logits = torch.randn(12, 50_021, generator=torch.Generator().manual_seed(1)) * 2
    logits[::2] = logits[::2].round()
    params = [SamplingParams(temperature=t, top_p=p) for t in (0.0, 0.7, 1.0) for p in (1.0, 0.9, 1.0, 0.5)]
    whole = choose(kernels, logits, params)
    assert whole == expected(logits, params)
    few = [(row, row + 2) for row in range(0, 12, 2)]
    for start, end in few:
        temperatures = torch.tensor([0.0 if wish.greedy else wish.temperature for wish in params[start:end]])
        keys = torch.tensor([noise.row_key(SEED + row, row) for row in range(start, end)])
        top_p = torch.tensor([wish.top_p for wish in params[start:end]], dtype=torch.float64)
        cuts = Cuts(torch.zeros(2, dtype=torch.int64), top_p, torch.zeros(2))
        assert kernels.choose(logits[start:end], temperatures, keys, cuts).tolist() == whole[start:end]
    tied = torch.zeros(1, 50_021)
    tied[0, [20_000, 40_000]] = 1.0
    assert choose(kernels, tied, [SamplingParams(temperature=0)]) == [20_000]
    tied[0, 49_000] = math.nan
    assert choose(kernels, tied, [SamplingParams(temperature=0)]) == [-1]


def tied_pairs(vocab_size: int, count: int) -> list[tuple[int, int, float]]:
    """(id, other id, its logit): both have the same sum where the one's logit is 0 and the other's is this, below 0."""
    g = noise.gumbel(SEED, 0, vocab_size).numpy()
    rng = random.Random(8)
    found: list[tuple[int, int, float]] = []
    while len(found) < count:
        low, high = sorted(rng.sample(range(vocab_size), 2), key=lambda v: float(g[v]))
        logit = g[low] - g[high]
        if logit < 0 and logit + g[high] == g[low]:
            found.append((low, high, float(logit)))
    return found


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("vocab_size", [16, 300, 50_021])
def test_equal_sums_go_to_the_lowest_id(kernels: CppChoose, vocab_size: int) -> None:
    """Within a vector, between vectors and between pieces, whether the likeliest is the lower one or not."""
    orders = set()
    for likeliest, other, logit in tied_pairs(vocab_size, 40):
        logits = torch.full((1, vocab_size), -torch.inf)
        logits[0, likeliest], logits[0, other] = 0.0, logit
        assert choose(kernels, logits, [SamplingParams()], cut=False) == [min(likeliest, other)]
        orders.add(likeliest < other)
    assert orders == {True, False}


def test_rows_may_be_strided_and_what_is_not_finite_fails_alone(kernels: CppChoose) -> None:
    wide = torch.randn(6, 400, generator=torch.Generator().manual_seed(3))
    logits = wide[:, 50:353]
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 1.0, 0.0, 0.5, 0.0)]
    assert choose(kernels, logits, params) == choose(kernels, logits.contiguous(), params)
    usual = choose(kernels, logits, params)
    wide[1, 352] = math.nan
    wide[2] = -math.inf
    wide[3, 60] = math.inf
    wide[4, 49] = wide[5, 353] = math.nan  # beside the row
    assert choose(kernels, logits, params) == [usual[0], -1, -1, -1, usual[4], usual[5]]


@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0, 20.0])
def test_logprobs_equal_torch(kernels: CppChoose, spread: float) -> None:
    generator = torch.Generator().manual_seed(9)
    for vocab_size, top in ((1, 1), (40, 40), (5003, 0), (5003, 20), (5003, 5003)):
        logits = torch.randn(6, vocab_size, generator=generator) * spread
        logits[::2] = logits[::2].round()
        if vocab_size > 1:
            logits[::3, ::3] = -torch.inf
        ids = torch.randint(0, vocab_size, (6,), generator=generator)
        numbers, ranks, top_ids = kernels.logprobs(logits, ids, top)
        for row, entry in enumerate(position_logprobs(logits, ids.tolist(), [top] * 6)):
            assert entry.chosen is not None
            assert (numbers[row, 0].item(), ranks[row].item()) == (entry.chosen.logprob, entry.chosen.rank)
            assert top_ids[row].tolist() == [best.token_id for best in entry.top]
            assert numbers[row, 1:].tolist() == [best.logprob for best in entry.top]
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    assert (kernels.logprobs(logits, ids, 1)[1] == 0).tolist() == [False, True, True, False, False, False]


def test_bad_arguments_raise(kernels: CppChoose) -> None:
    logits, temperatures, keys = torch.zeros(2, 5), torch.zeros(2), torch.zeros((2, 2), dtype=torch.int64)
    assert kernels.choose(logits, temperatures, keys).tolist() == [0, 0]
    assert kernels.choose(logits[:0], temperatures[:0], keys[:0]).tolist() == []
    for bad in (
        (logits.double(), temperatures, keys),
        (logits.T, temperatures, keys),
        (logits, temperatures.double(), keys),
        (logits, temperatures[:1], keys),
        (logits, temperatures, keys[:1]),
    ):
        with pytest.raises(RuntimeError):
            kernels.choose(*bad)
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        kernels.logprobs(logits, torch.tensor([0, 5]), 1)
    with pytest.raises(RuntimeError, match="of 5 ids"):
        kernels.logprobs(logits, torch.tensor([0, 4]), 6)
