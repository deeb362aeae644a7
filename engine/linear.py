"""Layers whose result for a row doesn't depend on the other rows of the batch.

A matrix product picks its kernel, and with it the order of its sums, by its shape. So the same token gets other bits
in a batch of thirteen than alone, and a near-tie tips over. Here every product therefore has one fixed shape:

    rows x [T, K]  ──split──▶  [16, K] [16, K] [10 + 6 zeros, K]  ──each × W──▶  y [T, N]

Within one shape a row's bits depend neither on its place in the tile nor on its neighbours (tested, in float32 and
bfloat16). The same holds for what else could look at the shape:

* **activation functions** run over flat pieces of whole vectors on one thread, because torch's vector and scalar paths
  round differently and the scalar one serves the tail of whatever range a thread got;
* **norms** reduce each row alone on a CPU; elsewhere the shape picks the reduction, so they run in the same row tiles;
* **rotary tables** are in `rotary.py`, attention in `attention.py`.

What is left in a model's own code are single, correctly rounded operations (add, multiply, negate, copy), whose
result is the same in every arrangement.

Where the C++ kernels run, their packed products take the place of the tiled ones (`packed_linear`), and rows need no
padding unless the model's own code multiplies as well, as that of mixtures of experts does.

Cost, SmolLM2-135M on two Zen 4 cores, all linears and the head, bfloat16 (float32): one row untiled 19 ms (40), a tile
of 8 rows 22 (50), of 16 rows 26 (60), of 32 rows 36 (84); 128 rows in tiles of 8 take 228 ms (506), of 16 171 (409),
of 32 128 (301), untiled 97 (220). Sixteen keep a single stream close to the best and prefill within a factor of two.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels.torch_tiles import apply
from engine.packed_linear import PackedEmbedding, PackedHead, PackedLayer

TILE_ROWS = 16
"""Rows of every matrix product, and the multiple every batch is padded to."""

HEAD_SLICE = 2048
"""Rows of the output embedding turned into float32 at a time: 4.5 MiB at width 576, which stays in cache."""

_ACTIVATIONS = (nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.LeakyReLU, nn.Softplus)


def padded_rows(num_rows: int) -> int:
    """The next multiple of TILE_ROWS, at least one tile."""
    return max(1, -(-num_rows // TILE_ROWS)) * TILE_ROWS


class _Tiled(nn.Module):
    """What tiled layers share: the parameters of the layer that they replace, and how rows become tiles."""

    def __init__(self, layer: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
        self.in_features = in_features
        self.out_features = out_features

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → its rows [multiple of TILE_ROWS, in_features], zero rows behind them."""
        rows = x.reshape(x.shape[:-1].numel(), self.in_features)
        num_padded = padded_rows(len(rows))
        if num_padded == len(rows):
            return rows.contiguous()
        padded = rows.new_zeros((num_padded, self.in_features))
        padded[: len(rows)] = rows
        return padded


class TiledLinear(_Tiled):
    """`nn.Linear` over row tiles, or GPT-2's `Conv1D`, which stores its weight [in, out]."""

    stored_in_out = False

    @classmethod
    def of_linear(cls, linear: nn.Linear) -> TiledLinear:
        return cls(linear, linear.in_features, linear.out_features)

    @classmethod
    def of_conv1d(cls, layer: nn.Module) -> TiledLinear:
        in_features, out_features = layer.weight.shape  # type: ignore[misc]
        tiled = cls(layer, in_features, out_features)
        tiled.stored_in_out = True
        return tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        rows = self._padded(x)
        out = rows.new_empty((len(rows), self.out_features))
        weight = self.weight if self.stored_in_out else self.weight.t()
        for start in range(0, len(rows), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            if self.bias is None:
                torch.mm(rows[tile], weight, out=out[tile])
            else:
                torch.addmm(self.bias, rows[tile], weight, out=out[tile])
        return out[: x.shape[:-1].numel()].view(*x.shape[:-1], self.out_features)


class TiledHead(_Tiled):
    """The output embedding: row tiles in, float32 logits out.

    The weights stay in the model's dtype. A slice of them at a time is widened, which is exact, so that the products
    are summed in float32 and never rounded to bfloat16, whose spacing of 1/8 at 16 would make ties of near-ties.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, linear.in_features, linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → float32 [..., out_features]."""
        out = torch.empty((x.shape[:-1].numel(), self.out_features), dtype=torch.float32, device=x.device)
        if len(out):
            self._project(self._padded(x.float()), out)
            if self.bias is not None:
                out += self.bias.float()
        return out.view(*x.shape[:-1], self.out_features)

    def _project(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """rows float32 [multiple of TILE_ROWS, K] → out [num_rows, N]; weight on the left: faster for few rows."""
        num_rows = out.shape[0]
        for start in range(0, self.out_features, HEAD_SLICE):
            weight = self.weight[start : start + HEAD_SLICE].float()
            for row in range(0, num_rows, TILE_ROWS):
                product = torch.mm(weight, rows[row : row + TILE_ROWS].t())
                num_real = min(TILE_ROWS, num_rows - row)
                out[row : row + num_real, start : start + HEAD_SLICE] = product.t()[:num_real]


class TiledActivation(nn.Module):
    """An elementwise function over flat pieces that one thread computes in whole vectors."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply(self.activation, x)


class TiledNorm(nn.Module):
    """A normalisation over row tiles, for devices on which the shape picks the reduction."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, ...], T a multiple of TILE_ROWS."""
        return torch.cat([self.norm(tile) for tile in x.split(TILE_ROWS, dim=1)], dim=1)


def _replacement(module: nn.Module, head: nn.Module, on_cpu: bool, level: str | None) -> nn.Module | None:
    """What stands for `module`; products are packed for that level, or tiled where there is none."""
    if module is head:
        return TiledHead(module) if level is None else PackedHead(module, level)  # type: ignore[arg-type]
    if isinstance(module, nn.Linear):
        return TiledLinear.of_linear(module) if level is None else PackedLayer.of_linear(module, level)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return TiledLinear.of_conv1d(module) if level is None else PackedLayer.of_conv1d(module, level)
    if isinstance(module, _ACTIVATIONS) or type(module).__module__ == "transformers.activations":
        return TiledActivation(module)
    if not on_cpu and "norm" in type(module).__name__.lower():
        return TiledNorm(module)
    return None


def tile_layers(model: nn.Module, head: nn.Module, on_cpu: bool, level: str | None = None) -> None:
    """Replace, in place, every layer of `model` whose bits could depend on the batch; `head` is its output embedding.

    With a `level` of the C++ kernels (packed_linear.packed_level) products are packed for it, and each weight freed as
    soon as it is. A module that occurs in several places gets one replacement, so sharing survives.
    """
    replacements = {} if level is None else _tied_replacements(model, head, level)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in replacements:
                replacement = _replacement(child, head, on_cpu, level)
                if replacement is None:
                    continue
                replacements[id(child)] = replacement
            setattr(parent, name, replacements[id(child)])
            if isinstance(replacements[id(child)], PackedLayer | PackedHead | PackedEmbedding):
                child.weight = None  # type: ignore[assignment]
    if level is not None:
        # What is left is small, or looked up; as views of the weight file each would keep all of it in memory.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def _tied_replacements(model: nn.Module, head: nn.Module, level: str) -> dict[int, nn.Module]:
    """By id, what stands for the head and the embeddings that share its weight; nothing if none does.

    An embedding that does more than look up keeps its weight, and the head goes on sharing that.
    """
    tied = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is head.weight]
    if not tied:
        return {}
    if any(type(embedding) is not nn.Embedding or embedding.max_norm is not None for embedding in tied):
        return {id(head): TiledHead(head)}  # type: ignore[arg-type]
    packed = PackedHead(head, level)  # type: ignore[arg-type]
    return {id(head): packed, **{id(module): PackedEmbedding(packed, module.padding_idx) for module in tied}}


def multiplies_elsewhere(model: nn.Module) -> bool:
    """Whether a layered model (after `tile_layers`) holds weights that something else than its products uses."""
    own = (TiledLinear, TiledHead, nn.Embedding)
    return any(
        parameter.dim() > 1
        for module in model.modules()
        if not isinstance(module, own)
        for parameter in module.parameters(recurse=False)
    )
