"""Builds the images with whatever engine this machine has, under the user's own pip settings.

With podman, folders that those settings name (wheels, a local index, certificates) are mounted where they are. Docker's
builder has no such mounts, and needs settings that are URLs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REDIS = "docker.io/library/redis:7.2-bookworm"
TARGETS = ("service", "engine")


@cache
def engine() -> str:
    """The program that runs containers: Docker's, where its daemon answers, or podman."""
    docker, podman = shutil.which("docker"), shutil.which("podman")
    if docker and "podman" not in os.environ.get("DOCKER_HOST", ""):
        asked = [docker, "version", "--format", "{{.Server.Version}}"]
        if subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode == 0:
            return docker
    assert podman, "a Docker daemon, or podman, is needed"
    return podman


def is_podman() -> bool:
    """Whether `engine` is podman."""
    return Path(engine()).name == "podman"


def run(*command: str, timeout_s: float = 120.0, check: bool = True) -> str:
    """Output of a command, stderr included; AssertionError with that output if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-4000:]}"
    return done.stdout


def pip_settings() -> dict[str, str]:
    """The user's pip settings by name; variables win over files, as they do in pip."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    found = [re.fullmatch(r"(global|:env:)\.([\w-]+)='(.*)'", line) for line in lines]
    ordered = sorted((match for match in found if match), key=lambda match: match[1] == ":env:")
    return {match[2]: match[3] for match in ordered}


def local_paths(settings: dict[str, str]) -> list[Path]:
    """What the settings name on this machine."""
    words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    paths = {Path(word) for word in words if word.startswith("/")}
    # A simple index refers to its files by relative links.
    paths |= {path.parent for path in paths if path.name == "simple"}
    return sorted(path for path in paths if path.exists())


def build(scratch: Path) -> None:
    """Build both images and have a Redis; unchanged layers come from the cache."""
    settings = pip_settings()
    pip_conf = scratch / "pip.conf"
    pip_conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    flags = ["--secret", f"id=pip,src={pip_conf}", "--network", "host"]
    if is_podman():
        flags += ["--layers", *(word for path in local_paths(settings) for word in ("-v", f"{path}:{path}:ro"))]
    for target in TARGETS:
        tag = f"docker.io/library/tandem-{target}:latest"
        command = [engine(), "build", *flags, "-f", "deploy/Dockerfile", "--target", target, "-t", tag, "."]
        run("nice", "-n", "10", *command, timeout_s=3600)
    if not present(REDIS) and subprocess.run([engine(), "pull", "-q", REDIS], check=False).returncode != 0:
        run(
            engine(),
            "build",
            "--network",
            "host",
            "-t",
            REDIS,
            "-f",
            "tests/containers/redis.Dockerfile",
            "deploy",
            timeout_s=3600,
        )


def present(tag: str) -> bool:
    """Whether the image is on this machine."""
    return run(engine(), "images", "-q", tag, check=False).strip() != ""


def sizes() -> dict[str, float]:
    """MB of each image."""
    return {
        target: int(run(engine(), "image", "inspect", "--format", "{{.Size}}", f"docker.io/library/tandem-{target}"))
        / 1e6
        for target in TARGETS
    }


def in_image(target: str, *command: str) -> tuple[int, str]:
    """Exit status and output of a command in a fresh container."""
    done = subprocess.run(
        [engine(), "run", "--rm", "--network", "none", f"docker.io/library/tandem-{target}", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout.strip()
