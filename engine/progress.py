"""How long work tells its caller how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float | None], None]
"""Called with what is going on and, where it is known, the share of it that is done (0 … 1)."""
