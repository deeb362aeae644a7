"""Turns what a user calls a model into a folder that every service can read.

    default                    the default model, fetched and converted once     a process of the engine's
    a .gguf file, a hub id     converted or downloaded once                      a process of the engine's
    a folder with config.json  as it is
    anything, --engine fake    as it is, or a folder written here

The engine's own process does the work that needs torch; it draws its progress bars on our terminal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli.fake_model import write_fake_model
from engine.model_cache import cache_folder

DEFAULT = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
"""as `engine.default_model` calls it, which can't be imported here: it brings torch"""

DRAFTS = ("auto", "ngram", "none", "fake")
"""what may be said instead of a draft model's folder"""
_SHIPPED_DRAFT = Path(__file__).resolve().parent.parent / "drafts" / "smollm2-135m-instruct"
"""distilled for the default model"""


class ModelUnavailable(Exception):
    """There is no such model, or it can't be had; the message is fit for a user."""


def resolve(model: str, engine: str, scratch: Path) -> Path:
    """The model's folder. `scratch` is where a fake model may be written. Raises ModelUnavailable."""
    folder = Path(model).expanduser()
    if engine == "fake" and model == DEFAULT:
        return write_fake_model(scratch / "fake")
    if (folder / "config.json").is_file():
        return folder.resolve()
    if engine == "fake":
        raise ModelUnavailable(f"{model} is no model folder (it has no config.json); without --model one is made")
    if model == DEFAULT:
        cached = cache_folder() / "models" / DEFAULT_NAME
        return cached if cached.is_dir() else _ask(model, "the default model")
    return _ask(model, f"the model {model}")


def resolve_draft(draft: str, model: str, engine: str, scratch: Path) -> str:
    """The draft model's folder, or one of DRAFTS but auto, which is the shipped draft for the model it was made for."""
    if draft == "auto":
        shipped = model == DEFAULT and engine != "fake" and (_SHIPPED_DRAFT / "config.json").is_file()
        return str(_SHIPPED_DRAFT) if shipped else "ngram"
    return draft if draft in DRAFTS else str(resolve(draft, "transformers", scratch))


def served_name(model: str, folder: Path) -> str:
    """The name that clients use where none is given: that of the file, folder or hub model."""
    if model == DEFAULT:
        return folder.name
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model.rstrip("/").rpartition("/")[2]


def _ask(model: str, what: str) -> Path:
    """The folder that a process prints as its last line; what it says on stderr goes straight to the terminal."""
    command = [sys.executable, "-P", "-m", "cli.resolve_model", model]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    folder = next((line.strip() for line in reversed(finished.stdout.split("\n")) if line.strip()), "")
    if finished.returncode != 0:
        raise ModelUnavailable(f"can't get {what} (see above)")
    if not (Path(folder) / "config.json").is_file():
        raise ModelUnavailable(f"can't get {what}: {folder or 'nothing'} is no model folder (it has no config.json)")
    return Path(folder)
