"""Log lines: one per event, tidy, and safe against what values contain."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from cluster import logs
from cluster.logs import event

pytestmark = pytest.mark.usefixtures("restored_process")


def lines(style: str = "text", level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logs.setup("scheduler", level, style, stream)
    return logging.getLogger("scheduler.loop"), stream


def test_a_line() -> None:
    logger, stream = lines()
    event(logger, "worker attached", worker="w1", blocks=512, free=0.123456789, note="two words", none=None)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    scheduler    worker attached  "
        r'worker=w1 blocks=512 free=0.123457 note="two words" none=None\n',
        stream.getvalue(),
    )


def test_no_value_can_forge_a_line_or_flood_the_log() -> None:
    logger, stream = lines()
    event(logger, "100% strange\nname", name="x\n12:00:00 ERROR fake", long="p" * 10_000, empty="", quote='a"b')
    (line,) = stream.getvalue().splitlines()
    assert "100% strange\\nname" in line
    assert 'name="x\\n12:00:00 ERROR fake"' in line
    assert 'empty=""' in line
    assert 'quote="a\\"b"' in line
    assert len(line) < 500


def test_json_lines() -> None:
    logger, stream = lines("json")
    event(logger, "worker lost", level=logging.WARNING, worker="w1", blocks=512, ok=True, none=None, event="clash")
    entry = json.loads(stream.getvalue())
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "service": "scheduler",
        "event": "worker lost",
        "worker": "w1",
        "blocks": 512,
        "ok": True,
        "none": None,
        "event_": "clash",
    }


@pytest.mark.parametrize("style", logs.STYLES)
def test_an_error_brings_its_traceback(style: str) -> None:
    logger, stream = lines(style)
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        event(logger, "step failed", level=logging.ERROR, error=error, step=3)
    assert "RuntimeError: broken" in stream.getvalue()
    assert "Traceback" in stream.getvalue()


def test_levels_and_plain_logging() -> None:
    logger, stream = lines(level="warning")
    event(logger, "quiet")
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("library").warning("plain %s", "text")
    assert stream.getvalue().count("\n") == 1
    assert "plain text" in stream.getvalue()
    with pytest.raises(ValueError, match="level is one of"):
        logs.setup("x", "loud")
