"""Tokens from the output head without all of its logits: csrc/screen.cpp says how, and why they are the same tokens.

The screen is an int8 copy of the head. Rows that need nothing but their token, at T = 0 or with plain noise, get it
from half of the bytes (a quarter in float32) and a few tiles of the head.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

from engine.kernels.build import SOURCES, library
from engine.kernels.ops import PackedLinear

MOST_ROWS = 256
"""Beyond what was measured; up to there a screen saves a third of the head's time and more at every level."""


def pack_screen(weight: torch.Tensor) -> torch.Tensor | None:
    """Of a head's weight [N, K], float32 or bfloat16, without bias; None if it can't be screened, as when something in
    it isn't finite.
    """
    load_operations()
    screen: torch.Tensor = torch.ops.tandem.pack_screen.default(weight.detach())
    return screen if screen.numel() else None


def screen_layout() -> str:
    """A hash of what decides how screens are packed."""
    digest = hashlib.sha256()
    for path in (Path(__file__), SOURCES / "screen.h", SOURCES / "screen_pack_ops.cpp"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def choose_head(
    level: int,
    x: torch.Tensor,
    weight: PackedLinear,
    screen: torch.Tensor | None,
    scale: float,
    softcap: float,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    num_skipped: torch.Tensor,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    most_rows: int = MOST_ROWS,
) -> None:
    """token_ids int64 [L] = `Ops.choose` of what `Ops.linear` makes of x [L, K].

    logits float32 [L, N] is room to work in, its numbers mean nothing afterwards; num_skipped int64 [1] is the
    operation's own memory, 0 at first.
    """
    torch.ops.tandem.choose_head.default(
        level,
        x,
        weight.data,
        weight.bias,
        scale,
        softcap,
        screen,
        most_rows,
        temperatures,
        keys,
        num_skipped,
        logits,
        token_ids,
    )


@cache
def load_operations() -> str:
    """Load the library, tell torch how the operations behave on tensors without data, and return the best level.

    Raises `build.NoKernels`.
    """
    level = library()
    torch.library.register_fake("tandem::choose_head", lambda *arguments: None)
    torch.library.register_fake("tandem::pack_screen", _of_unknown_size)
    return level


def _of_unknown_size(weight: torch.Tensor) -> torch.Tensor:
    """pack_screen without data: whether a head can be screened is seen by its values only."""
    context = torch.library.get_ctx()
    return weight.new_empty((context.new_dynamic_size(), context.new_dynamic_size()), dtype=torch.uint8)
