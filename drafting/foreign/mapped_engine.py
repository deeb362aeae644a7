"""A draft model behind its target's vocabulary: ids with equal bytes are the same token, both ways.

    target id ──to_draft──▶ the model ──▶ logits of draft ids ──columns──▶ logits of target ids, −inf where it has none

Simple and fast: one token in, one token out, so the target's own noise serves at T > 0 as well. The price: what the
target spells with a token that the draft doesn't have reaches the model as the first token of its own spelling, and is
never guessed. How large the common part is says whether that will do; otherwise drafts go by text.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from drafting.foreign.retelling import SpecialTokens
from drafting.foreign.token_text import TokenTexts
from engine.batch import Batch, Engine, EngineInfo


@dataclasses.dataclass(frozen=True, slots=True)
class VocabularyMap:
    """Ids of the target and what they are to the draft."""

    to_draft: np.ndarray
    """int32 [target ids]: what is fed for each"""
    target_ids: np.ndarray
    """int64 [common], rising: the ids that both have"""
    draft_ids: np.ndarray
    """int64 [common]: the draft's of each"""

    @property
    def share(self) -> float:
        """Of the target's ids, those that both have."""
        return len(self.target_ids) / len(self.to_draft) if len(self.to_draft) else 0.0


def map_vocabularies(target: TokenTexts, draft: TokenTexts, draft_vocab_size: int) -> VocabularyMap:
    """By bytes; special tokens by spelling or role. Ids of the draft beyond its vocab_size are none."""
    by_bytes: dict[bytes, int] = {}
    for token_id, data in enumerate(draft.bytes_of[:draft_vocab_size]):
        if data:
            by_bytes.setdefault(data, token_id)
    specials = SpecialTokens(target, draft)
    pairs: dict[int, int] = {}
    to_draft = np.zeros(len(target.bytes_of), np.int32)
    for token_id, data in enumerate(target.bytes_of):
        same = by_bytes.get(data) if data else specials.find(token_id) if data is None else None
        if same is not None and same < draft_vocab_size:
            pairs[token_id] = to_draft[token_id] = same
        elif data:
            spelt = draft.encode(data.decode("utf-8", "replace"))
            to_draft[token_id] = spelt[0].token_id if spelt and spelt[0].token_id < draft_vocab_size else 0
    return VocabularyMap(to_draft, np.array(list(pairs), np.int64), np.array(list(pairs.values()), np.int64))


class MappedEngine:
    """An engine that speaks the target's ids; see the module's text."""

    def __init__(self, engine: Engine, vocabulary: VocabularyMap) -> None:
        self._engine = engine
        self._map = vocabulary
        self._columns: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def info(self) -> EngineInfo:
        """The engine's, with the target's vocabulary."""
        return dataclasses.replace(self._engine.info, vocab_size=len(self._map.to_draft))

    def forward(self, batch: Batch) -> torch.Tensor:
        """See Engine."""
        logits = self._engine.forward(dataclasses.replace(batch, token_ids=self._map.to_draft[batch.token_ids]))
        if self._columns is None:
            found = (self._map.target_ids, self._map.draft_ids)
            self._columns = tuple(torch.from_numpy(ids).to(logits.device) for ids in found)  # type: ignore[assignment]
        target_ids, draft_ids = self._columns  # type: ignore[misc]
        mapped = logits.new_full((len(logits), len(self._map.to_draft)), -torch.inf)
        mapped[:, target_ids] = logits[:, draft_ids]
        return mapped
