"""Packed weights in a file: the same bits, one copy for all processes, and what happens when there is no place."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import packed_weights
from engine.decoder_weights import Weight
from engine.kernels.ops import PackedLinear
from engine.packed_weights import entry_name, mapped_weights

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def weights(seed: int = 1, rows: int = 40) -> dict[str, Weight]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embedding": draw(rows, 6).to(torch.bfloat16),
        "layers.0.qkv": PackedLinear(draw(2, 3, 32, 2).to(torch.bfloat16), draw(64), 6, 40),
        "layers.0.gate_up": PackedLinear(draw(5, 7), None, 7, 5, gated=True),
        "final_norm": draw(6),
    }


def parts(weight: Weight) -> list[object]:
    if isinstance(weight, torch.Tensor):
        return [weight.tolist(), weight.dtype]
    bias = None if weight.bias is None else weight.bias.tolist()
    data = weight.data
    return [data.tolist(), data.dtype, data.shape, bias, weight.in_features, weight.out_features, weight.gated]


def assert_same(found: dict[str, Weight], expected: dict[str, Weight]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert parts(found[name]) == parts(weight), name


class Packing:
    """Counts how often it was packed."""

    def __init__(self, seed: int = 1, rows: int = 40) -> None:
        self.times = 0
        self._weights = weights(seed, rows)

    def __call__(self) -> Iterator[tuple[str, Weight]]:
        self.times += 1
        return iter(self._weights.items())


def test_packed_once_and_mapped_ever_after(tmp_path):
    packing = Packing()
    for _ in range(2):
        assert_same(dict(mapped_weights("one", 1000, packing, tmp_path)), weights())
    assert packing.times == 1
    for entry in json.loads((tmp_path / "packed/one/index.json").read_text())["weights"].values():
        assert entry["data"]["offset"] % 64 == 0


def test_names_follow_what_decides_the_bytes():
    names = {
        entry_name("0123", torch.float32, "cpp1"),
        entry_name("0123", torch.bfloat16, "cpp1"),
        entry_name("0123", torch.float32, "cpp2"),
        entry_name("4567", torch.float32, "cpp1"),
    }
    assert len(names) == 4


def kib_of(mapped: str, pid: int, field: str) -> int:
    """Of a process's mapping of a file whose path holds `mapped`."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(":")[0].split(" ")[0]:
            inside = mapped in line
        elif inside and line.startswith(f"{field}:"):
            total += int(line.split()[1])
    return total


def hold(cache: Path, ready: multiprocessing.synchronize.Event, stop: multiprocessing.synchronize.Event) -> None:
    found = mapped_weights("shared", 1, Packing(rows=200_000), cache)
    sum(float(weight.float().sum()) for weight in found.values() if isinstance(weight, torch.Tensor))
    ready.set()
    stop.wait(60)


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux")
def test_two_processes_hold_one_copy(tmp_path):
    mapped_weights("shared", 1, Packing(rows=200_000), tmp_path)
    os.sync()  # until it is on the disk, a page counts as changed
    context = multiprocessing.get_context("fork")
    stop, events = context.Event(), [context.Event() for _ in range(2)]
    children = [context.Process(target=hold, args=(tmp_path, event, stop)) for event in events]
    try:
        for child in children:
            child.start()
        assert all(event.wait(60) for event in events)
        pid = children[0].pid
        assert pid is not None
        resident = kib_of("packed/shared/weights.bin", pid, "Rss")
        assert resident > 2000
        assert kib_of("packed/shared/weights.bin", pid, "Private_Dirty") == 0
        assert kib_of("packed/shared/weights.bin", pid, "Pss") < 0.6 * resident
    finally:
        stop.set()
        for child in children:
            child.join()


def test_the_file_is_written_in_whole_big_pages(tmp_path, monkeypatch):
    """What isn't is kept in small pages, from which products read a fifth slower."""
    page = 2 << 20
    written: list[tuple[int, int]] = []

    class Recorded(io.FileIO):
        def write(self, data: ReadableBuffer) -> int:
            written.append((self.tell(), memoryview(data).nbytes))
            return super().write(data)

    def recorded(path: Path, mode: str = "r", buffering: int = -1, **text: Any) -> Any:
        if mode == "wb":
            return io.BufferedWriter(Recorded(path, mode), buffering)
        return open(path, mode, buffering, **text)

    monkeypatch.setattr(Path, "open", recorded)
    large = {f"w{i}": torch.full((1_000_003,), i, dtype=torch.uint8) for i in range(5)}
    found = mapped_weights("one", 1, lambda: iter(large.items()), tmp_path)
    for name, weight in large.items():
        mapped = found[name]
        assert isinstance(mapped, torch.Tensor)
        assert torch.equal(mapped, weight)
    assert len(written) == 3
    assert all(start % page == 0 for start, _ in written)
    assert all(size == page for _, size in written[:-1])


def test_a_read_only_cache_can_be_read(tmp_path, monkeypatch):
    mapped_weights("one", 1, Packing(), tmp_path)

    def refuse(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    packing = Packing()
    assert_same(dict(mapped_weights("one", 1, packing, tmp_path)), weights())
    assert packing.times == 0


@pytest.mark.parametrize("trouble", ["full", "not a folder"])
def test_without_a_place_they_stay_in_memory(tmp_path, trouble, caplog):
    cache = tmp_path / "cache"
    if trouble == "not a folder":
        cache.write_text("")
    needed = 10**18 if trouble == "full" else 1
    packing = Packing()
    assert_same(dict(mapped_weights("one", needed, packing, cache)), weights())
    assert packing.times == 1
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "packed weights aren't shared between processes"
    ]


def test_a_damaged_entry_is_packed_anew(tmp_path):
    mapped_weights("one", 1, Packing(), tmp_path)
    path = tmp_path / "packed/one/weights.bin"
    path.write_bytes(path.read_bytes()[:-1])
    for expected in (1, 1, 0):  # told and kept in memory, then packed again, then mapped
        packing = Packing()
        assert_same(dict(mapped_weights("one", 1, packing, tmp_path)), weights())
        assert packing.times == expected


def test_an_entry_that_was_altered_in_place_is_packed_anew(tmp_path):
    mapped_weights("one", 1, Packing(), tmp_path)
    path = tmp_path / "packed/one/weights.bin"
    with path.open("r+b") as file:
        file.seek(7)
        changed = bytes([file.read(1)[0] ^ 1])
        file.seek(7)
        file.write(changed)
    later = path.stat().st_mtime + 1  # times may be as coarse as a clock tick
    os.utime(path, (later, later))
    for expected in (1, 1, 0):
        packing = Packing()
        assert_same(dict(mapped_weights("one", 1, packing, tmp_path)), weights())
        assert packing.times == expected


def test_a_copy_without_its_times_is_as_good(tmp_path):
    mapped_weights("one", 1, Packing(), tmp_path)
    os.utime(tmp_path / "packed/one/weights.bin", (1, 1))
    packing = Packing()
    assert_same(dict(mapped_weights("one", 1, packing, tmp_path)), weights())
    assert packing.times == 0


def placed(offset: int, dtype: str) -> dict[str, object]:
    return {"final_norm": {"data": {"offset": offset, "shape": [6], "dtype": dtype}}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: [],
        lambda index: {**index, "weights": [1]},
        lambda index: {**index, "weights": placed(3, "float32")},
        lambda index: {**index, "weights": placed(1 << 40, "uint8")},
    ],
    ids=["a list", "weights in a list", "not aligned", "beyond the end"],
)
def test_an_index_that_makes_no_sense_is_no_end(tmp_path, spoil):
    mapped_weights("one", 1, Packing(), tmp_path)
    path = tmp_path / "packed/one/index.json"
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    for expected in (1, 1, 0):
        packing = Packing()
        assert_same(dict(mapped_weights("one", 1, packing, tmp_path)), weights())
        assert packing.times == expected


def test_an_entry_appears_when_it_is_on_the_disk(tmp_path, monkeypatch):
    """After a power cut a file may be there in name, with zeros for what was still to be written."""
    synced: set[str] = set()
    sync = os.fsync

    def record(fd: int) -> None:
        assert not (tmp_path / "packed/one").exists()
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    mapped_weights("one", 1, Packing(), tmp_path)
    assert {"weights.bin", "index.json"} <= synced


def test_the_longest_unused_is_forgotten_first(tmp_path, monkeypatch):
    for number, name in enumerate(("old", "used", "new")):
        mapped_weights(name, 1, Packing(), tmp_path)
        os.utime(tmp_path / "packed" / name, (number, number))
    mapped_weights("used", 1, Packing(), tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / "packed/old").iterdir())
    monkeypatch.setattr(packed_weights, "LIMIT_BYTES", 2 * size)
    mapped_weights("last", 1, Packing(), tmp_path)
    assert {path.name for path in (tmp_path / "packed").iterdir() if path.is_dir()} == {"used", "last"}
