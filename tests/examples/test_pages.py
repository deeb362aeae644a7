"""What the hand-written pages under docs/ name must be there: fields, flags, settings, metrics, files and links."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tandem.v1 import generation_pb2, types_pb2

from cli.__main__ import build_parser
from cluster.config import settings_of
from cluster.telemetry import Telemetry
from draft_worker.config import DraftWorkerConfig
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from scheduler.config import SchedulerConfig
from scheduler.loop import Cell
from scheduler.metrics import CellCollector
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("architecture", "calling", "exactness", "operations")]
CONFIGS = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "draft_worker": DraftWorkerConfig,
}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def table(page: str, after: str) -> Iterator[list[str]]:
    """The rows of the first table after a text, without its head."""
    lines = page.split(after, 1)[1].split("\n")
    begin = next(index for index, line in enumerate(lines) if line.startswith("| ---"))
    for line in lines[begin + 1 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def names(page: str, after: str) -> list[str]:
    """What stands in backticks in a table's first column."""
    return [name for row in table(page, after) for name in re.findall(r"`([^`]+)`", row[0])]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    for link in links:
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_named_files_exist(page: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text("utf-8")):
        assert (ROOT / name).exists(), name


@pages
def test_flags_exist(page: Path) -> None:
    subparsers = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    flags = {name: {f"--{field.name.replace('_', '-')}" for field in settings_of(one)} for name, one in CONFIGS.items()}
    commands = {name: set(parser._option_string_actions) for name, parser in subparsers.choices.items()}
    text = page.read_text("utf-8")
    for service, line in re.findall(r"^python -m (\w+) (.*)$", text, re.M):
        assert set(re.findall(r"--[\w-]+", line)) <= flags[service], line
    for command, line in re.findall(r"(?:^|`)tandem (\w+)([^\n`]*)", text, re.M):
        assert set(re.findall(r"--[\w-]+", line)) <= commands[command], line
    known = set().union(*flags.values(), *commands.values())
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known


def test_every_field_of_a_request_is_explained() -> None:
    page = (ROOT / "docs" / "calling.md").read_text("utf-8")
    messages: dict[str, Any] = {
        "## Fields of a request": generation_pb2.GenerateStreamRequest,
        "\n`chat`:": generation_pb2.ChatPrompt,
        "\n`sampling`:": generation_pb2.SamplingParams,
        "\n`stop`:": generation_pb2.StopCriteria,
        "\n`output`:": generation_pb2.OutputOptions,
        "\n`speculation`:": types_pb2.Speculation,
        "## Resuming": generation_pb2.ResumedChoice,
    }
    for after, message in messages.items():
        assert names(page, after) == [field.name for field in message.DESCRIPTOR.fields], after


def test_every_rpc_is_listed() -> None:
    page = (ROOT / "docs" / "calling.md").read_text("utf-8")
    methods = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    assert sorted(names(page, "# Calling a cluster")) == sorted(methods)


def exposed(registry: CollectorRegistry) -> set[str]:
    """Names of metrics as a scrape shows them, without those that every service has."""
    found = set()
    for metric in registry.collect():
        suffix = "_total" if metric.type == "counter" else ""
        found.add(metric.name + suffix)
    return {name for name in found if not name.startswith(("process_", "tandem_build", "tandem_tasks"))}


async def test_every_metric_is_listed() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    gateway, scheduler = Telemetry("gateway"), CollectorRegistry()
    GatewayMetrics(gateway, lambda: 0.0, lambda: 0.0)
    scheduler.register(CellCollector(Cell(SchedulerConfig())))
    source = (ROOT / "draft_worker" / "__main__.py").read_text("utf-8")
    draft = {f"tandem_{name}" for name in re.findall(r'telemetry\.\w+\(\s*"(\w+)"', source)}
    assert set(names(page, "| gateway | labels")) == exposed(gateway.registry)
    assert set(names(page, "| scheduler | labels")) == exposed(scheduler)
    assert set(names(page, "| draft worker | meaning")) == draft


def test_times_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    defaults = {name: {field.name: field.default for field in settings_of(one)} for name, one in CONFIGS.items()}
    checked = 0
    for _, time, setting in table(page, "## Timeouts"):
        for name in re.findall(r"`(\w+)`", setting):
            services = [service for service in CONFIGS if re.search(rf"\b{service}\b", setting)]
            assert services, setting
            for service in services:
                assert float(time.split(" ")[0]) == float(defaults[service][name]), setting
                checked += 1
    for service, _, most in table(page, "## Stopping"):
        if found := re.match(r"`(\w+)`, (\d+) s", most):
            assert float(found[2]) == float(defaults[service][found[1]]), service
            checked += 1
    assert checked >= 11


def test_a_wrong_page_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`tandem up --nonsense` and [a link](nowhere.md), `engine/nothing.py`\n")
    checks: list[Any] = [test_links_lead_somewhere, test_named_files_exist, test_flags_exist]
    for check in checks:
        with pytest.raises(AssertionError):
            check(page)
