"""`tandem distill`: a small draft model out of the target's own answers."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import model_source
from cli.arguments import Subparsers, add_command, not_negative, positive

if TYPE_CHECKING:
    from rich.progress import Progress

    from distill.evaluation import Acceptance
    from distill.training import Position

_EXAMPLES = """\
examples:
  tandem distill --out ./my-draft                                      for the default model
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
    add("--work", type=Path, metavar="FOLDER", help="answers and checkpoints (default: OUT.work)")
    add("--layers", type=positive(int), default=2, metavar="N", help="of the draft; 2 … 4 make sense (default 2)")
    add("--head-tokens", type=positive(int), default=12288, metavar="N", help="tokens it can guess (default 12288)")
    add("--answer-tokens", type=positive(int), default=1_500_000, metavar="N", help="to learn from (default 1500000)")
    add("--max-answer-tokens", type=positive(int), default=220, metavar="N", help="of one answer (default 220)")
    add("--held-out-prompts", type=positive(int), default=120, metavar="N", help="to measure on (default 120)")
    add("--steps", type=positive(int), default=4600, metavar="N", help="of training (default 4600)")
    add("--batch-tokens", type=positive(int), default=1024, metavar="N", help="of one step (default 1024)")
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
    part, slash, parts = text.partition("/")
    if not slash or not part.isdigit() or not parts.isdigit() or not 0 <= int(part) < int(parts):
        raise argparse.ArgumentTypeError(f"{text!r} isn't I/N with 0 ≤ I < N, such as 0/2")
    return int(part), int(parts)


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
        folder = model_source.resolve(args.target, "transformers", Path(scratch))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    console = Console(highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        return _distill(args, folder, _Show(bars, args.steps))


def _distill(args: argparse.Namespace, folder: Path, show: _Show) -> int:
    from cli.failures import UsageError
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
        found = distill(plan, show.stage, show)
    except (ModelError, ValueError) as error:
        raise UsageError(str(error)) from error
    if found:
        show.note(f"the draft is in {args.out}: tandem up --model {folder} --draft {args.out}")
    return 0


class _Show:
    """Bars on a terminal, and a line for each evaluation anywhere."""

    def __init__(self, bars: Progress, num_steps: int) -> None:
        self._bars = bars
        self._num_steps = num_steps
        self._tasks: dict[str, Any] = {}

    def stage(self, what: str, share: float | None) -> None:
        """See `engine.progress`."""
        self._bars.update(self._task(what), total=None if share is None else 1.0, completed=share or 0.0)

    def step(self, position: Position, loss: float, agreeing: float) -> None:
        """See `distill.training.Report`."""
        now = f"epoch {position.epoch + 1}, loss {loss:.2f}, agreeing {agreeing:.0%}"
        self._bars.update(self._task("training"), total=self._num_steps, completed=position.step, now=now)

    def evaluated(self, position: Position, found: list[Acceptance]) -> None:
        """See `distill.training.Report`."""
        for one in found:
            alone = ", ".join(f"{k}: {value:.2f}" for k, value in one.alone.items())
            both = ", ".join(f"{k}: {value:.2f}" for k, value in one.with_lookup.items())
            self.note(
                f"step {position.step}, held out, T = {one.temperature:g}: {one.top_1:.1%} right; accepted per step by "
                f"draft length {alone}; behind a lookup {both}"
            )

    def note(self, text: str) -> None:
        """See `distill.training.Report`."""
        self._bars.console.print(text, markup=False)

    def _task(self, what: str) -> Any:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None, now="")
        return self._tasks[what]
