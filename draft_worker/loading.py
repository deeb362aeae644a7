"""What the configuration says of the proposer, and of where it computes."""

from __future__ import annotations

from cluster.cores import own_cores
from draft_worker.config import DraftWorkerConfig
from drafting.loading import ProposerOptions
from drafting.mirror import ALWAYS, OWN_DEVICE, Worth


def options_of(config: DraftWorkerConfig) -> ProposerOptions:
    """For `drafting.loading.load_proposer`."""
    return ProposerOptions(
        draft=config.draft,
        target_model=config.target_model,
        config=config,
        dtype=config.dtype,
        device=config.device,
        kv_cache_gib=config.kv_cache_gib,
        threads=config.threads,
        fake_step_ms=config.fake_step_ms,
        fake_disagreement=config.fake_disagreement,
    )


def worth_of(config: DraftWorkerConfig) -> Worth:
    """How far guesses go for workers that compute elsewhere."""
    return OWN_DEVICE if options_of(config).has_model else ALWAYS


def cores_of(config: DraftWorkerConfig) -> str:
    """Which cores a model computes on; empty where there is none, or where it has a device of its own.

    Raises ModelError if the device isn't there.
    """
    if not options_of(config).has_model:
        return ""
    from engine.runner import resolve_device

    return own_cores() if resolve_device(config.device).type == "cpu" else ""
