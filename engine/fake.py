"""An engine without weights that runs the entire cluster in tests, deterministically.

Its KV holds one 64-bit word per slot, a hash of the token and its position. The hidden state at position p is

    h(p) = Σ_{j ≤ p}  kv[slot(j)] · odd(j)   mod 2^64
    slot(j) = block_table[j // block_size] · block_size + j % block_size

read back through the row's block table, so a wrong, swapped or stale block and an unwritten slot (they hold a poison
word) all change h, and every logit is a hash of h. Printable ASCII ids share the likely logits with high entropy, so
that a skipped or repeated token shows; end of sequence is likely after one context in EOS_PERIOD; all else is
improbable but finite.

Two engines agree wherever their contexts agree, save for the `disagreement` fraction of contexts (chosen by hash),
where an engine insists on a favourite that another hash picks: such an engine is a draft model of known acceptance, at
any temperature.

With a stream it runs ahead (`engine.run_ahead`): launched steps are computed there, later, from tokens that the host
hasn't seen.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from engine.batch import Batch, EngineInfo, LaunchedRows
from engine.errors import ModelError
from engine.kernels import torch_choose
from engine.run_ahead import AheadSteps, Fed, Forward, PendingTokens, TokenFeed
from engine.stream import Stream, ThreadStream

VOCAB_SIZE = 260
EOS_TOKEN_ID = 257
PRINTABLE = range(32, 127)
EOS_PERIOD = 256

_SPREAD = 4.0  # printable logits lie in [0, 4)
_EOS_LOGIT = 6.0
_IMPROBABLE = -30.0
_FAVOURITE_LOGIT = 40.0
_POISON = np.uint64(0xDEADBEEFCAFEF00D)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _uniform(x: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) from the upper 24 bits of uint64."""
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def fake_facts(folder: Path) -> dict[str, int]:
    """What a fake model's folder says of it; nothing where there is none. Raises ModelError for what can't be read."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ModelError(f"{path} is no JSON object")
    return facts


class FakeEngine:
    """See the module's text. Takes `step_ms` + `token_us` per token of real time for each forward."""

    def __init__(
        self,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_sequences: int = 256,
        max_model_len: int = 4096,
        step_ms: float = 0.0,
        token_us: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
        disagreement: float = 0.0,
        fail_on_token_ids: frozenset[int] = frozenset(),
        run_ahead: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """A row whose context holds one of `fail_on_token_ids` gets NaN logits from there on; others are untouched.
        `run_ahead`: steps can be launched, on `stream` or on a thread.
        """
        if vocab_size <= EOS_TOKEN_ID:
            raise ValueError(f"vocab_size must exceed {EOS_TOKEN_ID}; got {vocab_size}")
        if not 0 <= disagreement <= 1:
            raise ValueError(f"disagreement must be in [0, 1]; got {disagreement}")
        self._info = EngineInfo(
            fingerprint="fake-1",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_sequences=max_sequences,
        )
        self._step_s = step_ms / 1e3
        self._token_s = token_us / 1e6
        self._disagreement = disagreement
        self._fail_on = np.array(sorted(fail_on_token_ids), dtype=np.int64)
        slots = np.arange(num_blocks * block_size, dtype=np.uint64)
        self._kv = _mix(slots + _POISON)
        self._failing = np.zeros(num_blocks * block_size, dtype=bool)
        self._odd = _mix(np.arange(max_model_len, dtype=np.uint64) + _GOLDEN) | np.uint64(1)
        self._token_keys = _mix(np.arange(vocab_size, dtype=np.uint64) * _GOLDEN)
        self._ahead: AheadSteps | None = None
        if run_ahead:
            cpu = torch.device("cpu")
            self._feed = TokenFeed(max_sequences, cpu)
            self._ahead = AheadSteps(self._prepare, torch_choose.choose, self._feed, cpu, stream or ThreadStream())

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def runs_ahead(self) -> bool:
        """See `engine.batch.AheadEngine`."""
        return self._ahead is not None

    def launch(self, rows: LaunchedRows) -> PendingTokens:
        """See `engine.batch.AheadEngine`."""
        assert self._ahead is not None
        return self._ahead.launch(rows)

    def _prepare(self, batch: Batch, fed: Fed) -> Forward:
        def run() -> torch.Tensor:
            self._feed.fill(torch.from_numpy(batch.token_ids), fed)
            return self.forward(batch)

        return run

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; float32 logits [L, vocab_size]. Ids or slots out of range raise IndexError."""
        delay_s = self._step_s + self._token_s * len(batch.token_ids)
        if delay_s > 0:
            time.sleep(delay_s)
        self._check_range(batch)
        self._write(batch)
        states, failing = self._read(batch)
        logits = self._logits(states)
        logits[failing] = np.nan
        return torch.from_numpy(logits)

    def corrupt_block(self, block_id: int) -> None:
        """Change every word of a block, as if another sequence had written it: a test's fault."""
        start = block_id * self._info.block_size
        self._kv[start : start + self._info.block_size] ^= _POISON

    def _check_range(self, batch: Batch) -> None:
        # Negative indices would silently wrap around in numpy.
        info = self._info
        for name, values, end in (
            ("token id", batch.token_ids, info.vocab_size),
            ("position", batch.positions, info.max_model_len),
            ("slot", batch.slot_mapping, info.num_blocks * info.block_size),
            ("logit index", batch.logit_indices, len(batch.token_ids)),
        ):
            if len(values) and not (values.min() >= 0 and values.max() < end):
                raise IndexError(f"{name} outside [0, {end}): {values.min()} … {values.max()}")

    def _write(self, batch: Batch) -> None:
        tokens = batch.token_ids.astype(np.uint64)
        positions = batch.positions.astype(np.uint64)
        self._kv[batch.slot_mapping] = _mix(tokens * _GOLDEN + positions + np.uint64(1))
        if len(self._fail_on):
            self._failing[batch.slot_mapping] = np.isin(batch.token_ids, self._fail_on)

    def _read(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """h [L] at each wanted token, and whether its context holds a failing token [L]."""
        states = np.zeros(len(batch.logit_indices), dtype=np.uint64)
        failing = np.zeros(len(batch.logit_indices), dtype=bool)
        block_size, num_blocks = self._info.block_size, self._info.num_blocks
        # logit_indices ascend, so a row's stand together.
        edges = np.searchsorted(batch.logit_indices, batch.query_starts).tolist()
        positions = batch.positions[batch.logit_indices]
        offsets = np.arange(block_size)
        for row, (start, end) in enumerate(pairwise(edges)):
            if start == end:
                continue
            length = int(positions[end - 1]) + 1
            used = -(-length // block_size)
            table = batch.block_tables[row][:used].astype(np.int64)
            if len(table) < used or table.min() < 0 or table.max() >= num_blocks:
                raise IndexError(f"row {row}: block table {table.tolist()} can't serve {length} tokens")
            slots = (table[:, None] * block_size + offsets).reshape(-1)[:length]
            states[start:end] = np.cumsum(self._kv[slots] * self._odd[:length])[positions[start:end]]
            if len(self._fail_on):
                failing[start:end] = np.logical_or.accumulate(self._failing[slots])[positions[start:end]]
        return states, failing

    def _logits(self, states: np.ndarray) -> np.ndarray:
        states = _mix(states)
        noise = _uniform(_mix(states[:, None] ^ self._token_keys[None, :]))
        logits = _IMPROBABLE - noise
        printable = slice(PRINTABLE.start, PRINTABLE.stop)
        logits[:, printable] = noise[:, printable] * np.float32(_SPREAD)
        ends = _mix(states + np.uint64(1)) % np.uint64(EOS_PERIOD) == 0
        logits[ends, EOS_TOKEN_ID] = _EOS_LOGIT
        differs = np.flatnonzero(_uniform(_mix(states ^ _POISON)) < self._disagreement)
        favourites = PRINTABLE.start + _mix(states[differs] + _GOLDEN) % np.uint64(len(PRINTABLE))
        logits[differs, favourites.astype(np.int64)] = _FAVOURITE_LOGIT
        return logits.astype(np.float32, copy=False)
