"""`tandem chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from cli.arguments import Subparsers, add_command, add_sampling, add_target, sampling_options

if TYPE_CHECKING:
    from rich.console import Console

    from tandem_client import Message, SyncTandemClient

_EXAMPLES = """\
examples:
  tandem chat
  tandem chat --system "You are a poet." --temperature 0.7 --max-tokens 200

In the conversation:
  /reset    forget what was said           /exit, Ctrl-D    leave
  Ctrl-C    stop the answer, keep talking
"""
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
CHAT_TEMPERATURE = 0.3


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "chat", run, "talk to the model", _EXAMPLES)
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start")
    add_sampling(parser)
    # Talk at the API's default of 1 rambles with small models.
    parser.set_defaults(temperature=CHAT_TEMPERATURE)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from rich.console import Console

    from cli import session

    with session.sync_client(args) as client:
        Conversation(client, Console(highlight=False), args).talk()
    return 0


class Conversation:
    """What was said so far, and the loop that adds to it."""

    def __init__(self, client: SyncTandemClient, console: Console, args: argparse.Namespace) -> None:
        self._client = client
        self._console = console
        self._args = args
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Back to the start."""
        from tandem_client import Message

        self.messages = [Message("system", self._args.system)] if self._args.system is not None else []

    def talk(self) -> None:
        """Read lines and answer them until the end."""
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
            self._console.print(f"[dim]{_HELP}[/dim]")
        while True:
            try:
                line = input("› " if is_interactive else "").strip()
            except EOFError:
                if is_interactive:
                    self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.reset()
                self._console.print("[dim]forgotten[/dim]")
            elif line.startswith("/"):
                self._console.print(f"[dim]{_HELP}[/dim]")
            elif line:
                self.answer(line)

    def answer(self, line: str) -> None:
        """Stream the answer to one line; what the user stops or an error cuts off stays as far as it came."""
        from tandem_client import Message, TandemError

        self.messages.append(Message("user", line))
        parts: list[str] = []
        chunks = self._client.stream(self.messages, model=self._args.model, **sampling_options(self._args))
        try:
            for chunk in chunks:
                parts.append(chunk.text)
                self._console.out(chunk.text, end="", highlight=False)
            self._console.out("")
        except KeyboardInterrupt:
            self._console.print(" [dim]… stopped[/dim]")
        except TandemError as error:
            self._console.print(f"\n[red]{error.code.name}[/red] ", end="")
            self._console.print(error.message, markup=False)
        finally:
            chunks.close()
        text = "".join(parts)
        if text:
            self.messages.append(Message("assistant", text))
        else:
            self.messages.pop()
