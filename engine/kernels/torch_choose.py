"""The choice of tokens in plain torch: argmax of (l − max l) / T + g, see `engine.noise` for g.

Noise is computed only where it can matter. With s = (l − max l) / T and b just below the g of the likeliest token,
whose s is 0:

    v can win only if  s_v + g_v ≥ b;  g_v = −log E_v and u_v ≤ E_v,  so only if  u_v ≤ exp(s_v − b)

That test, with room for rounding, leaves out only losers: the winner is the one that noise on every id would give.
"""

from __future__ import annotations

import math

import torch

from engine import noise

NO_TOKEN = -1

_MARGIN = 1.001  # far above what rounding of scores and noise amounts to: 1e-5
_SLACK = 0.05  # what rounding u near 1 may take from E is 0.03 of it
_EXP_SCALE = 2.0**23 / math.log(2.0)
_EXP_BIAS = 127 * 2.0**23
_CHUNK_ELEMENTS = {"cpu": 1 << 17}  # what stays in a core's cache
_DEVICE_CHUNK_ELEMENTS = 1 << 24


def choose(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See `Ops.choose`."""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(logits):
        return chosen.cpu()
    noisy = torch.nonzero(temperatures.cpu() > 0).flatten().to(logits.device)
    temperatures, keys = temperatures.to(logits.device, torch.float32), keys.to(logits.device, torch.int64)
    step = max(1, _CHUNK_ELEMENTS.get(logits.device.type, _DEVICE_CHUNK_ELEMENTS) // logits.shape[1])
    peaks, best = logits.amax(-1), logits.argmax(-1)
    chosen.copy_(best)
    for rows in noisy.split(step):
        scores = logits[rows].sub_(peaks[rows, None]).div_(temperatures[rows, None])
        chosen[rows] = _winners(scores, best[rows], keys[rows])
    return chosen.masked_fill_(~torch.isfinite(peaks), NO_TOKEN).cpu()


def _winners(scores: torch.Tensor, best: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of scores float32 [N, V], keys [N, 2], the ids with the highest score plus noise, int64 [N]; of several the
    lowest.
    """
    k0, k1 = keys[:, :1], keys[:, 1:]
    bound = noise.gumbel_from_bits(noise.uniform_bits(k0, k1, best[:, None])) - _SLACK
    # 2^y ≤ 2^⌊y⌋ · (1 + frac y), and the right side is what y · 2^23 reads as, once the exponent's bias is added.
    reach = (scores - bound).mul_(_EXP_SCALE).add_(_EXP_BIAS).nan_to_num_(0.0).clamp_(min=0.0)
    reach = reach.to(torch.int32).view(torch.float32).mul_(_MARGIN * 2.0**32).add_(1.0)
    bits = noise.uniform_bits(k0, k1, torch.arange(scores.shape[1], device=scores.device)[None])
    row, ids = torch.nonzero(bits.to(torch.float32) <= reach, as_tuple=True)
    totals = scores[row, ids] + noise.gumbel_from_bits(noise.uniform_bits(k0[row, 0], k1[row, 0], ids))
    highest = torch.full((len(scores),), -torch.inf, device=scores.device).scatter_reduce_(0, row, totals, "amax")
    wins = torch.nonzero(totals == highest[row]).flatten()
    lowest = torch.full((len(scores),), scores.shape[1], dtype=torch.int64, device=scores.device)
    return lowest.scatter_reduce_(0, row[wins], ids[wins], "amin")
