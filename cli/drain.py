"""`tandem drain`: take a process, or everything, out of service gently."""

from __future__ import annotations

import argparse

from cli.arguments import Subparsers, add_command, add_scheduler

_EXAMPLES = """\
examples:
  tandem drain worker-1          it gets nothing new, its sequences move or finish, then it ends
  tandem drain draft-1           workers decode without it, and it ends
  tandem drain gateway-5f3a09c1  it refuses new requests and ends with its last one (`tandem status` shows names)
  tandem drain scheduler         the one at --scheduler hands over to a standby and ends
  tandem drain                   the whole cell: running requests finish, new ones are refused
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "drain", run, "stop new work on a process or the whole cell", _EXAMPLES)
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="a worker, draft worker or gateway, or `scheduler` (default: the whole cell)",
    )
    add_scheduler(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from cli import admin

    print(f"draining {admin.drain(args.scheduler, args.name)}")
    return 0
