"""The index of cases is complete, and every test that it names exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.cases.index import CASES

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = (
    *(1, 4, 5, 7, 9, 10, 12, 13, 15, 16, 17, 20, 22, 23, 25, 27, 28, 29, 30, 31, 33, 34, 35, 38, 39, 41, 42, 43, 45),
    *(48, 50, 52, 55, 56, 58, 60, 63, 64, 67, 68, 70, 72, 74, 75, 77, 78, 92, 93),
)


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The test functions of a file."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return frozenset(
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def test_no_case_is_missing() -> None:
    assert set(REQUIRED) - set(CASES) == set()
    assert all(CASES.values())


@pytest.mark.parametrize("number", sorted(CASES))
def test_every_named_test_exists(number: int) -> None:
    for node_id in CASES[number]:
        file, _, name = node_id.partition("::")
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file):
            found = [
                path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if name in functions_of(path)
            ]
            pytest.fail(f"{node_id} does not exist; a test of this name is in: {[str(path) for path in found]}")


def test_every_test_of_a_case_is_in_the_index() -> None:
    """A test that is named after a case is listed under its number."""
    listed = {node_id for node_ids in CASES.values() for node_id in node_ids}
    for path in Path(__file__).parent.glob("test_*.py"):
        for name in functions_of(path):
            if name.startswith("test_case_"):
                assert f"tests/cases/{path.name}::{name}" in listed
