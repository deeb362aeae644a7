"""Planted faults of the proposers; see run.py."""

from __future__ import annotations

from mutant import Mutant

PROPOSERS: tuple[Mutant, ...] = (
    Mutant(
        "shorter-match-believed",
        "drafting/suffix_index.py",
        "length > best.length",
        "length >= best.length",
        ("tests/drafting/test_suffix_index.py",),
    ),
    Mutant(
        "index-forgets-when-it-grows",
        "drafting/suffix_index.py",
        "        for position in range(len(self._before)):",
        "        for position in range(len(self._before) // 2):",
        ("tests/drafting/test_suffix_index.py",),
    ),
    Mutant(
        "round-keeps-anothers-blocks",
        "drafting/round_inputs.py",
        "start = count if whose is block_ids else 0",
        "start = count",
        ("tests/drafting/test_round_inputs.py",),
    ),
    Mutant(
        "tenants-share-a-memory",
        "drafting/ngram_proposer.py",
        "self.memory.find(mirror.tenant, suffix",
        'self.memory.find(next(iter(self.memory._tenants), b""), suffix',
        ("tests/drafting/test_ngram_proposer.py",),
    ),
    Mutant(
        "nameless-are-remembered",
        "drafting/output_memory.py",
        "(self.for_nameless or bool(tenant))",
        "True",
        ("tests/drafting/test_output_memory.py",),
    ),
    Mutant(
        "outputs-run-into-each-other",
        "drafting/output_memory.py",
        "        younger.tokens.append(END)\n",
        "",
        ("tests/drafting/test_output_memory.py",),
    ),
    Mutant(
        "memory-never-ages",
        "drafting/output_memory.py",
        "if generation is None or now_s - generation.since_s > self.max_age_s:",
        "if generation is None:",
        ("tests/drafting/test_output_memory.py",),
    ),
    Mutant(
        "copies-wait-for-the-model",
        "drafting/combined_proposer.py",
        "        if not any(copied):\n",
        "        if True:\n",
        ("tests/drafting/test_combined_proposer.py",),
    ),
    Mutant(
        "copy-goes-on-where-it-misleads",
        "drafting/combined_proposer.py",
        "self.trust.prefers_index(greedy, length + count)",
        "self.trust.prefers_index(greedy, length)",
        ("tests/drafting/test_combined_proposer.py",),
    ),
    Mutant(
        "guess-behind-a-wrong-one-judged",
        "drafting/combined_proposer.py",
        "                said.clear()",
        "                pass",
        ("tests/drafting/test_combined_proposer.py",),
    ),
    Mutant(
        "last-word-handed-over",
        "drafting/foreign/text_proposer.py",
        "[token for token in tokens if token.end <= at]",
        "tokens",
        ("tests/drafting/foreign/test_text_proposer.py",),
    ),
    Mutant(
        "half-a-character-is-text",
        "drafting/foreign/retelling.py",
        "        if utf8.getstate()[0]:\n            return None\n",
        "",
        ("tests/drafting/foreign/test_retelling.py",),
    ),
    Mutant(
        "all-is-encoded-anew",
        "drafting/foreign/retelling.py",
        "        if len(self._open) > MOST_OPEN:",
        "        if False:",
        ("tests/drafting/foreign/test_retelling.py",),
    ),
    Mutant(
        "last-token-taken-for-computed",
        "drafting/foreign/text_proposer.py",
        "min(made.computed, common, len(new) - 1)",
        "min(made.computed, common)",
        ("tests/drafting/foreign/test_text_proposer.py",),
    ),
    Mutant(
        "uncommon-ids-guessed",
        "drafting/foreign/mapped_engine.py",
        "-torch.inf)",
        "0.0)",
        ("tests/drafting/foreign/test_mapped_engine.py",),
    ),
)
