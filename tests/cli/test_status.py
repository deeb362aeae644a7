"""The status of a cell as table and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console
from tandem.v1 import admin_pb2

from cli import admin, status
from cli.__main__ import main
from cli.admin import CellStatus


def cell(
    uptime_s: float, generated: int, drafted: int = 0, accepted: int = 0, drafting: bool = True, **changes: Any
) -> CellStatus:
    worker = admin_pb2.WorkerStatus(
        worker_id="w-1",
        model="m",
        epoch=3,
        state=admin_pb2.WORKER_STATE_SERVING,
        running=2,
        max_sequences=8,
        total_blocks=100,
        free_blocks=70,
        cached_blocks=10,
        referenced_blocks=20,
        last_step_s=0.0125,
        drafting=drafting,
        generated_tokens=generated,
        decode_rows=generated - accepted,
        draft_budget_tokens=2 * (generated - accepted),
        accepted_tokens=accepted,
        acceptance=[0.75, 0.5],
        position_drafted_tokens=[drafted // 2, accepted],
        position_accepted_tokens=[accepted, accepted // 2],
        plain_steps=[admin_pb2.StepDuration(num_tokens=n, seconds=n / 100) for n in range(1, 30)],
        speculation_gain=1.375,
        drafting_s=0.5,
    )
    message = admin_pb2.GetStatusResponse(
        term=5,
        uptime_s=uptime_s,
        workers=[worker],
        draft_workers=[admin_pb2.DraftWorkerStatus(worker_id="d", model="m", address="h:1", proposer="ngram")],
        gateways=["g", "h"],
        gateway_sessions=[
            admin_pb2.GatewayStatus(gateway_id="g", live_requests=3),
            admin_pb2.GatewayStatus(gateway_id="h", live_requests=1, draining=True),
        ],
        waiting=4,
        running=2,
        counters=admin_pb2.Counters(generated_tokens=generated, drafted_tokens=drafted, accepted_tokens=accepted),
        cell="main",
        leading=True,
        leader="h:2",
    )
    return dataclasses.replace(admin.cell_status(message), **changes)


def shown(before: CellStatus, now: CellStatus, width: int = 160) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(status.table(before, now))
    return output.getvalue()


def test_rates_are_between_two_looks() -> None:
    before, now = cell(10.0, 1000, drafted=100, accepted=90), cell(12.0, 1500, drafted=150, accepted=100)
    assert status.tokens_per_s(before, now) == 250.0
    assert status.acceptance(before, now) == 0.2
    assert status.tokens_per_s(now, now) is None


def test_acceptance_since_the_start_where_nothing_was_drafted_in_between() -> None:
    now = cell(12.0, 1500, drafted=150, accepted=75)
    assert status.acceptance(now, now) == 0.5
    assert status.acceptance(cell(1.0, 0), cell(2.0, 0)) is None


def test_a_restarted_scheduler_gives_no_negative_rate() -> None:
    assert status.tokens_per_s(cell(100.0, 9000), cell(1.0, 5)) is None
    assert status.tokens_per_s(cell(1.0, 5), cell(3.0, 9, term=6)) is None


def test_the_table_has_what_an_operator_looks_for() -> None:
    text = shown(cell(10.0, 1000), cell(12.0, 1500, drafted=10, accepted=5))
    for wanted in ("w-1", "serving", "2/8", "20/100", "250.0", "12.5", "50%", "waiting 4", "d drafts for m with ngram"):
        assert wanted in text
    assert [line.rstrip() for line in text.splitlines() if "live" in line] == ["g: 3 live", "h: 1 live, draining"]
    assert "cell main" in text
    assert "led by h:2" in text
    assert "DRAINING" not in text
    assert "DRAINING" in shown(cell(1.0, 0), cell(2.0, 0, draining=True))
    assert "no worker is attached" in shown(cell(1.0, 0), cell(2.0, 0, workers=()))


def test_a_terminal_of_80_columns_shows_every_column_of_long_names() -> None:
    before, now = cell(10.0, 1000), cell(12.0, 1500)
    worker = dataclasses.replace(now.workers[0], worker_id="worker-90f01477", model="SmolLM2-135M-Instruct")
    worker = dataclasses.replace(worker, free_blocks=14_831, total_blocks=14_831, max_sequences=256)
    lines = shown(before, dataclasses.replace(now, workers=(worker,)), width=80).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("worker "))
    assert " ".join(lines[header].split()) == "worker model state rows used cached free tok/s ms k row gain"
    assert lines[header + 1].rstrip().endswith("1.38")
    folded = [line.split() for line in lines[header + 1 :]]
    assert folded[0][0] + folded[1][0] == "worker-90f01477"


def test_into_a_pipe_status_is_one_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([cell(10.0, 1000), cell(12.0, 1500)])
    monkeypatch.setattr(admin, "status", lambda _scheduler: next(looks))
    assert main(["status", "--interval=0.01"]) == 0
    assert "250.0" in capsys.readouterr().out


def test_what_drafts_bring_is_seen() -> None:
    before, now = cell(10.0, 1000), cell(12.0, 1500, drafted=800, accepted=200)
    row = next(line.split() for line in shown(before, now).splitlines() if line.startswith("w-1 "))
    # 500 tokens of 300 rows, which were allowed 600 draft tokens between the looks.
    assert row[-3:] == ["2.0", "1.67", "1.38"]
    assert "w-1 accepts, by position: 50% 50%" in shown(before, now)
    row = next(line.split() for line in shown(now, now).splitlines() if line.startswith("w-1 "))
    assert row[-3:] == ["2.0", "1.15", "1.38"]
    row = shown(before, cell(12.0, 1500, drafting=False)).splitlines()[3].split()
    assert row[-3:] == ["off", "-", "-"]


def test_acceptance_is_of_the_time_between_two_looks_if_anything_was_drafted() -> None:
    before, now = cell(10.0, 1000, drafted=100, accepted=40), cell(12.0, 1500, drafted=300, accepted=60)
    assert status.accepted_by_position(before.workers[0], now.workers[0]) == [0.2, 0.5]
    assert status.accepted_by_position(now.workers[0], now.workers[0]) == [0.4, 0.5]
    assert status.accepted_by_position(None, now.workers[0]) == [0.4, 0.5]
    nothing = cell(10.0, 1000).workers[0]
    assert status.accepted_by_position(None, nothing) == [None, None]
    longer = dataclasses.replace(
        now.workers[0], position_drafted_tokens=(150, 61, 8), position_accepted_tokens=(60, 30, 2)
    )
    assert status.accepted_by_position(now.workers[0], longer) == [None, 0.0, 0.25]


def test_step_times_are_shown_from_the_first_to_the_last() -> None:
    text = shown(cell(10.0, 1000), cell(12.0, 1500, drafted=8, accepted=4))
    line = next(line for line in text.splitlines() if "takes ms" in line)
    assert line.startswith("w-1 takes ms, by tokens of a step: 1: 10.0  5: 50.0")
    assert line.rstrip().endswith("29: 290.0")
    assert "(with drafts)" not in text


def test_the_json_has_plain_numbers() -> None:
    form = json.loads(json.dumps(status.status_json(cell(10.0, 1000), cell(12.0, 1500))))
    assert (form["term"], form["tokens_per_s"], form["acceptance"]) == (5, 250.0, None)
    assert form["workers"][0]["referenced_blocks"] == 20
    assert form["workers"][0]["state"] == "serving"
    assert form["workers"][0]["acceptance"] == [0.75, 0.5]
    assert form["counters"]["generated_tokens"] == 1500


def test_a_standby_says_so() -> None:
    standby = cell(1.0, 0, leading=False, workers=())
    assert "a standby of cell main; h:2 leads" in shown(standby, standby)
    assert "nobody leads" in shown(standby, dataclasses.replace(standby, leader=""))
