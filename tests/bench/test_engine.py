"""`bench.engine` on a tiny model: what it times and how it adds up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import engine as bench_engine
from bench.ceilings import Ceilings
from bench.floors import Costs, Work
from bench.op_times import OpTimes
from engine.batch import Batch
from engine.kernels.torch_ops import TorchOps
from engine.loading import check_supported
from engine.runner import ModelRunner
from tests.engine.models import write_tiny_model

KINDS = [Work(3, 40), Work(1, 64, 5), Work(2, 33, 33, logits=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama-multi-query-tied")


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_blocks_are_held_for_the_longest_context_of_each_row() -> None:
    assert bench_engine.blocks_per_row(KINDS) == [4, 3, 3]


def test_steps_are_what_they_are_called(folder: Path) -> None:
    runner = ModelRunner.load(
        folder, dtype="float32", device="cpu", num_blocks=10, block_size=bench_engine.BLOCK_SIZE, kernels="torch"
    )
    bench = bench_engine.Bench(runner, KINDS, seconds=0.0)
    batches = []
    forward = runner.forward

    def noted(batch: Batch) -> torch.Tensor:
        batches.append(batch)
        return forward(batch)

    runner.forward = noted  # type: ignore[method-assign]
    for work in KINDS:
        times = bench.times_s(work)
        assert len(times) == bench_engine.MIN_STEPS
        batch = batches[-1]
        assert len(batch.token_ids) == work.rows * work.tokens
        assert batch.context_lens.tolist() == [work.context] * work.rows
        assert len(batch.logit_indices) == work.rows * work.num_logits
        assert batch.logit_indices[-1] == len(batch.token_ids) - 1
    # Rows 0 to 2 were filled up to 39 tokens, one by one, and row 0 once more up to 59.
    fills = [batch for batch in batches if len(batch.query_starts) == 2 and batch.context_lens[0] in (39, 59)]
    assert [len(batch.token_ids) for batch in fills] == [39, 39, 39, 20]


def test_floors_count_each_weight_once(folder: Path) -> None:
    facts = check_supported(folder)
    costs = Costs.of(facts, torch.float32)
    assert costs.body_parameters + costs.head_parameters == facts.num_parameters
    assert costs.weight_bytes == 4 * facts.num_parameters
    coded = Costs.of(facts, torch.float32, 0.75)
    assert coded.weight_bytes == 3 * costs.body_parameters + 4 * costs.head_parameters
    slow_memory, slow_cores = Ceilings(1e-3, 1e9), Ceilings(1e9, 1e-3)
    assert costs.floor_s(Work(1, 1), slow_memory) == (costs.weight_bytes + costs.kv_bytes_per_token) / 1e6
    one, four = (costs.floor_s(Work(rows, 1), slow_cores) for rows in (1, 4))
    assert four == pytest.approx(4 * one)
    assert one == pytest.approx(2 * (facts.num_parameters + 2 * costs.attention_width) / 1e6)


def test_op_times_take_the_wrappers_off() -> None:
    ops = TorchOps(torch.device("cpu"))
    times = OpTimes(ops)
    weight, x, out = ops.pack(torch.randn(300, 200)), torch.randn(8, 200), torch.empty(8, 300)
    for _ in range(4):
        ops.linear(x, weight, out)
        ops.rms_norm(x, torch.ones(200), 1e-5, x)
    split = times.per_step(4, 1.0)
    assert split["calls"] == {"linear 200→300": 1, "rms_norm": 1}
    spent = split["operations_ms"]
    assert set(spent) == {"linear 200→300", "rms_norm", "around them"}
    assert sum(spent.values()) == pytest.approx(split["step_ms"])
    assert 990 < split["step_ms"] <= 1000
    times.clear()
    assert times.per_step(1, 1.0)["calls"] == {}


def test_the_whole_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.engine.measure", lambda *_: Ceilings(10.0, 100.0))
    result = tmp_path / "result.json"
    shape = "--rows 1,2 --context 20 --contexts 24 --tokens 2 --prompts 16 --seconds 0 --kernels torch --device cpu"
    monkeypatch.setattr(sys, "argv", ["engine", "--model", str(folder), "--json", str(result), *shape.split()])
    bench_engine.main()
    out = capsys.readouterr().out
    assert "by tokens per row" in out
    assert "around them" in out
    written = json.loads(result.read_text())
    assert [len(table) for table in written["timings"].values()] == [2, 1, 2, 1]
    assert len(written["splits"]) == 3
