"""Lines where there is no terminal: when a stage begins and ends, and now and then."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress

from cli.distill_report import LINE_EVERY_S, Shown
from distill.training import Position


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_lines_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    shown = Shown(Console(file=out, soft_wrap=True), None, 400, clock)
    for tenth in range(1, 1001):
        clock.time_s = 0.1 * tenth
        shown.stage("answers", 0.2 + 0.0008 * tenth)
    said = lines(out)
    assert said[0] == "answers 20%"
    assert len(said) == 1 + 100 / LINE_EVERY_S
    assert said[5] == "answers 60%, after 50 s, about 50 s left", "a resumed stage has had a start"
    assert said[-1] == "answers 100%, after 1 min 40 s"


def test_an_end_is_told_once() -> None:
    out = io.StringIO()
    shown = Shown(Console(file=out, soft_wrap=True), None, 1, Clock())
    for share in (0.9, 1.0, 1.0, 1.0, 0.1, 1.0):
        shown.stage("answers", share)
    assert [line.split(",")[0] for line in lines(out)] == ["answers 90%", "answers 100%", "answers 10%", "answers 100%"]


def test_training() -> None:
    out, clock = io.StringIO(), Clock()
    shown = Shown(Console(file=out, soft_wrap=True), None, 4000, clock)
    for step in (1001, 1002, 1100, 4000):
        clock.time_s = 7.0 * (step - 1000)
        shown.step(Position(step, step // 1000), 3.25, 0.5)
    assert lines(out) == [
        "training 25%, step 1001, epoch 2, loss 3.25, agreeing 50%",
        "training 28%, step 1100, epoch 2, loss 3.25, agreeing 50%, after 12 min, about 338 min left",
        "training 100%, step 4000, epoch 5, loss 3.25, agreeing 50%, after 350 min",
    ]


def test_a_stage_of_unknown_length() -> None:
    out, clock = io.StringIO(), Clock()
    shown = Shown(Console(file=out, soft_wrap=True), None, 1, clock)
    for clock.time_s in (0.0, 5.0, 12.0):
        shown.stage("building the kernels", None)
    assert lines(out) == ["building the kernels", "building the kernels"]


def test_bars_reach_their_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(console=console) as bars:
        shown = Shown(console, bars, 8)
        shown.stage("answers", 0.5)
        shown.stage("answers", 1.0)
        for step in range(1, 9):
            shown.step(Position(step), 1.0, 0.5)
        assert [task.description for task in bars.tasks] == ["answers", "training"]
        assert all(task.finished for task in bars.tasks)
