"""`tandem models`: what is served."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

from cli.arguments import Subparsers, add_command, add_target

_EXAMPLES = """\
examples:
  tandem models
  tandem models --target 127.0.0.1:50051 --json
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "models", run, "list the served models", _EXAMPLES)
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="one JSON array")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    return asyncio.run(_show(args))


async def _show(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    from cli import session

    async with session.client(args) as client:
        models = (await client.model(args.model),) if args.model else await client.models()
    if args.json:
        print(json.dumps([dataclasses.asdict(model) for model in models], ensure_ascii=False))
        return 0
    table = Table(
        Column("model", overflow="fold"),
        *("workers", "context", "vocabulary", "chat"),
        Column("fingerprints", overflow="fold"),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for model in models:
        table.add_row(
            model.name,
            str(model.workers),
            str(model.max_model_len),
            str(model.vocab_size),
            "yes" if model.chat else "no",
            "\n".join(model.fingerprints) or "-",
        )
    Console().print(table)
    return 0
