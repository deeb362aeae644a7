"""The decoder route: a folder that `engine.families` knows, run by `engine.decoder`.

On a GPU, decode steps are replayed as CUDA graphs (`engine.cuda_graphs`) and launched ahead (`engine.run_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine import noise
from engine.batch import Batch, Choices, DecodeRows, LaunchedRows
from engine.cuda_graphs import CudaRecorder, GraphedSteps, GraphLimits, Recorder, in_own_workspace
from engine.decode_steps import DecodeSteps
from engine.decoder import Decoder
from engine.decoder_spec import DecoderSpec
from engine.decoder_weights import Checkpoint, Weight, WeightReader
from engine.description import Undescribed, describe
from engine.errors import IncompleteModel, UnsupportedModel
from engine.kernels.cpp_linear import coded, packed_layout
from engine.kernels.cpp_ops import CppOps
from engine.kernels.cpp_screen import pack_screen, screen_layout
from engine.kernels.ops import DeviceChooser, Ops, PackedLinear
from engine.kernels.torch_ops import TorchOps
from engine.kv_cache import LayerShape
from engine.loading import ModelFacts
from engine.packed_weights import WORTH_MAPPING, entry_name, mapped_weights
from engine.progress import Progress
from engine.run_ahead import AheadSteps, Choose, Fed, Forward, PendingTokens, TokenFeed
from engine.step_plan import StepPlanBuilder
from engine.stream import Stream, stream_of
from engine.workspace import ChoiceTensors


def decoder_spec(facts: ModelFacts, max_model_len: int) -> DecoderSpec | Undescribed:
    """What the decoder would run a checked folder by."""
    config: Any = AutoConfig.from_pretrained(facts.folder, local_files_only=True)
    return describe(config, max_model_len)


class DecoderModel:
    """Implements `engine.runner.Model`. Not thread-safe."""

    def __init__(
        self,
        facts: ModelFacts,
        spec: DecoderSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        *,
        max_sequences: int = 256,
        recorder: Recorder | None = None,
        cache: Path | None = None,
        progress: Progress | None = None,
        recorded: bool = True,
        weights: Mapping[str, Weight] | None = None,
        run_ahead: bool | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`recorder` makes graphs of decode steps of up to `max_sequences` rows; None: CUDA's on a GPU, else none.
        `recorded`: on a CPU a step's calls are made from a recording, which wrapped operations never see.
        `weights`: all of them, as `WeightReader` names them, where they don't come from the folder.
        `run_ahead`: steps can be launched, on `stream` or the device's own; None: on a GPU only.

        Raises IncompleteModel for a checkpoint that lacks something.
        """
        self.device = device
        self.dtype = dtype
        self.vocab_size = spec.vocab_size
        self.layers = {
            index: LayerShape(spec.heads.kv_heads, spec.heads.head_dim, spec.heads.head_dim)
            for index in range(len(spec.layers))
        }
        self.ops = ops
        self.fingerprint = f"route=decoder kernels={ops.fingerprint}"
        self._spec = spec
        self._max_model_len = max_model_len
        self._max_sequences = max_sequences
        self._recorded = recorded
        # Plain torch works on the host between its calls, which no graph can hold.
        graphs = device.type == "cuda" and not isinstance(ops, TorchOps)
        self._recorder = CudaRecorder() if recorder is None and graphs else recorder
        self._plans = StepPlanBuilder(device)
        self._feed = TokenFeed(max_sequences, device)
        self._stream = self._launches_on(stream, device.type == "cuda" if run_ahead is None else run_ahead)
        self._progress = progress
        if weights is None:
            weights = self._read(facts, progress, cache)
        self._decoder = Decoder(spec, weights, ops, dtype, device, max_model_len)
        self._forward: Callable[[Batch], torch.Tensor] = self._as_it_is
        self._decode_steps: DecodeSteps | None = None
        self._ahead: AheadSteps | None = None

    def _read(self, facts: ModelFacts, progress: Progress | None, cache: Path | None) -> Mapping[str, Weight]:
        spec, ops, dtype, device = self._spec, self.ops, self.dtype, self.device
        if progress:
            progress("loading weights", None)
        on_cpp = isinstance(ops, CppOps)
        pack = pack_screen if on_cpp and spec.logit_softcap <= 0 else None
        reader = WeightReader(spec, Checkpoint(facts.folder), ops, dtype, device, pack)
        num_bytes = facts.num_parameters * dtype.itemsize
        if on_cpp and num_bytes >= WORTH_MAPPING:
            name = entry_name(facts.content_id, dtype, f"{packed_layout()} {screen_layout()}")
            return mapped_weights(name, num_bytes, lambda: _coded(reader.items()), cache)
        return dict(_coded(reader.items()) if on_cpp else reader.items())

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError for a block size that the operations don't take."""
        recorder = self._recorder
        # Graphs pad a step with rows that live in a block of their own.
        num_held = num_blocks if recorder is None else num_blocks + 1
        self._decoder.bind_caches(
            [self.ops.make_cache(num_held, block_size, self._spec.heads, self.dtype) for _ in self.layers]
        )
        if isinstance(self.ops, CppOps) and self._recorded:
            self._decoder.record()
            program = self._decoder.whole_step
            self._decode_steps = None if program is None else DecodeSteps(self._decoder, program, block_size)
        prepare: Callable[[Batch, Fed], Forward] = self._prepare
        if recorder is not None:
            limits = GraphLimits(self._max_sequences, self._max_model_len, block_size, scratch_block=num_blocks)
            own = in_own_workspace(self._decoder, self._max_sequences, self.dtype, self.device)
            steps = GraphedSteps(self._decoder.forward, own, recorder, self._plans, self.device, limits, self._feed)
            if isinstance(recorder, CudaRecorder):
                if self._progress:
                    self._progress("recording decode steps", None)
                steps.record()
            self._forward, prepare = steps.forward, steps.prepare
        if self._stream is not None:
            self._ahead = AheadSteps(prepare, self._chooser(), self._feed, self.device, self._stream)

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [L, vocab_size], valid until the next call."""
        return self._forward(batch)

    @property
    def chooses(self) -> bool:
        """Whether `choose` and `decode` can be called."""
        return self._decode_steps is not None

    def choose(self, batch: Batch, choices: Choices) -> list[int]:
        """See `engine.batch.ChoosingEngine`."""
        keys = noise.row_keys(choices.seeds, choices.output_indices)
        tensors = ChoiceTensors(
            torch.tensor(choices.temperatures, dtype=torch.float32),
            torch.from_numpy(keys),
            self._decoder.new_choices(len(keys)),
        )
        self._decoder.choose(self._plans.build(batch), tensors)
        token_ids: list[int] = tensors.token_ids.flatten().tolist()
        return token_ids

    def decode(self, rows: DecodeRows) -> list[int]:
        """See `engine.batch.ChoosingEngine`."""
        assert self._decode_steps is not None
        return self._decode_steps.run(rows)

    @property
    def runs_ahead(self) -> bool:
        """Whether steps can be launched."""
        return self._ahead is not None

    def launch(self, rows: LaunchedRows) -> PendingTokens:
        """See `engine.batch.AheadEngine`."""
        assert self._ahead is not None
        return self._ahead.launch(rows)

    def forward_with_features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, and what the head made them of: [L, hidden] of the model's dtype, valid as long."""
        logits = self._as_it_is(batch)
        return logits, self._decoder.workspace.views(len(batch.token_ids), len(batch.logit_indices)).ending.normed

    def _as_it_is(self, batch: Batch) -> torch.Tensor:
        return self._decoder.forward(self._plans.build(batch))

    def _prepare(self, batch: Batch, fed: Fed) -> Forward:
        """The part of a launched step that runs on the device, where there are no graphs."""
        plan = self._plans.build(batch)

        def run() -> torch.Tensor:
            self._feed.fill(plan.token_ids, fed)
            return self._decoder.forward(plan)

        return run

    def _launches_on(self, stream: Stream | None, wanted: bool) -> Stream | None:
        """The stream, if steps are wanted to be launched and their choices can stay on the device."""
        can = self.device.type == "cpu" or isinstance(self.ops, DeviceChooser)
        return (stream or stream_of(self.device)) if wanted and can else None

    def _chooser(self) -> Choose:
        return self.ops.choose_on_device if isinstance(self.ops, DeviceChooser) else self.ops.choose


def _coded(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """With less to read in a step. The head stays as it is: its screen and the embedding look at parts of it."""
    for name, weight in weights:
        yield name, coded(weight) if isinstance(weight, PackedLinear) and name != "head" else weight


def refusal(facts: ModelFacts, spec: DecoderSpec, ops: Ops, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the decoder can't run a described model; None if it can. Reads no weights."""
    try:
        Checkpoint(facts.folder)
        ops.make_cache(1, block_size, spec.heads, dtype)
    except (IncompleteModel, UnsupportedModel, ValueError) as error:
        return str(error)
    return None
