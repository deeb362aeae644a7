"""The `tandem` command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

# Name of each command's module; a module is imported to declare its flags, and imports heavy things only when it runs.
COMMANDS = ("up", "prepare", "generate", "chat", "batch", "models", "status", "drain", "bench", "distill")

_EPILOG = """\
examples:
  tandem up                                        start a cluster on this machine with the default model
  tandem generate --prompt "Once upon a time"      one completion
  tandem chat                                      talk to the model
  tandem status                                    workers, rows, blocks and tokens per second, live
  tandem bench --concurrency 32 --requests 256     load, and what it took

`tandem COMMAND --help` explains each. Services also start alone: python -m gateway|scheduler|worker|draft_worker --help
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serve large language models from a cluster of gRPC services, and use it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"cli.{name}").add_parser(commands)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-serving")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 (one line on stderr), 2 for wrong flags, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output (head, say) has enough; don't complain again when the interpreter closes it.
        sys.stdout = None
        return 0
    except Exception as error:
        from cli.failures import explain

        line = explain(error)
        if line is None:
            raise
        print(f"tandem: {line}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
