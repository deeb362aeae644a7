"""`tandem bench`: load on a cluster, and what it took."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import Subparsers, add_command, add_speculation, add_target, not_negative, positive, targets

if TYPE_CHECKING:
    from rich.console import Console

    from cli.load import Record, Workload
    from cli.load_report import Distribution, Report
    from tandem_client import Model

_EXAMPLES = """\
examples:
  tandem bench --concurrency 32 --requests 256                     closed loop: 32 clients at a time
  tandem bench --concurrency 1,8,32 --output-tokens 128            one load after the other, and a table of medians
  tandem bench --input-tokens 1024 --output-tokens 1               how fast prompts are read
  tandem bench --rate 5 --requests 300                             open loop: 5 arrivals a second (Poisson)
  tandem bench --input-tokens 512 --output-tokens 128 --json out.json
  tandem bench --shared-prefix-tokens 256 --input-tokens 300       how much the prefix cache saves

Prompts are random token ids, different ones for each request, the same for the same --seed; answers have exactly
--output-tokens tokens. Times are as seen by the client. The load generator's own CPU time is measured and told apart.
With several concurrencies --json writes a list. The exit status is 1 if any request failed or came incomplete.
"""


_REQUESTS_PER_CLIENT = 8
# Between the seeds of two loads: further apart than any load has requests.
_SEED_STRIDE = 1_000_003


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "bench", run, "measure a cluster under load", _EXAMPLES)
    add_target(parser)
    add = parser.add_argument
    add(
        "--concurrency",
        type=_numbers,
        default=[8],
        metavar="N[,N…]",
        help="closed loop: clients at a time; several: one load after the other (default 8)",
    )
    add("--rate", type=positive(float), metavar="R", help="open loop: arrivals per second, instead of --concurrency")
    add("--requests", type=positive(int), metavar="N", help="requests of a load (default: 8 for each client)")
    add("--warmup", type=not_negative(int), default=0, metavar="N", help="requests before, which don't count")
    add("--input-tokens", type=positive(int), default=128, metavar="N", help="tokens of each prompt (default 128)")
    add("--output-tokens", type=positive(int), default=64, metavar="N", help="tokens of each answer (default 64)")
    add(
        "--shared-prefix-tokens",
        type=not_negative(int),
        default=0,
        metavar="N",
        help="prompt tokens all have in common",
    )
    add("--temperature", type=not_negative(float), default=0.0, metavar="T", help="default 0")
    add("--seed", type=not_negative(int), default=0, metavar="N", help="of prompts, arrivals and answers (default 0)")
    add_speculation(parser)
    add("--connections", type=positive(int), default=1, metavar="N", help="connections to each target (default 1)")
    add("--json", type=Path, metavar="FILE", help="write the result here; - is stdout")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from cluster import event_loop

    event_loop.choose_poller()
    return event_loop.run(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console
    from tandem.v1 import generation_pb2_grpc

    from cli import session
    from cli.load_report import summarise
    from cluster.channel import connect

    console = Console(stderr=True, highlight=False)
    json_to_stdout = str(args.json) == "-"
    result = Console(stderr=json_to_stdout, highlight=False)
    async with session.client(args) as client:
        model = _model(await client.models(), args.model)
    workloads = [_workload(args, model, index) for index in range(len(args.concurrency))]
    reports: list[Report] = []
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for target in targets(args) * args.connections:
            channel = await stack.enter_async_context(connect(target))
            stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
        if args.warmup:
            seed = workloads[-1].seed + _SEED_STRIDE
            warmup = dataclasses.replace(workloads[0], num_requests=args.warmup, seed=seed, rate=None)
            await _with_bar(console, "warming up", warmup, stubs)
        for workload in workloads:
            cpu_start_s = time.process_time()
            records = await _with_bar(console, "requests", workload, stubs)
            reports.append(summarise(workload, records, time.process_time() - cpu_start_s))
            show(result, reports[-1])
    if len(reports) > 1:
        show_medians(result, reports)
    if args.json is not None:
        forms = [report.as_json() for report in reports]
        text = json.dumps(forms if len(forms) > 1 else forms[0], indent=1) + "\n"
        if json_to_stdout:
            sys.stdout.write(text)
        else:
            args.json.write_text(text)
    return 1 if any(report.errors for report in reports) else 0


def _numbers(text: str) -> list[int]:
    """The type of --concurrency."""
    try:
        return [positive(int)(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 1,8,32") from None


def _model(models: tuple[Model, ...], name: str) -> Model:
    from cli.failures import UsageError

    found = [model for model in models if not name or model.name == name]
    if len(found) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise UsageError(f"--model must be one of the served models: {names}")
    return found[0]


def _workload(args: argparse.Namespace, model: Model, index: int) -> Workload:
    """The load number `index` of the command line; no two have a prompt in common, save for the shared prefix."""
    from cli.failures import UsageError
    from cli.load import Workload

    if args.input_tokens + args.output_tokens > model.max_model_len:
        raise UsageError(
            f"--input-tokens and --output-tokens make {args.input_tokens + args.output_tokens}, "
            f"but the context of {model.name} is {model.max_model_len}"
        )
    if args.rate is not None and len(args.concurrency) > 1:
        raise UsageError("--rate goes without a list of concurrencies")
    concurrency = args.concurrency[index]
    return Workload(
        model=model.name,
        num_requests=args.requests or _REQUESTS_PER_CLIENT * concurrency,
        concurrency=concurrency,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        vocab_size=model.vocab_size,
        rate=args.rate,
        temperature=args.temperature,
        seed=args.seed + index * _SEED_STRIDE,
        shared_prefix_tokens=args.shared_prefix_tokens,
        speculation=args.speculation,
        max_draft_tokens=args.max_draft_tokens,
        timeout_s=args.timeout_s,
    )


async def _with_bar(console: Console, what: str, workload: Workload, stubs: list) -> list[Record]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli import load

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        task = bars.add_task(what, total=workload.num_requests, note="")
        num_errors = 0

        def on_done(record: Record) -> None:
            nonlocal num_errors
            num_errors += record.error is not None
            bars.update(task, advance=1, note=f"[red]{num_errors} failed[/red]" if num_errors else "")

        return await load.run(workload, stubs, on_done)


def show_medians(console: Console, reports: list[Report]) -> None:
    """Several loads beside each other."""
    from rich.table import Table

    columns = ("at a time", "first token", "per output token", "output tokens/s", "input tokens/s", "client CPU")
    table = Table(*columns, box=None, header_style="bold")
    for report in reports:
        first, each = report.ttft_s.p50, report.time_per_output_token_s.p50
        table.add_row(
            str(report.workload.concurrency),
            *("-" if cell is None else f"{cell * 1000:.1f} ms" for cell in (first, each)),
            f"{report.output_tokens_per_s:.1f}",
            f"{report.input_tokens_per_s:.1f}",
            f"{report.client_cpu_s:.2f} s",
        )
    console.print(table)


def show(console: Console, report: Report) -> None:
    """The result for people."""
    from rich.table import Table

    workload = report.workload
    kind = f"open loop, {workload.rate:g}/s" if workload.rate else f"closed loop, {workload.concurrency} at a time"
    console.print(
        f"{workload.model}: {workload.num_requests} requests ({kind}), "
        f"{workload.input_tokens} tokens in, {workload.output_tokens} out"
    )
    table = Table("", "mean", "p50", "p90", "p99", "max", box=None, header_style="bold")
    rows: list[tuple[str, Distribution]] = [
        ("time to first token", report.ttft_s),
        ("between deliveries", report.inter_token_s),
        ("per output token", report.time_per_output_token_s),
        ("end to end", report.end_to_end_s),
    ]
    for name, times in rows:
        cells = (times.mean, times.p50, times.p90, times.p99, times.max)
        table.add_row(name, *("-" if cell is None else f"{cell * 1000:.1f} ms" for cell in cells))
    console.print(table)
    console.print(
        f"{report.completed} completed in {report.duration_s:.2f} s: {report.output_tokens_per_s:.1f} tokens/s, "
        f"{report.requests_per_s:.2f} requests/s"
    )
    if report.acceptance is not None:
        console.print(f"{report.drafted_tokens} tokens drafted, {report.acceptance:.0%} accepted")
    if report.cached_tokens:
        console.print(f"{report.cached_tokens} prompt tokens came from the prefix cache")
    late = f"; requests started up to {report.late_start_s * 1000:.0f} ms late" if workload.rate else ""
    console.print(
        f"the load generator itself took {report.client_cpu_s:.2f} s of CPU, "
        f"{report.client_cpu_share:.0%} of one core{late}"
    )
    for code, count in sorted(report.errors.items()):
        console.print(f"[red]{count} failed: {code}[/red]")
