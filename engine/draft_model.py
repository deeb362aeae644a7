"""Runs a distilled draft: an engine over the target's vocabulary, of which the draft knows a part.

The layers are the fast decoder's. The lens is multiplied into the head's rows at load, so a guess costs the layers and
one product with [V, hidden]. On a CPU all products are of 8-bit integers (`engine.kernels.cpp_draft`): the time of a
round is that of reading the weights, and a guess needn't have anybody's bits.

Guesses are made over the draft's own vocabulary and named by the target's ids, whose noise they are made with. As a
plain engine it puts its logits in rows as wide as the target's vocabulary, -inf where the draft has no opinion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.batch import Batch, Choices, DecodeRows
from engine.decoder_route import DecoderModel, refusal
from engine.decoder_spec import DecoderSpec
from engine.decoder_weights import Checkpoint, Weight, WeightReader
from engine.description import Undescribed, describe
from engine.draft_folder import HEAD_TOKEN_IDS, LENS, DraftFolder, embedding_digest, read_draft
from engine.errors import UnsupportedModel
from engine.guessing import Guess, best_two, guesses_of
from engine.kernels.cpp_draft import DraftOps
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import Ops
from engine.kernels.selection import select_ops
from engine.kernels.threads import use_threads
from engine.loading import ModelFacts, check_supported
from engine.progress import Progress
from engine.runner import ModelRunner, RunnerOptions, resolve_device, resolve_dtype, resolve_max_model_len

_ROWS = 16


class DraftModel:
    """Implements `engine.runner.Model`. Not thread-safe."""

    def __init__(self, decoder: DecoderModel, token_ids: torch.Tensor, vocab_size: int) -> None:
        """`token_ids` int64: the target's ids of the decoder's logits."""
        self.device = decoder.device
        self.dtype = decoder.dtype
        self.vocab_size = vocab_size
        self.layers = decoder.layers
        self.fingerprint = f"{decoder.fingerprint} distilled"
        self._decoder = decoder
        self._token_ids = token_ids.to(decoder.device)
        self._short_ids = self._token_ids.to(torch.int32)
        self._rows = torch.empty((0, vocab_size))

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """See `engine.runner.Model`."""
        self._decoder.allocate(num_blocks, block_size)

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [L, the target's vocabulary], valid until the next call."""
        logits = self._decoder.forward(batch)
        if len(logits) > len(self._rows):
            rows = -(-len(logits) // _ROWS) * _ROWS
            self._rows = torch.full((rows, self.vocab_size), -torch.inf, device=self.device)
        return self._rows[: len(logits)].index_copy_(1, self._token_ids, logits)

    @property
    def guesses_next(self) -> bool:
        """See `engine.guessing.GuessingEngine`."""
        return isinstance(self._decoder.ops, DraftOps)

    def guess(self, batch: Batch, choices: Choices) -> list[Guess]:
        """See `engine.guessing.GuessingEngine`."""
        if self.guesses_next:
            return guesses_of(self._decoder.choose(batch, choices))
        return best_two(self._decoder.forward(batch), choices, self._short_ids)

    def guess_next(self, rows: DecodeRows) -> list[Guess]:
        """See `engine.guessing.GuessingEngine`."""
        return guesses_of(self._decoder.decode(rows))


class DraftRunner(ModelRunner):
    """Implements `engine.guessing.GuessingEngine` as well."""

    def __init__(self, model: DraftModel, facts: ModelFacts, options: RunnerOptions) -> None:
        super().__init__(model, facts, options)
        self.guesses_next = model.guesses_next
        self.guess = model.guess
        self.guess_next = model.guess_next


def load_draft(folder: Path, target: Path, *, progress: Progress | None = None, **options: Any) -> DraftRunner:
    """The draft in `folder` beside the target's folder; `options` are fields of RunnerOptions.

    Raises a ModelError that names what is wrong: with the draft, or with the two together.
    """
    wanted = RunnerOptions(**options)
    dtype, device = resolve_dtype(wanted.dtype), resolve_device(wanted.device)
    draft, facts = read_draft(folder), check_supported(target)
    if device.type == "cpu":
        if wanted.threads:
            torch.set_num_threads(wanted.threads)
        use_threads(wanted.threads, progress)
    max_model_len = resolve_max_model_len(facts, wanted.max_model_len)
    spec = _spec(draft, facts, max_model_len)
    token_ids = draft.tensors[HEAD_TOKEN_IDS]
    ops = select_ops(device, wanted.kernels)
    if isinstance(ops, CppOps):
        ops = DraftOps(token_ids, ops.level)
    reason = refusal(facts, spec, ops, dtype, wanted.block_size)
    if reason is not None:
        raise UnsupportedModel(f"the draft {folder} can't run: {reason}")
    weights = dict(_weights(draft, Checkpoint(target), spec, ops, dtype, device))
    spec = replace(spec, tied_head=False)
    decoder = DecoderModel(
        facts, spec, ops, dtype, device, max_model_len, max_sequences=wanted.max_sequences, weights=weights
    )
    return DraftRunner(DraftModel(decoder, token_ids, facts.vocab_size), facts, wanted)


def _spec(draft: DraftFolder, facts: ModelFacts, max_model_len: int) -> DecoderSpec:
    """The decoder's, its vocabulary being the draft's. Raises UnsupportedModel for another target."""
    config = AutoConfig.from_pretrained(facts.folder, local_files_only=True)
    there = {"model_type": facts.model_type, "hidden_size": config.hidden_size, "vocab_size": facts.vocab_size}
    for name, value in there.items():
        if draft.target[name] != value:
            raise UnsupportedModel(
                f"{draft.folder} is a draft for another target: target.{name} is {draft.target[name]!r}, "
                f"that of {facts.folder} {value!r}"
            )
    try:
        spec = describe(AutoConfig.for_model(**draft.decoder), max_model_len)
    except Exception as error:  # transformers raises anything for settings that it doesn't know
        raise UnsupportedModel(f"{draft.folder}: decoder can't be read: {error}") from error
    if isinstance(spec, Undescribed):
        raise UnsupportedModel(f"{draft.folder}: decoder: {spec.reason}")
    if spec.hidden_size != config.hidden_size:
        raise UnsupportedModel(
            f"{draft.folder}: decoder.hidden_size is {spec.hidden_size} instead of {config.hidden_size}"
        )
    return replace(spec, vocab_size=len(draft.tensors[HEAD_TOKEN_IDS]))


def _weights(
    draft: DraftFolder, target: Checkpoint, spec: DecoderSpec, ops: Ops, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Weight]]:
    """Raises IncompleteModel or UnsupportedModel naming what is wrong."""
    matrix = (draft.target["vocab_size"], spec.hidden_size)
    embedding = target.tensor(f"{spec.names.embedding}.weight", matrix)
    if embedding_digest(embedding) != draft.target["embedding_sha256"]:
        raise UnsupportedModel(
            f"{draft.folder} is a draft for another target: target.embedding_sha256 differs; "
            f"make one with `tandem distill`"
        )
    # Mapped where its dtype is the engine's: only the rows that are used take memory.
    yield "embedding", embedding.to(device=device, dtype=dtype)
    head = embedding if spec.tied_head else target.tensor(f"{spec.names.head}.weight", matrix)
    source = _Source(draft, f"{spec.names.embedding}.weight", head)
    # What becomes int8 again isn't rounded on the way.
    read_as = torch.float32 if isinstance(ops, DraftOps) else dtype
    # Told that the head is tied, the reader asks for it under the embedding's name, in the size of the spec.
    yield from WeightReader(replace(spec, tied_head=True), source, ops, read_as, device).items()


class _Source(Checkpoint):
    """A draft's tensors for the reader; its head are rows of the target's, the lens multiplied in."""

    def __init__(self, draft: DraftFolder, head_name: str, head: torch.Tensor) -> None:
        """`head` [the target's vocabulary, hidden], which is asked for as `head_name`."""
        self._draft = draft
        self._head_name = head_name
        self._head = head

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See Checkpoint."""
        if name != self._head_name:
            return self._draft.tensor(name, shape)
        return self._head[self._draft.tensors[HEAD_TOKEN_IDS]].float() @ self._draft.tensor(LENS, (shape[1], shape[1]))
