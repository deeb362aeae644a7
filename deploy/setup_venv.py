"""Make or refresh `.venv`: what `make setup` runs, with any Python from 3.11 on.

Nothing is done twice: a stamp in `.venv` holds what it was made from (place, Python, pyproject.toml, protos, kernels).
A changed .proto only regenerates the stubs, a changed kernel is only compiled. pip's own settings (index, proxy,
constraints) are the user's and are left alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
KERNELS = ROOT / "engine" / "kernels"
STAMP = VENV / "tandem-setup.json"
EXTRAS = "engine,dev"
MIN_FREE_GIB = 4.0
SECONDS_BETWEEN_LINES = 15.0
"""of progress, where there is no terminal"""


class SetupError(Exception):
    """Set-up can't go on; the message says what to do."""


def hash_of(paths: list[Path]) -> str:
    """One hash of the names and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def protos() -> list[Path]:
    return list((ROOT / "protos").rglob("*.proto"))


def stubs_exist() -> bool:
    own = [path for path in protos() if "third_party" not in path.parts]
    return all(path.with_name(f"{path.stem}_pb2.py").exists() for path in own)


def wanted() -> dict[str, str]:
    """What the environment should have been made from."""
    return {
        "place": str(ROOT),
        "python": sys.version,
        "packages": hash_of([ROOT / "pyproject.toml", ROOT / "hatch_build.py", Path(__file__).resolve()]),
        "protos": hash_of(protos()),
        "kernels": hash_of(
            [*(ROOT / "engine" / "kernels" / "csrc").glob("*"), ROOT / "engine" / "kernels" / "build.py"]
        ),
    }


def made_from() -> dict[str, str]:
    """What the environment was made from; empty where there is none or it was not finished."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and (VENV / "bin" / "python").exists() else {}


def write_stamp(stamp: dict[str, str]) -> None:
    temporary = STAMP.with_suffix(".new")
    temporary.write_text(json.dumps(stamp, indent=1))
    os.replace(temporary, STAMP)


def base_python() -> str:
    """The Python that makes `.venv`: never the one inside it, which is deleted first (it runs this where `.venv` is
    activated). Raises SetupError, with nothing deleted, where there is no other.
    """
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    python = getattr(sys, "_base_executable", sys.executable) if inside else sys.executable
    if inside and (not Path(python).exists() or VENV.resolve() in Path(python).absolute().parents):
        raise SetupError("this Python is .venv's own, which must be made anew; `deactivate` first")
    return str(python)


def make_venv() -> None:
    """A fresh `.venv`; raises SetupError where this Python can't make one."""
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"this Python ({sys.executable}) can't make virtual environments.\n"
            f"On Debian or Ubuntu:  sudo apt install {package}   (or python3-venv)"
        )
    say("making .venv")
    python = base_python()
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"python -m venv failed:\n{done.stdout}{done.stderr}")


def install() -> None:
    """pip install the project, editable, and show what it does."""
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < MIN_FREE_GIB:
        raise SetupError(f"{free_gib:.1f} GiB are free on this disk; the packages need about {MIN_FREE_GIB:.0f}")
    say("installing packages (the first time takes some minutes)")
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-input", *progress_flags()]
    command += ["--disable-pip-version-check", "-e", f".[{EXTRAS}]"]
    log: list[str] = []
    progress = PipProgress(sys.stderr)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            log.append(line.rstrip())
            progress.see(line)
    progress.end()
    if pip.returncode != 0:
        raise SetupError(explain(log))


def progress_flags() -> list[str]:
    """pip's machine-readable progress, where this pip has it (24.1 and later)."""
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", "--version"], capture_output=True, text=True, check=False
    )
    found = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    has_raw = found is not None and (int(found[1]), int(found[2])) >= (24, 1)
    return ["--progress-bar", "raw" if has_raw else "off"]


def explain(log: list[str]) -> str:
    """What pip's failure means, with its last words."""
    text = "\n".join(log)
    advice = []
    if re.search(r"No space left on device", text):
        advice.append("The disk is full.")
    if re.search(r"NewConnectionError|Name or service not known|Temporary failure in name resolution", text):
        advice.append("The package index can't be reached: check the network, or pip's own settings (pip config list).")
    if shutil.which("gcc") is None and re.search(r"(gcc|cc).*(not found|failed)|unable to execute", text):
        advice.append("A package must be compiled here and there is no compiler:  sudo apt install gcc python3-dev")
    if "(from versions: none)" in text:
        advice.append("The package index offers nothing: check the network, or pip's own settings (pip config list).")
    elif "No matching distribution found" in text:
        advice.append(f"A pinned package has no build for Python {sys.version.split()[0]} on this machine.")
    last = [line for line in log if line and not line.startswith("Progress ")][-15:]
    return "\n".join(["pip install failed. Its last lines:", *last, *advice])


def generate_stubs() -> None:
    say("generating the stubs")
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "hatch_build.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SetupError(f"generating the stubs failed:\n{done.stdout}{done.stderr}")


def build_kernels() -> None:
    """Compile the C++ kernels now rather than in the first worker; without a compiler workers use plain torch."""
    say("compiling the kernels (the first time takes a minute)")
    done = subprocess.run([str(VENV / "bin" / "python"), "-m", "engine.kernels.build"], cwd=ROOT, check=False)
    if done.returncode != 0:
        say("the kernels are left out; everything works without them, slower")


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


class PipProgress:
    """What pip does now: one moving line on a terminal; elsewhere, in a log say, a line now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._stream = stream
        self._moving = stream.isatty()
        self._clock = clock
        self._latest = ""
        self._told_s = clock()

    def see(self, line: str) -> None:
        """A line of pip's output."""
        progress = re.match(r"Progress (\d+) of (\d+)", line)
        if progress and int(progress[2]):
            self._show(*(int(number) for number in progress.groups()))
        elif found := next(interesting(line), None):
            self._latest = found
            self._show()

    def _show(self, num_bytes: int = 0, total: int = 0) -> None:
        share = min(1.0, num_bytes / total) if total else 0.0
        if self._moving:
            bar = f"[{'#' * round(20 * share):<20}] {total / 2**20:7.1f} MiB  " if total else ""
            text = f"{bar}{self._latest}"[: shutil.get_terminal_size().columns - 3]
            print(f"\r\033[K  {text}", end="", file=self._stream, flush=True)
        elif self._clock() - self._told_s >= SECONDS_BETWEEN_LINES:
            self._told_s = self._clock()
            part = f", {share:.0%} of {total / 2**20:.0f} MiB" if total else ""
            print(f"setup: {self._latest}{part}", file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the terminal's line empty."""
        if self._moving:
            print("\r\033[K", end="", file=self._stream, flush=True)


def interesting(line: str) -> Iterator[str]:
    """The part of a line of pip's that people want to see."""
    if line.startswith("Installing collected packages"):
        yield "unpacking what was downloaded"
        return
    found = re.match(r"\s*(Collecting|Downloading|Using cached)\s+(\S+)", line)
    if found:
        yield f"{found[1].lower()} {found[2].rsplit('/', 1)[-1]}"


def main() -> int:
    target, present = wanted(), made_from()
    if present == target and stubs_exist():
        return 0
    try:
        if any(present.get(key) != target[key] for key in ("place", "python")):
            make_venv()
            # Where installing fails, the next run goes on from here.
            present = {key: target[key] for key in ("place", "python")}
            write_stamp(present)
        if present.get("packages") != target["packages"]:
            write_stamp({key: target[key] for key in ("place", "python")})
            install()
        elif present.get("protos") != target["protos"] or not stubs_exist():
            generate_stubs()
    except SetupError as error:
        say(str(error))
        return 1
    if any(present.get(key) != target[key] for key in ("packages", "kernels")):
        build_kernels()
    write_stamp(target)
    say("ready: .venv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
