"""Equal bytes are equal tokens; what only one of the two has is never guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from drafting.foreign.mapped_engine import MappedEngine, map_vocabularies
from drafting.foreign.token_text import TokenTexts
from drafting.model_proposer import ModelProposer
from engine.batch import Batch
from engine.fake import FakeEngine
from engine.noise import gumbel
from tests.drafting.foreign.vocabularies import gpt, llama
from tests.drafting.mirroring import feed, mirror

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenTexts, TokenTexts]:
    folder: Path = tmp_path_factory.mktemp("vocabularies")
    return gpt(folder), llama(folder)


@pytest.mark.parametrize("turned", [False, True])
def test_common_ids_have_equal_bytes_both_ways(both: tuple[TokenTexts, TokenTexts], turned: bool) -> None:
    target, draft = reversed(both) if turned else both
    found = map_vocabularies(target, draft, len(draft.bytes_of))
    common = {data for data in target.bytes_of if data} & {data for data in draft.bytes_of if data}
    assert len(common) > 280
    pairs = dict(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    for target_id, draft_id in pairs.items():
        data = target.bytes_of[target_id]
        assert data == draft.bytes_of[draft_id]
        assert data in common or (target_id in target.eos_ids and draft_id in draft.eos_ids)
        assert found.to_draft[target_id] == draft_id
    assert {target.bytes_of[target_id] for target_id in pairs} >= common
    assert found.share == len(pairs) / len(target.bytes_of)
    alone = next(i for i, data in enumerate(target.bytes_of) if data and data.isascii() and data not in common)
    spelt = draft.encode((target.bytes_of[alone] or b"").decode())
    assert found.to_draft[alone] == spelt[0].token_id


def test_ids_that_the_draft_model_does_not_have_are_none(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    found = map_vocabularies(target, draft, 300)
    assert found.to_draft.max() < 300
    assert found.draft_ids.max() < 300


def engine(vocab_size: int) -> FakeEngine:
    return FakeEngine(num_blocks=64, block_size=4, max_sequences=8, max_model_len=128, vocab_size=vocab_size)


def test_logits_stand_at_the_targets_ids(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    size = len(draft.bytes_of)
    vocabulary = map_vocabularies(target, draft, size)
    made = MappedEngine(engine(size), vocabulary)
    assert made.info.vocab_size == len(target.bytes_of)
    known = [token.token_id for token in target.encode("The cat sat", at_start=True)]

    def batch(token_ids: np.ndarray) -> Batch:
        n = len(token_ids)
        return Batch(
            token_ids=token_ids.astype(np.int32),
            positions=np.arange(n, dtype=np.int32),
            slot_mapping=np.arange(n, dtype=np.int64),
            query_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(64, dtype=np.int32)[None],
            logit_indices=np.array([n - 1], np.int64),
        )

    logits = made.forward(batch(np.array(known)))[0]
    plain = engine(size).forward(batch(vocabulary.to_draft[known]))[0]
    pairs = dict(zip(vocabulary.target_ids.tolist(), vocabulary.draft_ids.tolist(), strict=True))
    for target_id in range(len(target.bytes_of)):
        expected = plain[pairs[target_id]] if target_id in pairs else -torch.inf
        assert logits[target_id] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_of_the_common_part_with_the_targets_noise(
    both: tuple[TokenTexts, TokenTexts], temperature: float
) -> None:
    target, draft = both
    size = len(draft.bytes_of)
    vocabulary = map_vocabularies(target, draft, size)
    proposer = ModelProposer(MappedEngine(engine(size), vocabulary), "m", len(target.bytes_of))
    followed = mirror([token.token_id for token in target.encode("The cat sat")], temperature=temperature)
    feed(proposer, [followed])
    assert len(followed.guess) > 4
    assert set(followed.guess) <= set(vocabulary.target_ids.tolist())
    if temperature:
        noise = gumbel(followed.seed, 0, len(target.bytes_of))
        greedy = mirror(followed.tokens)
        feed(proposer, [greedy])
        assert followed.guess != greedy.guess
        assert noise[followed.guess[0]] > noise.median()
