"""From a checkpoint's tensors to what the decoder multiplies by, one linear at a time.

Names of what comes out:

    embedding                     [vocab, hidden] of the model's dtype; absent if the head is tied to it
    head                          packed
    head_screen                   uint8, an int8 copy of the head, where one was asked for and can be made
    final_norm                    float32; `.bias` with it if norms have one
    layers.N.qkv, .out, .gate_up, .down                  packed, biases inside
    layers.N.attention_norm, .attention_post_norm, .mlp_norm, .mlp_post_norm, .query_norm, .key_norm     float32

A source tensor is mapped while it is packed and let go of before the next one, so a model is never held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.decoder_spec import DecoderSpec
from engine.errors import IncompleteModel
from engine.kernels.ops import Ops, PackedLinear
from engine.weight_files import find_weight_files

Weight = torch.Tensor | PackedLinear


class Checkpoint:
    """A folder's safetensors."""

    def __init__(self, folder: Path) -> None:
        """Raises IncompleteModel if files are missing, cut short or of another format."""
        self._files: dict[str, Path] = {}
        self._folder = folder
        for path in find_weight_files(folder).paths:
            if path.suffix != ".safetensors":
                raise IncompleteModel(f"{path} isn't a safetensors file")
            with _opened(path) as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Mapped, not copied. Raises IncompleteModel if it isn't there or has another shape."""
        found = name if name in self._files else name.removeprefix("model.")  # saved without its head
        if found not in self._files:
            raise IncompleteModel(f"{self._folder}: the weight files lack {name}")
        with _opened(self._files[found]) as file:
            tensor: torch.Tensor = file.get_tensor(found)
        if tensor.shape != shape:
            raise IncompleteModel(f"{self._folder}: {found} is {list(tensor.shape)} instead of {list(shape)}")
        return tensor


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise IncompleteModel(f"{path} can't be read: {error}") from error


class WeightReader:
    """Reads and packs everything that a spec names."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        pack_screen: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        """`pack_screen` makes the screen of a head without bias."""
        self._spec = spec
        self._pack_screen = pack_screen
        self._checkpoint = checkpoint
        self._ops = ops
        self._dtype = dtype
        self._device = device

    def items(self) -> Iterator[tuple[str, Weight]]:
        """Every weight once, in the order in which a step needs them. Raises IncompleteModel naming what is wrong."""
        spec, names = self._spec, self._spec.names
        matrix = (spec.vocab_size, spec.hidden_size)
        if not spec.tied_head:
            yield "embedding", self._matrix(names.embedding, matrix)
        for index in range(len(spec.layers)):
            prefix = names.layer.format(index)
            for name, weight in self._layer(prefix):
                yield f"layers.{index}.{name}", weight
        yield from self._norm("final_norm", names.final_norm, spec.hidden_size)
        head = names.embedding if spec.tied_head else names.head
        bias = self._vector(f"{names.head}.bias", spec.vocab_size) if spec.head_bias else None
        weight = self._matrix(head, matrix)
        yield "head", self._ops.pack(weight, bias)
        screen = self._pack_screen(weight) if self._pack_screen and bias is None else None
        if screen is not None:
            yield "head_screen", screen

    def _layer(self, prefix: str) -> Iterator[tuple[str, Weight]]:
        spec, names = self._spec, self._spec.names
        hidden, heads = spec.hidden_size, spec.heads
        queries, keys = heads.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        norms = (
            ("attention_norm", names.attention_norm),
            ("attention_post_norm", names.attention_post_norm),
            ("mlp_norm", names.mlp_norm),
            ("mlp_post_norm", names.mlp_post_norm),
        )
        for own_name, name in norms:
            if name is not None:
                yield from self._norm(own_name, f"{prefix}.{name}", hidden)
        if spec.head_norms != "none":
            per_head = spec.head_norms == "head"
            for own_name, name, width in (
                ("query_norm", names.query_norm, heads.head_dim if per_head else queries),
                ("key_norm", names.key_norm, heads.head_dim if per_head else keys),
            ):
                yield own_name, self._norm_weight(f"{prefix}.{name}", width)
        yield "qkv", self._joined(prefix, names.qkv, (queries, keys, keys), hidden, spec.qkv_bias)
        yield "out", self._joined(prefix, (names.out,), (hidden,), queries, spec.out_bias)
        if spec.gated:
            yield "gate_up", self._gated(prefix)
        else:
            yield "gate_up", self._joined(prefix, names.gate_up, (spec.mlp_size,), hidden, spec.mlp_bias)
        yield "down", self._joined(prefix, (names.down,), (hidden,), spec.mlp_size, spec.mlp_bias)

    def _joined(
        self, prefix: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int, has_bias: bool
    ) -> PackedLinear:
        """Linears over the same input as one, each of its number of rows; one name stands for all of them fused."""
        if len(names) < len(rows):
            rows = (sum(rows),)
        parts = [self._matrix(f"{prefix}.{name}", (n, columns)) for name, n in zip(names, rows, strict=True)]
        bias = None
        if has_bias:
            biases = [self._vector(f"{prefix}.{name}.bias", n) for name, n in zip(names, rows, strict=True)]
            bias = torch.cat(biases)
        return self._ops.pack(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def _gated(self, prefix: str) -> PackedLinear:
        spec, names = self._spec, self._spec.names.gate_up
        rows = (spec.mlp_size, spec.mlp_size) if len(names) == 2 else (2 * spec.mlp_size,)
        matrices = [
            self._matrix(f"{prefix}.{name}", (n, spec.hidden_size)) for name, n in zip(names, rows, strict=True)
        ]
        gate, up = matrices if len(matrices) == 2 else matrices[0].chunk(2)
        if not spec.mlp_bias:
            return self._ops.pack_gated(gate, up)
        biases = [self._vector(f"{prefix}.{name}.bias", n) for name, n in zip(names, rows, strict=True)]
        gate_bias, up_bias = biases if len(biases) == 2 else biases[0].chunk(2)
        return self._ops.pack_gated(gate, up, gate_bias, up_bias)

    def _norm(self, own_name: str, name: str, width: int) -> Iterator[tuple[str, Weight]]:
        yield own_name, self._norm_weight(name, width)
        if self._spec.norm_bias:
            yield f"{own_name}.bias", self._vector(f"{name}.bias", width)

    def _norm_weight(self, name: str, width: int) -> torch.Tensor:
        return self._vector(f"{name}.weight", width) + self._spec.norm_offset

    def _matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._checkpoint.tensor(f"{name}.weight", shape)
        return tensor.to(device=self._device, dtype=self._dtype)

    def _vector(self, name: str, length: int) -> torch.Tensor:
        return self._checkpoint.tensor(name, (length,)).to(device=self._device, dtype=torch.float32)
