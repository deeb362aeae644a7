"""`tandem status`: what the cell does, live."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cli.arguments import Subparsers, add_command, add_scheduler, not_negative

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.admin import CellStatus, WorkerStatus

_EXAMPLES = """\
examples:
  tandem status                                a table that stays current, until Ctrl-C; into a pipe or file, one look
  tandem status --once                         one look
  tandem status --json                         one look, for programs
  tandem status --scheduler 127.0.0.1:50052
"""

MAX_SIZES_SHOWN = 8


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "status", run, "show workers, rows, blocks, tokens per second", _EXAMPLES)
    add_scheduler(parser)
    parser.add_argument(
        "--interval", type=not_negative(float), default=1.0, metavar="S", help="seconds between looks (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="show the table once")
    parser.add_argument("--json", action="store_true", help="one JSON object, rates over the last interval included")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from rich.console import Console

    from cli import admin

    console = Console()
    before = admin.status(args.scheduler)
    if args.json or args.once or not console.is_terminal:  # a live table would show nothing there before its end
        time.sleep(args.interval)
        now = admin.status(args.scheduler) if args.interval else before
        if args.json:
            print(json.dumps(status_json(before, now), ensure_ascii=False))
        else:
            console.print(table(before, now))
        return 0
    _watch(args.scheduler, max(args.interval, 0.1), before)
    return 0


def _watch(scheduler: str, interval_s: float, before: CellStatus) -> None:
    from rich.live import Live
    from rich.text import Text

    from cli import admin
    from cluster.errors import TandemError

    with Live(table(before, before), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = admin.status(scheduler)
            except TandemError as error:
                live.update(Text(f"the scheduler at {scheduler} doesn't answer: {error.message}"), refresh=True)
                continue
            live.update(table(before, now), refresh=True)
            before = now


def status_json(before: CellStatus, now: CellStatus) -> dict[str, Any]:
    """The later of two looks, with the rates between them."""
    return {**dataclasses.asdict(now), "tokens_per_s": tokens_per_s(before, now), "acceptance": acceptance(before, now)}


def tokens_per_s(before: CellStatus, now: CellStatus) -> float | None:
    """Output tokens per second between two looks; None if that can't be told (one look, a restarted scheduler)."""
    return _rate(before, now, now.counters.generated_tokens - before.counters.generated_tokens)


def acceptance(before: CellStatus, now: CellStatus) -> float | None:
    """Accepted share of the drafted tokens between two looks, or since the start if none were; None without drafts."""
    drafted = now.counters.drafted_tokens - before.counters.drafted_tokens
    accepted = now.counters.accepted_tokens - before.counters.accepted_tokens
    if drafted <= 0 or before.term != now.term:
        drafted, accepted = now.counters.drafted_tokens, now.counters.accepted_tokens
    return accepted / drafted if drafted else None


def accepted_by_position(before: WorkerStatus | None, now: WorkerStatus) -> list[float | None]:
    """Of the tokens verified at each position, those before them right, the share that was right.

    Between two looks, or since the worker attached where none was verified in between; None: none at this position.
    """
    drafted, accepted = now.position_drafted_tokens, now.position_accepted_tokens
    if before is not None and before.position_drafted_tokens != drafted:
        drafted = _less(drafted, before.position_drafted_tokens)
        accepted = _less(accepted, before.position_accepted_tokens)
    return [right / tried if tried else None for right, tried in zip(accepted, drafted, strict=True)]


def _less(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(count - old for count, old in itertools.zip_longest(now, before, fillvalue=0))


def _steps(steps: Sequence[tuple[float, float]]) -> str:
    """As many sizes as a line has room for, the first and the last among them."""
    last = len(steps) - 1
    chosen = sorted({round(index * last / (MAX_SIZES_SHOWN - 1)) for index in range(MAX_SIZES_SHOWN)})
    return "  ".join(f"{steps[index][0]:.0f}: {1000 * steps[index][1]:.1f}" for index in chosen)


def _rate(before: CellStatus, now: CellStatus, count: int) -> float | None:
    seconds = now.uptime_s - before.uptime_s
    if before.term != now.term or seconds <= 0 or count < 0:
        return None
    return count / seconds


def table(before: CellStatus, now: CellStatus) -> RenderableType:
    """The cell for people."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    earlier = {(worker.worker_id, worker.epoch): worker for worker in before.workers}
    # On a narrow terminal long names take more lines; nothing is cut off, least of all what `drain` needs.
    workers = Table(
        Column("worker", overflow="fold", min_width=8),
        Column("model", overflow="fold", min_width=8),
        *(Column(name, no_wrap=True) for name in ("state", "rows", "blocks\nused", "cached", "free", "tok/s")),
        *(Column(name, no_wrap=True) for name in ("step\nms", "draft\nk", "tok/\nrow", "gain")),
        box=None,
        header_style="bold",
        pad_edge=False,
        collapse_padding=True,
    )
    for worker in now.workers:
        old = earlier.get((worker.worker_id, worker.epoch))
        rate = _rate(before, now, worker.generated_tokens - old.generated_tokens) if old else None
        workers.add_row(
            worker.worker_id,
            worker.model,
            Text(worker.state, style="green" if worker.state == "serving" else "yellow"),
            f"{worker.running}/{worker.max_sequences}",
            f"{worker.referenced_blocks}/{worker.total_blocks}",
            str(worker.cached_blocks),
            str(worker.free_blocks),
            _number(rate),
            f"{worker.last_step_s * 1000:.1f}",
            *_drafting(old, worker),
        )
    parts: list[RenderableType] = [Text(_headline(before, now)), workers]
    if not now.leading:
        parts.append(Text(f"a standby of cell {now.cell}; {now.leader or 'nobody'} leads", style="yellow"))
    elif not now.workers:
        parts.append(Text("no worker is attached", style="yellow"))
    for worker in now.workers:
        shares = accepted_by_position(earlier.get((worker.worker_id, worker.epoch)), worker)
        if shares:
            listed = " ".join("-" if share is None else f"{share:.0%}" for share in shares)
            parts.append(Text(f"{worker.worker_id} accepts, by position: {listed}"))
            parts += [
                Text(f"{worker.worker_id} takes ms, by tokens of a step: {_steps(steps)}{kind}")
                for steps, kind in ((worker.plain_steps, ""), (worker.drafting_steps, " (with drafts)"))
                if steps
            ]
    for gateway in now.gateway_sessions:
        live = f"{gateway.gateway_id}: {gateway.live_requests} live"
        parts.append(Text(f"{live}, draining", style="yellow") if gateway.draining else Text(live))
    for draft in now.draft_workers:
        parts.append(Text(f"{draft.worker_id} drafts for {draft.model} with {draft.proposer} at {draft.address}"))
    return Group(*parts)


def _drafting(old: WorkerStatus | None, worker: WorkerStatus) -> tuple[str, str, str]:
    """Mean draft budget, tokens per decode row, and expected gain; between two looks, else since it attached."""
    if not worker.drafting:
        return "off", "-", "-"
    if old is None or old.decode_rows == worker.decode_rows:
        rows, budget, accepted = worker.decode_rows, worker.draft_budget_tokens, worker.accepted_tokens
    else:
        rows = worker.decode_rows - old.decode_rows
        budget = worker.draft_budget_tokens - old.draft_budget_tokens
        accepted = worker.accepted_tokens - old.accepted_tokens
    rows = max(1, rows)
    return f"{budget / rows:.1f}", f"{1 + accepted / rows:.2f}", f"{worker.speculation_gain:.2f}"


def _headline(before: CellStatus, now: CellStatus) -> str:
    share = acceptance(before, now)
    counters = now.counters
    return (
        f"running {now.running}  waiting {now.waiting}  {_number(tokens_per_s(before, now))} tok/s  "
        f"acceptance {'-' if share is None else f'{share:.0%}'}  gateways {len(now.gateways)}  "
        f"finished {counters.requests_finished}  cancelled {counters.requests_cancelled}  "
        f"failed {counters.requests_failed}  resumed {counters.resumptions}  preempted {counters.preemptions}  "
        f"cell {now.cell}  led by {now.leader or '-'}  up {now.uptime_s:.0f} s" + ("  DRAINING" if now.draining else "")
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
