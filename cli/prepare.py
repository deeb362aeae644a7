"""`tandem prepare`: have the models ready on disk and write the configuration that all services of a cluster share.

What `tandem up` does before it starts its processes, for those who start them otherwise, in containers for instance. It
runs once; whoever sees its file finds everything that the file names.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from cli import model_source
from cli.arguments import Subparsers, add_command, served_name

_EXAMPLES = """\
examples:
  tandem prepare --to cluster.toml                  the default model
  tandem prepare --model ./my-llama --draft ./small --to cluster.toml
  python -m worker --config cluster.toml            and so the gateway and the draft worker
"""

Table = dict[str, str | list[str]]


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "prepare", run, "get models ready and write the services' configuration", _EXAMPLES)
    add = parser.add_argument
    add("--model", default=model_source.DEFAULT, help="folder, .gguf file, hub id, or `default` (the default)")
    name = "the name that clients use (default: the model's own)"
    add("--served-model-name", type=served_name, metavar="NAME", help=name)
    add("--draft", default="auto", metavar="D", help="who drafts, as of `tandem up` (default auto)")
    add("--engine", choices=("transformers", "fake"), default="transformers", help="fake: no weights, for tests")
    add("--to", type=Path, required=True, metavar="FILE", help="the TOML file to write")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    target: Path = args.to
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = model_source.resolve(args.model, args.engine, target.parent)
    draft = model_source.resolve_draft(args.draft, args.model, args.engine, target.parent)
    name = args.served_model_name or model_source.served_name(args.model, folder)
    write_atomically(target, render(tables(str(folder), name, draft, args.engine)))
    print(f"{name} is ready in {folder}; the services' configuration is in {target}")
    return 0


def tables(folder: str, name: str, draft: str, engine: str) -> dict[str, Table]:
    """Settings by service. Without drafts the draft worker's are valid all the same: it may run, and nobody calls.

    Workers are told of the draft as well, for those that are to guess for themselves (`--draft own`).
    """
    draft_model = "ngram" if draft == "none" else draft
    return {
        "gateway": {"model": [f"{name}={folder}"]},
        "worker": {
            "model": folder,
            "served_model_name": name,
            "engine": engine,
            "draft": "off" if draft == "none" else "on",
            "draft_model": draft_model,
        },
        "draft_worker": {
            "target": name,
            "target_model": folder,
            "draft": draft_model,
        },
    }


def render(found: dict[str, Table]) -> str:
    """As TOML; its strings and lists of strings are JSON's, as long as other signs than ASCII stay as they are."""
    lines = []
    for service, settings in found.items():
        lines.append(f"[{service}]")
        lines += [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in settings.items()]
    return "\n".join(lines) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, whole."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8", delete=False
    ) as new:
        new.write(text)
    Path(new.name).chmod(0o644)
    os.replace(new.name, path)
