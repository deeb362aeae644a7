"""The benchmark of speculation on a cluster without weights: pairs, what they count, and what they are asked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tandem.v1 import admin_pb2_grpc

from bench import speculation, speculation_plan, speculation_prompts
from bench.speculation import Cluster, compare
from bench.speculation_plan import Plan, missing, plan_of
from bench.speculation_runs import Case, Run, StepTimes, acceptance, differing, load, ratio, save
from cluster.channel import connect
from tests.integration.harness import MODEL, running

SAMPLED, COPY = Case("chat", 2, 0.7, "auto"), Case("copy", 1, 0.0, "model")


async def test_pairs_in_one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MODEL_NAME", MODEL)
    async with (
        running(
            tmp_path, draft="fake", scheduler={"speculation": "fixed"}, num_blocks=1024, fake_step_ms=4
        ) as under_test,
        connect(under_test.scheduler) as channel,
    ):
        parts = {name: process.child.pid for name, process in under_test.processes.items()}
        target = cast(Any, SimpleNamespace(parts=parts))
        cluster = Cluster(target, under_test.stub(), admin_pb2_grpc.AdminServiceStub(channel))
        plan, kept = Plan((SAMPLED, COPY), rounds=2, requests=2, max_tokens=48, waves=1), tmp_path / "pairs.json"
        half = dataclasses.replace(plan, rounds=1)
        await compare(cluster, half, keep=partial(save, kept, setup={"m": 1}))
        done, _ = load(kept, {"m": 1})
        assert [run.round for run in done] == [1, 1, 1, 1]
        # An interrupted pair is run again.
        runs, step_times = await compare(cluster, plan, done=[*done, dataclasses.replace(done[0], round=2)])
        assert runs[:4] == done
        await under_test.assert_baseline()
    order = [(run.round, run.case, run.drafts) for run in runs]
    assert order == [
        *((1, SAMPLED, False), (1, SAMPLED, True), (1, COPY, False), (1, COPY, True)),
        *((2, SAMPLED, True), (2, SAMPLED, False), (2, COPY, True), (2, COPY, False)),
    ]
    assert not any(run.errors for run in runs)
    assert [differing(runs, case) for case in (SAMPLED, COPY)] == [0, 0]
    assert len({run.answers_digest for run in runs}) == 3, "rounds of chat have other prompts, copying the same"
    for run in runs:
        assert run.output_tokens == 2 * 48
        assert run.steps > 0
        assert 0 < run.decode_rows < run.output_tokens, "first tokens come of prefills"
        assert bool(run.draft_budget) is run.drafts
        assert bool(run.drafted) is run.drafts or sum(run.drafted) == 0
        assert run.parts_cpu_s.keys() == parts.keys()
    drafted = [run for run in runs if run.drafts]
    assert sum(sum(run.accepted) for run in drafted) > 0
    assert 0 < acceptance(drafted)[0] < 1
    assert ratio(runs, SAMPLED) is not None
    assert step_times["plain"]


def test_prompts_are_distinct_and_held_out() -> None:
    prompts = speculation_prompts.chat(200)
    assert len(set(prompts)) == 200
    assert speculation_prompts.chat(10) == prompts[:10]
    copying = speculation_prompts.copying(45)
    assert len(set(copying)) == 40
    assert len({one.split("\n\n")[0] for one in copying[:8]}) == 5
    assert speculation_prompts.digest(copying) != speculation_prompts.digest(prompts)


def test_both_halves_have_the_same_prompts_and_rounds_others() -> None:
    first = speculation_plan.prompts_of(SAMPLED, 1, 3)
    assert first == speculation_plan.prompts_of(SAMPLED, 1, 3)
    assert not set(first) & set(speculation_plan.prompts_of(SAMPLED, 2, 3))


def test_salts_never_repeat_and_seeds_are_a_pairs() -> None:
    made = {
        (number, drafts, index): cast(Any, speculation.request(SAMPLED, number, drafts, index, "Hi", 8))
        for number in (1, 2)
        for drafts in (False, True)
        for index in (0, 1)
    }
    assert len({one.cache_salt for one in made.values()}) == 8
    assert made[1, False, 0].sampling.seed == made[1, True, 0].sampling.seed != made[1, True, 1].sampling.seed


def test_quick_is_one_pair_of_few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["speculation", "--quick"])
    quick = plan_of(speculation._arguments())
    assert quick.rounds == 1
    assert {case.workload for case in quick.cases} == {"chat", "copy"}
    monkeypatch.setattr("sys.argv", ["speculation"])
    whole = plan_of(speculation._arguments())
    assert {(case.streams, case.temperature) for case in whole.cases if case.workload == "chat"} == {
        (streams, temperature) for streams in (1, 4, 16, 64) for temperature in (0.0, 0.7)
    }
    assert whole.rounds == 5
    sizes = {case.streams: whole.size_of(case) for case in whole.cases if case.workload == "chat"}
    assert sizes == {1: (6, 128), 4: (8, 128), 16: (32, 128), 64: (64, 64)}


async def test_no_pair_begins_when_the_time_is_over() -> None:
    plan = Plan((SAMPLED,), rounds=2, requests=1, max_tokens=8, minutes=-1.0)

    async def status() -> Any:
        return SimpleNamespace(workers=[])

    runs, step_times = await compare(cast(Any, SimpleNamespace(status=status)), plan)
    assert (runs, step_times) == ([], {"plain": [], "drafting": []})


def test_what_is_kept_is_of_one_setup(tmp_path: Path) -> None:
    runs = [Run(SAMPLED, 1, False, 8, 1.0, drafted=(3, 1), accepted=(1, 0)), Run(SAMPLED, 1, True, 8, 0.5)]
    times: StepTimes = {"plain": [(1.0, 0.01)], "drafting": []}
    save(tmp_path / "pairs.json", runs, times, {"sizes": (1, 2)})
    assert load(tmp_path / "pairs.json", {"sizes": (1, 2)}) == (runs, times)
    with pytest.raises(ValueError, match="otherwise"):
        load(tmp_path / "pairs.json", {"sizes": (1, 3)})
    plan = Plan((SAMPLED,), rounds=2, requests=1, max_tokens=8)
    assert [missing(plan, runs, SAMPLED, number) for number in (0, 1, 2)] == [True, False, True]


def test_an_interrupted_benchmark_goes_on_and_ends_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line around the pairs; what it leaves where it is stopped, and what it doesn't do again."""
    measured: list[int] = []

    async def measure(target: object, plan: Plan, done: list[Run], keep: Any) -> tuple[list[Run], StepTimes]:
        runs, times = list(done), {"plain": [(1.0, 0.01), (5.0, 0.015)], "drafting": []}
        for number in range(1, plan.rounds + 1):
            if missing(plan, runs, plan.cases[0], number):
                measured.append(number)
                runs += [
                    Run(plan.cases[0], number, on, 8, 1.0 - on / 2, steps=8, decode_rows=8) for on in (False, True)
                ]
                keep(runs, times)
                if len(measured) == 1:
                    raise KeyboardInterrupt
        return runs, times

    monkeypatch.setattr(speculation, "measure", measure)
    monkeypatch.setattr(speculation, "serving", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("bench.speculation.signal.signal", lambda *_: None)
    flags = ["--model", str(tmp_path / "m"), "--streams", "1", "--temperatures", "0", "--copy-streams", "0"]
    flags += ["--rounds", "2", "--output", str(tmp_path / "out"), "--resume"]
    monkeypatch.setattr("sys.argv", ["speculation", *flags])
    with pytest.raises(KeyboardInterrupt):
        speculation.main()
    assert speculation.main() == 0
    assert measured == [1, 2]
    assert "chat n=1 T=0 auto, round 2 | 8.0 | 16.0 | 2.00" in capsys.readouterr().out
    # All is there: nothing runs, and the report comes again.
    monkeypatch.setattr(speculation, "serving", None)
    assert speculation.main() == 0
    assert json.loads((tmp_path / "out" / "speculation.json").read_text())["summary"][0]["ratio"]["pairs"] == 2
    monkeypatch.setattr("sys.argv", ["speculation", *flags, "--max-tokens", "9"])
    assert speculation.main() == 2
