"""What `tandem up` shows of its children."""

from __future__ import annotations

import io

from cli.output import Output


def test_lines_are_marked_and_never_cut() -> None:
    stream = io.StringIO()
    output = Output(stream)
    output.line("worker-0", "[not markup] " + "x" * 300)
    output.line("gateway", "ready")
    first, second, _ = stream.getvalue().split("\n")
    assert first == "worker-0  │ [not markup] " + "x" * 300
    assert second == "gateway   │ ready"


def test_a_child_can_not_move_the_cursor() -> None:
    stream = io.StringIO()
    Output(stream).line("worker-0", "\x1b[2Jgone\x1b[31mred\x1b[0m\x07")
    assert "\x1b" not in stream.getvalue()
    assert "gone" in stream.getvalue()
    assert "red" in stream.getvalue()


def test_held_lines_come_afterwards_in_order() -> None:
    stream = io.StringIO()
    output = Output(stream)
    with output.held():
        output.line("a", "1")
        output.line("b", "2")
        output.console.print("demo")
    assert [line.rpartition("│ ")[2] for line in stream.getvalue().splitlines()] == ["demo", "1", "2"]


def test_without_a_terminal_there_is_no_spinner() -> None:
    stream = io.StringIO()
    output = Output(stream)
    with output.waiting("for something"):
        output.now_waiting("for something else")
        output.progress("worker-0", "50%")
    assert stream.getvalue() == ""
