"""`tandem distill`: a small draft model out of the target's own answers."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from cli import model_source
from cli.arguments import Subparsers, add_command, not_negative, positive
from cli.distill_report import Shown

_EXAMPLES = """\
examples:
  tandem distill --out ./my-draft                                      for the default model
  tandem distill --out ./my-draft --answer-tokens 6000 --held-out-prompts 4 --max-answer-tokens 48 --steps 40
                                                                       the same in a minute, to see how it goes
  tandem distill --target ./my-llama --out ./my-draft --device cuda    for any other that the decoder runs
  tandem up --model ./my-llama --draft ./my-draft                      serve with it

Killed at any moment, the same command goes on where it was: answers and checkpoints are kept in --work. The draft is of
use with its target only, and never changes a token. docs/distill.md tells how long it takes and what to expect.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "distill", run, "make a small draft model for a target", _EXAMPLES)
    add = parser.add_argument
    add("--target", default=model_source.DEFAULT, help="folder, .gguf file, hub id, or `default` (the default)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the draft goes; what --draft then takes")
    add("--start-from", type=Path, metavar="FOLDER", help="go on with this draft instead of the target's first layers")
    add("--work", type=Path, metavar="FOLDER", help="answers and checkpoints (default: OUT.work)")
    add("--layers", type=positive(int), default=2, metavar="N", help="of the draft; 2 … 4 make sense (default 2)")
    add(
        "--head-tokens",
        type=positive(int),
        default=12288,
        metavar="N",
        help="tokens it can guess (default 12288; at most those of --start-from)",
    )
    add("--answer-tokens", type=positive(int), default=1_500_000, metavar="N", help="to learn from (default 1500000)")
    add(
        "--shards",
        type=_shards,
        default=(0, 1),
        metavar="I/N",
        help="learn from shards I, I + N, … only (97/1: from 97 on), such as those that --start-from has not seen",
    )
    add("--max-answer-tokens", type=positive(int), default=220, metavar="N", help="of one answer (default 220)")
    add("--held-out-prompts", type=positive(int), default=120, metavar="N", help="to measure on (default 120)")
    add("--steps", type=positive(int), default=1500, metavar="N", help="of training (default 1500)")
    add("--batch-tokens", type=positive(int), default=3072, metavar="N", help="of one step (default 3072)")
    add("--learning-rate", type=positive(float), default=1.5e-3, metavar="X", help="its highest (default 0.0015)")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="conversations at a time (default 64)")
    add("--seed", type=not_negative(int), default=1, metavar="N", help="same seed, same prompts (default 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where all of it runs (default auto)")
    add("--threads", type=positive(int), metavar="N", help="CPU threads (default: one per core)")
    add(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="only generate, and only this of N parts: several processes or hosts fill one --work folder",
    )


def _part(text: str) -> tuple[int, int]:
    part, parts = _two_numbers(text)
    if part >= parts:
        raise argparse.ArgumentTypeError(f"{text!r} isn't I/N with 0 ≤ I < N, such as 0/2")
    return part, parts


def _shards(text: str) -> tuple[int, int]:
    first, stride = _two_numbers(text)
    if stride < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't I/N with 0 ≤ I and 1 ≤ N, such as 0/2 or 97/1")
    return first, stride


def _two_numbers(text: str) -> tuple[int, int]:
    """Of I/N; 0 and 0, which no caller takes, of anything else."""
    one, slash, other = text.partition("/")
    return (int(one), int(other)) if slash and one.isdigit() and other.isdigit() else (0, 0)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        try:
            folder = model_source.resolve(args.target, "transformers", Path(scratch))
        except model_source.ModelUnavailable as error:
            raise model_source.ModelUnavailable(f"--target: {error}") from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        return _distill(args, folder, Shown(console, None, args.steps))
    with Progress(*columns, console=console) as bars:
        return _distill(args, folder, Shown(console, bars, args.steps))


def _distill(args: argparse.Namespace, folder: Path, shown: Shown) -> int:
    from cli.failures import UsageError
    from distill.errors import Refused
    from distill.pipeline import Plan, distill
    from distill.training import Recipe
    from engine.errors import ModelError

    part, parts = args.part
    plan = Plan(
        target=folder,
        name=model_source.served_name(args.target, folder),
        out=args.out,
        work=args.work or args.out.with_name(f"{args.out.name}.work"),
        recipe=Recipe(
            layers=args.layers,
            head_tokens=args.head_tokens,
            steps=args.steps,
            batch_tokens=args.batch_tokens,
            learning_rate=args.learning_rate,
            seed=args.seed,
        ),
        start_from=args.start_from,
        shards=args.shards,
        answer_tokens=args.answer_tokens,
        held_out_prompts=args.held_out_prompts,
        max_answer_tokens=args.max_answer_tokens,
        batch_size=args.batch_size,
        device=args.device,
        threads=args.threads,
        part=part,
        parts=parts,
    )
    try:
        found = distill(plan, shown.stage, shown)
    except Refused as error:
        is_flag = error.setting in vars(args)
        name = f"--{error.setting.replace('_', '-')}" if is_flag else error.setting
        raise UsageError(f"{name}: {error.reason}") from error
    except ModelError as error:
        raise UsageError(f"--target: {error}") from error
    if found:
        shown.note(f"the draft is in {args.out}: tandem up --model {_as_given(args.target)} --draft {args.out}")
    return 0


def _as_given(target: str) -> str:
    """What `tandem up --model` takes."""
    return model_source.DEFAULT if target == model_source.DEFAULT else shlex.quote(target)
