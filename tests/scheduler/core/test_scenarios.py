"""Runs tests/scenarios/*.txt. To accept new output: TANDEM_REWRITE_SCENARIOS=1, then review the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scheduler.core.scenario import Scenario

FOLDER = Path(__file__).parents[2] / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


def rerun(text: str) -> str:
    """The same commands and comments, with what the cell says now."""
    scenario = Scenario()
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        if all(line.startswith("#") for line in paragraph.splitlines()):
            paragraphs.append(paragraph)
            continue
        head, _, _ = paragraph.partition("\n----")
        commands = [line for line in head.splitlines() if not line.startswith("#")]
        said = [scenario.run(command) for command in commands]
        spoken = [text for text in said if text != "ok"] or ["ok"]
        paragraphs.append("\n".join([head, "----", *spoken]))
    return "\n\n".join(paragraphs) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    text = file.read_text()
    actual = rerun(text)
    if os.environ.get("TANDEM_REWRITE_SCENARIOS"):
        file.write_text(actual)
    assert actual == text


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 16
