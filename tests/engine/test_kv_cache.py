"""Places in the pool, and its size from what is free."""

from __future__ import annotations

import pytest
import torch

from engine.errors import OutOfMemory
from engine.kernels import build
from engine.kv_cache import (
    GIB,
    KvCache,
    LayerShape,
    MemoryFacts,
    MemoryRequest,
    _control_group_free,
    _meminfo_available,
    bytes_per_block,
    places,
    plan_num_blocks,
    require_weights_fit,
)

CPU = torch.device("cpu")
LAYERS = {0: LayerShape(2, 4, 4), 1: LayerShape(1, 8, 6)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_then_read(dtype):
    cache = KvCache(LAYERS, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    slots = torch.tensor([9, 2, 17])
    keys, values = torch.randn(3, 2, 4).to(dtype), torch.randn(3, 2, 4).to(dtype)
    cache.write(0, places(slots, 2, 4), keys, values)
    expected_keys, expected_values = torch.zeros(5, 4, 2, 4, dtype=dtype), torch.zeros(5, 4, 2, 4, dtype=dtype)
    for token, slot in enumerate(slots.tolist()):
        expected_keys[slot // 4, slot % 4] = keys[token]
        expected_values[slot // 4, slot % 4] = values[token]
    for block in range(5):
        for head in range(2):
            read_keys, read_values = cache.read(0, torch.tensor([block * 2 + head]))
            assert torch.equal(read_keys.view(4, 4), expected_keys[block, :, head])
            assert torch.equal(read_values.view(4, 4), expected_values[block, :, head])
    assert not cache.read(1, torch.arange(5))[0].any()


def test_values_are_kept_finite():
    cache = KvCache(LAYERS, 2, 4, torch.float32, CPU)
    faults = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).expand(1, 2, 4)
    cache.write(0, places(torch.tensor([0]), 2, 4), faults, faults)
    assert cache.read(0, torch.arange(4))[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_the_kernels_serve(dtype):
    try:
        level = build.library()
    except build.NoKernels as error:
        pytest.skip(str(error))
    layers = {0: LayerShape(2, 4, 4), 1: LayerShape(1, 8, 6), 2: LayerShape(3, 80, 80), 3: LayerShape(1, 7, 7)}
    cache = KvCache(layers, 5, 16, dtype, CPU, level)
    assert (set(cache.cpp), cache.torch_layers) == ({0, 2}, {1, 3})
    in_kernels = sum(memory.keys.nbytes + memory.values.nbytes for memory in cache.cpp.values())
    assert in_kernels == 5 * bytes_per_block({index: layers[index] for index in cache.cpp}, 16, dtype)
    assert KvCache(layers, 5, 1, dtype, CPU, level).torch_layers == {0, 1, 2, 3}


def test_bytes_per_block():
    assert bytes_per_block(LAYERS, 16, torch.bfloat16) == (2 * 8 + 14) * 16 * 2
    layers = {layer: LayerShape(3, 64, 64) for layer in range(30)}
    cache_bytes = sum(t.nbytes for t in KvCache(layers, 2, 16, torch.bfloat16, CPU)._keys.values()) * 2
    assert cache_bytes == 2 * bytes_per_block(layers, 16, torch.bfloat16)


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
