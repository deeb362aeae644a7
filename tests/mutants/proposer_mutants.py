"""Planted faults of the proposers; see run.py."""

from __future__ import annotations

from mutant import Mutant

PROPOSERS: tuple[Mutant, ...] = (
    Mutant(
        "shorter-match-believed",
        "draft_worker/suffix_index.py",
        "length > best.length",
        "length >= best.length",
        ("tests/draft_worker/test_suffix_index.py",),
    ),
    Mutant(
        "index-forgets-when-it-grows",
        "draft_worker/suffix_index.py",
        "        for position in range(len(self._before)):",
        "        for position in range(len(self._before) // 2):",
        ("tests/draft_worker/test_suffix_index.py",),
    ),
    Mutant(
        "round-keeps-anothers-blocks",
        "draft_worker/round_inputs.py",
        "start = count if whose is block_ids else 0",
        "start = count",
        ("tests/draft_worker/test_round_inputs.py",),
    ),
    Mutant(
        "tenants-share-a-memory",
        "draft_worker/ngram_proposer.py",
        "self.memory.find(mirror.tenant, suffix",
        'self.memory.find(next(iter(self.memory._tenants), b""), suffix',
        ("tests/draft_worker/test_ngram_proposer.py",),
    ),
    Mutant(
        "nameless-are-remembered",
        "draft_worker/output_memory.py",
        "(self.for_nameless or bool(tenant))",
        "True",
        ("tests/draft_worker/test_output_memory.py",),
    ),
    Mutant(
        "outputs-run-into-each-other",
        "draft_worker/output_memory.py",
        "        younger.tokens.append(END)\n",
        "",
        ("tests/draft_worker/test_output_memory.py",),
    ),
    Mutant(
        "memory-never-ages",
        "draft_worker/output_memory.py",
        "if generation is None or now_s - generation.since_s > self.max_age_s:",
        "if generation is None:",
        ("tests/draft_worker/test_output_memory.py",),
    ),
    Mutant(
        "copies-wait-for-the-model",
        "draft_worker/combined_proposer.py",
        "        if not any(copied):\n",
        "        if True:\n",
        ("tests/draft_worker/test_combined_proposer.py",),
    ),
    Mutant(
        "copy-goes-on-where-it-misleads",
        "draft_worker/combined_proposer.py",
        "self.trust.prefers_index(greedy, length + count)",
        "self.trust.prefers_index(greedy, length)",
        ("tests/draft_worker/test_combined_proposer.py",),
    ),
    Mutant(
        "guess-behind-a-wrong-one-judged",
        "draft_worker/combined_proposer.py",
        "                said.clear()",
        "                pass",
        ("tests/draft_worker/test_combined_proposer.py",),
    ),
    Mutant(
        "last-word-handed-over",
        "draft_worker/foreign/text_proposer.py",
        "[token for token in tokens if token.end <= at]",
        "tokens",
        ("tests/draft_worker/foreign/test_text_proposer.py",),
    ),
    Mutant(
        "half-a-character-is-text",
        "draft_worker/foreign/retelling.py",
        "        if utf8.getstate()[0]:\n            return None\n",
        "",
        ("tests/draft_worker/foreign/test_retelling.py",),
    ),
    Mutant(
        "all-is-encoded-anew",
        "draft_worker/foreign/retelling.py",
        "        if len(self._open) > MOST_OPEN:",
        "        if False:",
        ("tests/draft_worker/foreign/test_retelling.py",),
    ),
    Mutant(
        "last-token-taken-for-computed",
        "draft_worker/foreign/text_proposer.py",
        "min(made.computed, common, len(new) - 1)",
        "min(made.computed, common)",
        ("tests/draft_worker/foreign/test_text_proposer.py",),
    ),
    Mutant(
        "uncommon-ids-guessed",
        "draft_worker/foreign/mapped_engine.py",
        "-torch.inf)",
        "0.0)",
        ("tests/draft_worker/foreign/test_mapped_engine.py",),
    ),
)
