"""Settings of whoever guesses; a base of the configurations of `draft_worker` and `worker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field with a default; `metadata` as `cluster.config` knows it."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ProposerConfig:
    """How it is guessed, and from what. A worker with drafts of its own has these as a draft worker does."""

    proposer: str = setting(
        "auto",
        "who guesses (of a worker: with --draft own) where a request doesn't say: the model, what stood in the text "
        "before (ngram), or that where it is likely right and the model elsewhere (combined); auto: combined where "
        "there is a model",
        choices=("auto", "model", "ngram", "combined"),
    )
    vocabulary: str = setting(
        "same",
        "what a draft model's tokenizer is to its target's: the same (anything else is refused), another one whose "
        "tokens the target has too where their bytes are equal (intersection), or another one, by text",
        choices=("same", "intersection", "text"),
    )
    memory_tokens: int = setting(
        262144, "n-gram index: tokens of recent outputs that are remembered, of all tenants together; 0: none", min=0
    )
    memory_age_s: float = setting(3600.0, "n-gram index: how long an output is remembered", min=0.0)
    memory_of: str = setting(
        "tenants",
        "n-gram index: whose outputs are remembered, each for itself alone: requests with a cache_salt are tenants; "
        "all: those without one are one tenant too",
        choices=("tenants", "all"),
    )

    def require_model(self, draft: str, flag: str) -> None:
        """Raise ValueError where the proposer needs a model and the draft, which `flag` says, is none."""
        if draft == "ngram" and self.proposer in ("model", "combined"):
            raise ValueError(f"--proposer {self.proposer} needs a model: {flag} FOLDER")
