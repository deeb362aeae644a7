"""What the images are made from, as far as it can be judged without building them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
STAGES = dict(re.findall(r"^FROM \S+ AS ([\w-]+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S))


def copied(stage: str) -> list[tuple[list[str], str]]:
    """What a stage copies from the repository: sources and destination."""
    lines = re.findall(r"^COPY (?!--)(.*)$", STAGES[stage], re.M)
    return [(line.split()[:-1], line.split()[-1]) for line in lines]


def let_in() -> set[str]:
    """What .dockerignore lets into a build."""
    return set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.M))


def test_everything_copied_exists_and_is_let_in() -> None:
    allowed = let_in()
    num_checked = 0
    for stage in STAGES:
        for sources, _ in copied(stage):
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source == "." or any(source == one or source.startswith(f"{one}/") for one in allowed), source
                num_checked += 1
    assert num_checked > 8


def test_the_wheel_has_all_its_packages() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.split("/")[0] for package in packages} <= let_in()


def test_what_compiles_the_kernels_is_copied(tmp_path: Path) -> None:
    """The stage has a handful of files, so that a change of any other one doesn't compile them anew."""
    for sources, destination in copied("kernels"):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / destination)
            else:
                (tmp_path / destination).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / destination)
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import engine.kernels.build",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "engine" / "kernels" / "csrc" / "library.cpp").is_file()


@pytest.mark.parametrize("stage", ["service", "engine"])
def test_nobody_is_root(stage: str) -> None:
    assert "USER tandem" in STAGES[stage]
    assert "--uid 10001" in STAGES[stage], "the user of compose.yaml"
    assert not re.search(r"g\+\+", STAGES[stage])


def test_requirements_are_the_projects_own() -> None:
    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, str(ROOT / "deploy" / "requirements.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert printed() == PROJECT["project"]["dependencies"]
    assert printed("engine") == PROJECT["project"]["optional-dependencies"]["engine"]
    assert not any("torch" in requirement for requirement in printed()), "services know nothing of torch"
