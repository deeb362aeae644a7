"""Planted faults of distillation and of distilled drafts; see run.py."""

from __future__ import annotations

from mutant import Mutant

DISTILL: tuple[Mutant, ...] = (
    Mutant(
        "draft-ids-not-mapped",
        "engine/draft_model.py",
        ".index_copy_(1, self._token_ids, logits)",
        ".index_copy_(1, torch.arange(logits.shape[1]), logits)",
        ("tests/engine/test_draft_model.py",),
    ),
    Mutant(
        "lens-forgotten",
        "engine/draft_model.py",
        ".float() @ self._draft.tensor(LENS, (shape[1], shape[1]))",
        ".float()",
        ("tests/engine/test_draft_model.py",),
    ),
    Mutant(
        "any-target-will-do",
        "engine/draft_model.py",
        'if embedding_digest(embedding) != draft.target["embedding_sha256"]:',
        "if False:",
        ("tests/engine/test_draft_model.py",),
    ),
    Mutant(
        "features-of-the-next-token",
        "distill/shards.py",
        "torch.arange(answer.first - 1, answer.end - 1)",
        "torch.arange(answer.first, answer.end)",
        ("tests/distill/test_generation.py",),
    ),
    Mutant(
        "questions-taken-for-answers",
        "distill/generation.py",
        "one.first, one.asking = len(one.tokens), False",
        "one.asking = False",
        ("tests/distill/test_generation.py",),
    ),
    Mutant(
        "noise-of-another-index",
        "distill/evaluation.py",
        "[answer.seed] * len(logits), range(len(logits))",
        "[answer.seed] * len(logits), range(1, len(logits) + 1)",
        ("tests/distill/test_evaluation.py",),
    ),
    Mutant(
        "lookup-finds-itself",
        "distill/evaluation.py",
        "tuple(tokens[position - length : position])] = position",
        "tuple(tokens[position - length + 1 : position + 1])] = position + 1",
        ("tests/distill/test_evaluation.py",),
    ),
    Mutant(
        "held-out-words-in-training",
        "distill/prompts.py",
        "return [entry for entry in entries if entry not in held_out],",
        "return list(entries),",
        ("tests/distill/test_prompts.py",),
    ),
    Mutant(
        "batch-repeated-on-resumption",
        "distill/training.py",
        "            self.position.batch += 1\n            self.position.step += 1\n            yield collate",
        "            self.position.step += 1\n            yield collate",
        ("tests/distill/test_training.py",),
    ),
    Mutant(
        "softcap-without-slope",
        "distill/loss.py",
        "slope *= 1.0 - (capped / head.softcap).square()",
        "pass",
        ("tests/distill/test_loss.py",),
    ),
)
