"""The core's constants, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SpeculationMode(Enum):
    """How draft budgets come about."""

    AUTO = "auto"
    """chosen step by step, from what is measured"""
    FIXED = "fixed"
    """the largest, less where many rows share a step"""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """How the core plans. One object, validated once."""

    token_budget: int = 512
    """most tokens one step may process; decode rows first, then prefill chunks"""
    depth: int = 2
    """most steps issued to a worker and not yet answered"""
    max_waiting: int = 1024
    """most choices in the queue; further new requests are refused"""
    speculation: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int = 7
    """largest draft budget k of a row"""
    draft_token_budget: int = 64
    """most tokens that all decode rows of a step may process together, drafts included; k shrinks to fit"""
    watermark: float = 0.01
    """share of a pool that admissions leave free while something runs; at least 2 blocks, and one for each that runs"""
    capacity_wait_s: float = 60.0
    """how long a request without a deadline waits while no worker can take it"""
    row_cost: int = 8
    """placement: a running sequence weighs as much as so many tokens to prefill"""
    crossing_cost: int = 4096
    """placement: resuming on another numerics fingerprint weighs as much as so many tokens to prefill"""

    def validate(self) -> None:
        """Raise ValueError naming the first field that can't work."""
        for name in ("token_budget", "depth", "max_waiting", "draft_token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must not be negative, but is {self.max_draft_tokens}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
