"""Do two models speak of the same tokens?

A draft model's ids go to the target as they are, so every id must mean the same in both. Sizes may differ: embeddings
are padded to round numbers, and a fine-tuned model may add tokens at the end.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import IncompleteModel, VocabularyMismatch


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Token of each id, from tokenizer.json, added tokens included. Raises IncompleteModel."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t[0], i) for i, t in enumerate(vocabulary))
        tokens = {int(token_id): token for token, token_id in pairs}
        tokens.update({int(added["id"]): added["content"] for added in content.get("added_tokens", ())})
    except FileNotFoundError:
        raise IncompleteModel(f"{folder} has no tokenizer.json to compare vocabularies by") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise IncompleteModel(f"{path} can't be read: {error!r}") from error
    return tokens


def require_same_vocabulary(target: Path, draft: Path) -> int:
    """The number of leading ids that mean the same in both; one of the two may go on alone from there.

    Raises VocabularyMismatch naming the first id below that which means something else.
    """
    target_tokens, draft_tokens = read_vocabulary(target), read_vocabulary(draft)
    shared = min(max(target_tokens, default=-1), max(draft_tokens, default=-1)) + 1
    for token_id in range(shared):
        of_target, of_draft = target_tokens.get(token_id), draft_tokens.get(token_id)
        if of_target != of_draft:
            raise VocabularyMismatch(
                f"token {token_id} is {of_target!r} for {target.name} and {of_draft!r} for {draft.name}; "
                "a draft model must share its target's vocabulary"
            )
    if not shared:
        raise VocabularyMismatch(f"{target.name} or {draft.name} has an empty vocabulary")
    return shared
