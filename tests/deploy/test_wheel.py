"""What the wheel and the sources' archive hold, asked of the build's own configuration; nothing is built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from cli.model_source import resolve_draft

ROOT = Path(__file__).resolve().parents[2]
MAX_DRAFT_BYTES = 8_000_000


def tracked(*folders: str) -> set[str]:
    """The files that git knows below folders."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel() -> dict[str, Path]:
    """Source by path in the wheel."""
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    return {file.distribution_path: Path(file.path) for file in files}


@pytest.fixture(scope="module")
def archive() -> set[str]:
    """Paths in the sources' archive."""
    return {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}


def test_the_wheel_has_the_draft_where_the_command_looks_for_it(wheel: dict[str, Path], tmp_path: Path) -> None:
    found = Path(resolve_draft("auto", "default", "transformers", tmp_path)).relative_to(ROOT)
    inside = {name: path for name, path in wheel.items() if Path(name).is_relative_to(found)}
    assert {Path(name).name for name in inside} == {"config.json", "draft.safetensors", "README.md"}
    assert sum(path.stat().st_size for path in inside.values()) <= MAX_DRAFT_BYTES


def test_the_wheel_has_every_file_of_its_packages(wheel: dict[str, Path]) -> None:
    packages = (
        "gateway",
        "scheduler",
        "worker",
        "draft_worker",
        "drafting",
        "cluster",
        "engine",
        "distill",
        "cli",
        "tandem_client",
    )
    wanted = tracked(*packages, "drafts")
    assert any(name.startswith("engine/kernels/csrc/") for name in wanted)
    assert any(name.startswith("distill/") and name.endswith(".txt") for name in wanted)
    assert wanted <= set(wheel)
    assert {name.removeprefix("protos/") for name in tracked("protos/tandem")} <= set(wheel)
    for stub in ("generation_pb2.py", "generation_pb2_grpc.py", "generation_pb2.pyi"):
        assert f"tandem/v1/{stub}" in wheel


def test_the_wheel_has_nothing_else(wheel: dict[str, Path]) -> None:
    roots = {name.split("/")[0] for name in wheel}
    assert roots.isdisjoint({"tests", "bench", "docs", "deploy", "examples", "protos"})
    assert not [name for name in wheel if "__pycache__" in name or name.endswith((".so", ".o"))]


def test_a_wheel_can_be_built_from_the_archive(archive: set[str]) -> None:
    """It has all that the repository has, and none of what lies about."""
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= archive
    assert tracked("drafts", "engine", "distill", "protos", "deploy", "tests/deploy") <= archive
    assert not [name for name in archive if "node_modules" in name or name.startswith((".venv", ".cache"))]
