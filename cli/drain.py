"""`tandem drain`: take a worker, or everything, out of service gently."""

from __future__ import annotations

import argparse

from cli.arguments import DEFAULT_SCHEDULER, Subparsers, add_command

_EXAMPLES = """\
examples:
  tandem drain worker-1      its sequences finish or move; it gets nothing new
  tandem drain               the whole cell: running requests finish, new ones are refused
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "drain", run, "stop new work on a worker or the whole cell", _EXAMPLES)
    parser.add_argument(
        "worker_id", nargs="?", default="", metavar="WORKER", help="the worker (default: the whole cell)"
    )
    parser.add_argument("--scheduler", default=DEFAULT_SCHEDULER, metavar="HOST:PORT", help="default %(default)s")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from cli import admin

    admin.drain(args.scheduler, args.worker_id)
    print(f"draining {args.worker_id or 'the whole cell'}")
    return 0
