"""Places in the pool, and its size from what is free."""

from __future__ import annotations

import pytest
import torch

from engine.errors import OutOfMemory
from engine.kernels import build
from engine.kernels.cpp_attention import CppCache
from engine.kernels.torch_attention import KEY_TILE, TorchCache
from engine.kv_cache import (
    GIB,
    LayerShape,
    MemoryFacts,
    MemoryRequest,
    _control_group_free,
    _meminfo_available,
    bytes_per_block,
    make_caches,
    plan_num_blocks,
    require_weights_fit,
)

CPU = torch.device("cpu")
LAYERS = {0: LayerShape(2, 4, 4), 1: LayerShape(1, 8, 6)}


def torch_caches(*arguments):
    caches = make_caches(LAYERS, *arguments).values()
    assert all(isinstance(cache, TorchCache) for cache in caches)
    return [cache for cache in caches if isinstance(cache, TorchCache)]


def runs(block_size, count):
    """For TorchCache.read: the first `count` runs of a head in a block, each as often as it takes to fill a tile."""
    return torch.arange(count)[:, None].repeat(1, KEY_TILE // block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_then_read(dtype):
    """A block's part of a head is read whole; KEY_TILE positions at a time."""
    caches = torch_caches(5, 4, dtype, CPU)
    slots = torch.tensor([9, 2, 17])
    keys, values = torch.randn(3, 2, 4).to(dtype), torch.randn(3, 2, 4).to(dtype)
    caches[0].write(slots, keys, values)
    expected_keys, expected_values = torch.zeros(5, 4, 2, 4), torch.zeros(5, 4, 2, 4)
    for token, slot in enumerate(slots.tolist()):
        expected_keys[slot // 4, slot % 4] = keys[token].float()
        expected_values[slot // 4, slot % 4] = values[token].float()
    read_keys, read_values = caches[0].read(runs(4, 10))
    for block in range(5):
        for head in range(2):
            assert torch.equal(read_keys[block * 2 + head, :4], expected_keys[block, :, head])
            assert torch.equal(read_values[block * 2 + head, :4], expected_values[block, :, head])
    narrow_keys, narrow_values = caches[1].read(runs(4, 5))
    assert (narrow_keys.shape[-1], narrow_values.shape[-1]) == (8, 6)
    assert not narrow_keys.any()


def test_what_is_kept_is_finite():
    cache = torch_caches(2, 4, torch.float32, CPU)[0]
    faults = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).expand(1, 2, 4)
    cache.write(torch.tensor([0]), faults, faults)
    assert all(kept.isfinite().all() for kept in cache.read(runs(4, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_the_kernels_serve(dtype):
    try:
        level = build.library()
    except build.NoKernels as error:
        pytest.skip(str(error))
    layers = {0: LayerShape(2, 4, 4), 1: LayerShape(1, 8, 6), 2: LayerShape(3, 80, 80), 3: LayerShape(1, 7, 7)}
    caches = make_caches(layers, 5, 16, dtype, CPU, level)
    kinds = [CppCache, TorchCache, CppCache, TorchCache]
    assert [type(cache) for cache in caches.values()] == kinds
    assert sum(num_bytes(cache) for cache in caches.values()) == 5 * bytes_per_block(layers, 16, dtype)
    assert {type(cache) for cache in make_caches(layers, 5, 1, dtype, CPU, level).values()} == {TorchCache}


def num_bytes(cache):
    return cache.keys.nbytes + cache.values.nbytes


def test_bytes_per_block():
    assert bytes_per_block(LAYERS, 16, torch.bfloat16) == (2 * 8 + 14) * 16 * 2
    layers = {layer: LayerShape(3, 64, 64) for layer in range(30)}
    caches = make_caches(layers, 2, 16, torch.bfloat16, CPU)
    assert sum(map(num_bytes, caches.values())) == 2 * bytes_per_block(layers, 16, torch.bfloat16)


def facts(**changes):
    values = {
        "free": 8 * GIB,
        "free_share": 2 * GIB,
        "block_bytes": GIB // 16,
        "block_size": 16,
        "max_model_len": 160,
        "max_sequences": 100,
    }
    return MemoryFacts(**{**values, **changes})


@pytest.mark.parametrize(
    ("request_", "changes", "blocks"),
    [
        (MemoryRequest(), {}, 32),  # the share
        (MemoryRequest(), {"max_sequences": 2}, 20),  # no more than can be used
        (MemoryRequest(), {"free_share": GIB // 4}, 10),  # one full sequence, if that is free
        (MemoryRequest(kv_cache_gib=1.0), {}, 16),
        (MemoryRequest(kv_cache_gib=4.0), {}, 64),  # beyond the share, when asked
        (MemoryRequest(num_blocks=3, kv_cache_gib=1.0), {}, 3),
    ],
)
def test_plan(request_, changes, blocks):
    assert plan_num_blocks(request_, facts(**changes)) == blocks


@pytest.mark.parametrize(
    ("request_", "changes", "numbers"),
    [
        (MemoryRequest(kv_cache_gib=9.0), {}, ["9.000 GiB", "8.000 GiB are free"]),
        (MemoryRequest(num_blocks=200), {}, ["200 blocks", "12.500 GiB", "8.000 GiB are free"]),
        (
            MemoryRequest(),
            {"free": GIB // 2, "free_share": GIB // 8},
            ["0.625 GiB", "0.500 GiB are free", "to 32 fits"],
        ),
        (MemoryRequest(kv_cache_gib=0.01), {}, ["0.010 GiB"]),
    ],
)
def test_plan_refuses_with_the_numbers(request_, changes, numbers):
    with pytest.raises(OutOfMemory) as caught:
        plan_num_blocks(request_, facts(**changes))
    for number in numbers:
        assert number in str(caught.value)


def test_weights_that_do_not_fit():
    with pytest.raises(OutOfMemory, match=r"are available, the weights need 1000000\.000 GiB and .* at least 2\.000"):
        require_weights_fit(10**6 * GIB, 2 * GIB, CPU)


def test_a_model_too_big_is_refused_before_its_weights_are_read(tiny_model, load_runner, monkeypatch):
    monkeypatch.setattr("engine.kv_cache.free_bytes", lambda device: 100_000)
    monkeypatch.setattr("engine.runner._load_model", lambda *args: pytest.fail("read"))
    with pytest.raises(OutOfMemory, match="the weights need"):
        load_runner(tiny_model("llama-grouped-biases"))


def test_what_the_host_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:    2048 kB\n")
    assert _meminfo_available(tmp_path / "meminfo") == 2 << 20
    assert _control_group_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert _control_group_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert _control_group_free(tmp_path) == 4000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 600\n")
    assert _control_group_free(tmp_path) == 4600
