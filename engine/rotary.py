"""Rotary position tables: a position's sines and cosines are computed once and looked up ever after.

Computed in the forward pass they would depend on the batch: through the shape, and, for the two rope types that look at
the longest sequence (`dynamic`, `longrope`), through the neighbours. Here the longest sequence is always the longest
that the engine allows, so one long neighbour changes nothing, and a sequence keeps its frequencies while it grows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK = 64
"""Positions per call of the model's own rotary module: one fixed shape."""
_GROWTH = 1024
"""Positions added to a table at a time."""


class RotaryTable(nn.Module):
    """Stands in for a model's `…RotaryEmbedding`; same call, same result.

    `max_position` must be set to the largest position of the coming call (known on the host, so nothing waits for the
    device).
    """

    def __init__(self, rotary: nn.Module, max_model_len: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.max_position = 0
        self._last_position = max_model_len - 1
        self._tables: dict[Any, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """x gives dtype and device; position_ids [1, T] → what the model's module gives, mostly cos, sin [1, T, D]."""
        key = (args, tuple(sorted(kwargs.items())), x.dtype)
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[1] <= self.max_position:
            tables = self._tables[key] = self._extended(tables, x, args, kwargs)
        positions = position_ids[0]
        found = tuple(table.index_select(1, positions) for table in tables)
        return found if len(found) > 1 else found[0]

    def _extended(
        self, tables: list[torch.Tensor] | None, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        start = tables[0].shape[1] if tables else 0
        stop = (self.max_position // _GROWTH + 1) * _GROWTH
        longest = torch.tensor([[self._last_position]], device=x.device)
        blocks = []
        for first in range(start, stop, _BLOCK):
            positions = torch.arange(first, first + _BLOCK, device=x.device).clamp(max=self._last_position)[None]
            found = self.rotary(x[:, :1], torch.cat((positions, longest), dim=1), *args, **kwargs)
            parts = found if isinstance(found, tuple) else (found,)
            blocks.append([part[:, :_BLOCK] for part in parts])
        columns = list(zip(*blocks, strict=True))
        if tables:
            columns = [(table, *column) for table, column in zip(tables, columns, strict=True)]
        return [torch.cat(column, dim=1) for column in columns]


def tabulate_rotary(model: nn.Module, max_model_len: int) -> list[RotaryTable]:
    """Replace, in place, every rotary module of `model` by its table."""
    tables = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                table = RotaryTable(child, max_model_len)
                setattr(parent, name, table)
                tables.append(table)
    return tables
