"""Flags that several commands share, and the types of flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_SCHEDULER = "127.0.0.1:50052"

Run = Callable[[argparse.Namespace], int]
Subparsers = Any  # argparse's own class for it is private


def add_command(commands: Subparsers, name: str, run: Run, summary: str, text: str) -> argparse.ArgumentParser:
    """A sub-command with its help; `text` is shown as it is, below the flags."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def add_target(parser: argparse.ArgumentParser) -> None:
    """--target, --model, --timeout-s."""
    parser.add_argument(
        "--target",
        action="append",
        metavar="HOST:PORT",
        help="a gateway; given several times, the others take over when one fails "
        f"(default $TANDEM_TARGET or {DEFAULT_TARGET})",
    )
    parser.add_argument("--model", default="", help="served name (default: the only one)")
    parser.add_argument("--timeout-s", type=positive(float), metavar="S", help="give up after so many seconds")


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """--scheduler."""
    parser.add_argument(
        "--scheduler",
        default=os.environ.get("TANDEM_SCHEDULER", DEFAULT_SCHEDULER),
        metavar="HOST:PORT",
        help=f"default $TANDEM_SCHEDULER or {DEFAULT_SCHEDULER}",
    )


def served_name(text: str) -> str:
    """A type of flags: a name that gateways can be given as NAME=FOLDER."""
    if not text or "=" in text:
        raise argparse.ArgumentTypeError(f"a served name is not empty and has no '=', unlike {text!r}")
    return text


def targets(args: argparse.Namespace) -> list[str]:
    """The gateways of a command line."""
    given: list[str] | None = args.target
    return given or os.environ.get("TANDEM_TARGET", DEFAULT_TARGET).split(",")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Every parameter of a request that changes its tokens, under the proto's names."""
    group = parser.add_argument_group("how to choose tokens (unset: the server's defaults)")
    group.add_argument("--max-tokens", type=positive(int), metavar="N", help="most tokens of the answer")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no stop before so many tokens")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens P times as likely as the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: less repetition")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="off each token that has appeared")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="off a token each time it appears")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", dest="stop_token_ids")
    group.add_argument("--bad-word", action="append", default=[], metavar="WORD", dest="bad_words", help="repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-sequence tokens")
    group.add_argument("--include-stop", action="store_true", default=None, help="leave the stop in the text")
    add_speculation(group)


def add_speculation(group: Any) -> None:
    """Who drafts, and how much."""
    group.add_argument(
        "--speculation", choices=SPECULATION, help="who drafts (default: the cluster's choice); never changes a token"
    )
    group.add_argument(
        "--no-speculation", action="store_const", const="off", dest="speculation", help="the same as --speculation off"
    )
    group.add_argument("--max-draft-tokens", type=not_negative(int), metavar="K", help="most drafted tokens per step")


SPECULATION = ("auto", "off", "ngram", "model", "combined")
SAMPLING_OPTIONS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "bad_words", "ignore_eos", "include_stop", "speculation", "max_draft_tokens"),
)


def sampling_options(args: argparse.Namespace) -> Any:
    """The options of a request, from the flags of `add_sampling`."""
    return {name: getattr(args, name) for name in SAMPLING_OPTIONS}


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """The type of a flag above 0."""
    return _at_least(kind, lambda value: value > 0, "must be above 0")


def not_negative(kind: type[Number]) -> Callable[[str], Number]:
    """The type of a flag of 0 or more."""
    return _at_least(kind, lambda value: value >= 0, "must not be negative")


def port(text: str) -> int:
    """The type of a port flag; 0 is any free one."""
    return _bounded(text, 0)


def metrics_port(text: str) -> int:
    """The type of a metrics port flag; 0 is any free one, -1 none."""
    return _bounded(text, -1)


def _bounded(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no port") from None
    if not low <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from {low} to 65535")
    return value


def _at_least(kind: type[Number], holds: Callable[[Number], bool], message: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(message)
        return value

    parse.__name__ = kind.__name__  # argparse names it when the text is no number at all
    return parse
