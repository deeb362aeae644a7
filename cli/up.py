"""`tandem up`: the whole cluster as local processes, supervised, with embedded state."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cli import model_source, plan
from cli.arguments import Subparsers, add_command, metrics_port, not_negative, port, positive, served_name
from cli.output import Output
from cli.plan import ClusterOptions
from cli.supervisor import NAME, ClusterFailed, Supervisor

# What a service gets beyond its own drain time before it is killed.
_STOP_MARGIN_S = 15.0
_DEFAULT_DRAIN_S = 600.0
_FAILED_STOP_S = 5.0

_EXAMPLES = """\
examples:
  tandem up                                     the default model and the draft model distilled for it
  tandem up --model ./my-llama --workers 2      a folder, a .gguf file or a hub id
  tandem up --model ./big --draft ./small       a small model drafts for a big one
  tandem up --engine fake --port 0              the whole cluster without weights, on any free port

The ready line `READY tandem HOST:PORT` on stdout says that the model is served. Ctrl-C (or SIGTERM) lets running
requests finish; a second one ends everything at once. A part that dies is started again.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "up", run, "start a cluster on this machine", _EXAMPLES)
    add = parser.add_argument
    add("--model", default=model_source.DEFAULT, help="folder, .gguf file, hub id, or `default` (the default)")
    name = "the name that clients use (default: the model's own)"
    add("--served-model-name", type=served_name, metavar="NAME", help=name)
    add("--workers", type=positive(int), default=1, metavar="N", help="processes that run the model (default 1)")
    add(
        "--draft",
        default="auto",
        metavar="D",
        help="who drafts: a folder, ngram, none, fake, or auto: the draft that comes with the default model, ngram for "
        "others (the default)",
    )
    add(
        "--proposer",
        choices=("auto", "model", "ngram", "combined"),
        help="how it guesses: with its model, by what stood in the text before, or by both (default: all that it has)",
    )
    add(
        "--drafting",
        choices=("auto", "worker", "apart"),
        default="auto",
        help="where: in each worker, between its steps; apart, in a draft worker; auto: in the workers where the model "
        "computes on the CPU, whose cores a draft worker would share (the default)",
    )
    add(
        "--draft-vocabulary",
        choices=("same", "intersection", "text"),
        help="what the draft model's tokenizer is to the target's (default same); others draft by common ids, or text",
    )
    add("--engine", choices=("transformers", "fake"), default="transformers", help="fake: no weights, for tests")
    add("--dtype", choices=("float32", "bfloat16"), help="number format of weights and KV")
    add("--device", choices=("auto", "cpu", "cuda"), help="where the model runs (default auto)")
    add("--host", default="127.0.0.1", help="address that all services listen on (default: loopback only)")
    add("--port", type=port, default=50051, help="the gateway's; 0: any free one (default 50051)")
    add("--scheduler-port", type=port, help="the scheduler's (default: one above --port, or 0 with --port 0)")
    add("--state", metavar="URL", help="redis://HOST:PORT/DB that schedulers share (default: none is needed)")
    add("--schedulers", type=positive(int), default=1, metavar="N", help="the leader and its standbys (default 1)")
    add("--metrics-port", type=metrics_port, default=-1, help="the gateway's /metrics; the scheduler's is one above")
    add("--max-model-len", type=positive(int), metavar="N", help="most tokens of prompt and output together")
    add("--kv-cache-gib", type=positive(float), metavar="GIB", help="KV memory of each worker (default: what is free)")
    add("--num-blocks", type=positive(int), metavar="N", help="KV blocks of each worker, instead")
    add("--block-size", type=positive(int), metavar="N", help="tokens per KV block")
    add("--max-sequences", type=positive(int), metavar="N", help="most sequences that a worker runs at once")
    add("--token-budget", type=positive(int), metavar="N", help="most tokens of one step")
    add(
        "--speculation",
        choices=("auto", "fixed", "off"),
        help="draft budgets: what pays (default), the largest, or none",
    )
    add("--max-draft-tokens", type=not_negative(int), metavar="K", help="most drafted tokens of a row in one step")
    add("--max-waiting", type=positive(int), metavar="N", help="the queue's bound")
    add("--max-concurrent-requests", type=positive(int), metavar="N", help="the gateway's bound of live requests")
    add("--max-message-mib", type=positive(float), metavar="MIB", help="largest request")
    add("--drain-timeout-s", type=not_negative(float), metavar="S", help="longest wait for running requests at the end")
    add("--fake-step-ms", type=not_negative(float), metavar="MS", help="fake engine: time of one step")
    add("--fake-token-us", type=not_negative(float), metavar="US", help="fake engine: time of one token")
    add("--state-file", type=Path, metavar="FILE", help="keep a JSON description of the processes here")
    add("--demo", action="store_true", help="once ready, show a completion and how to call the cluster")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    if args.schedulers > 1 and args.state in (None, "memory"):
        from cli.failures import UsageError

        raise UsageError("standby schedulers need a state that they share: --state redis://HOST:PORT/DB")
    scheduler_port = args.scheduler_port
    if scheduler_port is None:
        scheduler_port = args.port + 1 if 0 < args.port <= 65535 - args.schedulers else 0
    others = range(scheduler_port, scheduler_port + args.schedulers) if scheduler_port else ()
    for number in (args.port, *others):
        _check_port(args.host, number)
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        folder = model_source.resolve(args.model, args.engine, Path(scratch))
        args.draft = model_source.resolve_draft(args.draft, args.model, args.engine, Path(scratch))
        options = ClusterOptions(
            model=str(folder),
            served_model_name=args.served_model_name or model_source.served_name(args.model, folder),
            num_workers=args.workers,
            draft=args.draft,
            own_drafts=_own_drafts(args.drafting, args.draft, args.engine, args.device),
            engine=args.engine,
            num_cores=_num_cores(),
            host=args.host,
            port=args.port,
            scheduler_port=scheduler_port,
            num_schedulers=args.schedulers,
            **{name: getattr(args, name) for name in _PASSED_ON},
        )
        return asyncio.run(Cluster(options, Output(), args.state_file).run(demo=args.demo))


_PASSED_ON = (
    *("metrics_port", "state", "device", "dtype", "kv_cache_gib", "num_blocks", "block_size", "max_sequences"),
    *("max_model_len", "speculation", "max_draft_tokens", "token_budget", "max_waiting", "max_concurrent_requests"),
    *("max_message_mib", "drain_timeout_s", "fake_step_ms", "fake_token_us", "proposer", "draft_vocabulary"),
)


GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""one of these is there where torch may find a GPU; asking torch would take seconds"""


def _own_drafts(drafting: str, draft: str, engine: str, device: str | None) -> bool:
    """Whether workers guess for themselves. The fake draft is there to stand for a draft worker's."""
    if draft == "none":
        return False
    if drafting != "auto":
        return drafting == "worker"
    on_cpu = device == "cpu" or (device != "cuda" and not any(Path(driver).exists() for driver in GPU_DRIVERS))
    return on_cpu and "fake" not in (draft, engine)


class PortTaken(Exception):
    """Somebody listens there; the message is fit for a user."""


def _check_port(host: str, number: int) -> None:
    """Tell a port in use before the time that loading takes. Raises PortTaken."""
    if number == 0:
        return
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), number))
        except OSError as error:
            raise PortTaken(
                f"can't listen on {host}:{number}: {error.strerror}; "
                "is a cluster running already? --port 0 takes any free port"
            ) from None


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running cluster listens."""

    gateway: str
    scheduler: str


class Cluster:
    """One run of `tandem up`, from start to drained."""

    def __init__(self, options: ClusterOptions, output: Output, state_file: Path | None = None) -> None:
        self._options = options
        self._output = output
        self._state_file = state_file
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, *, demo: bool) -> int:
        """Start, serve until told to stop, drain; the exit status."""
        supervisor = Supervisor(self._output.line, state_file=self._state_file, on_progress=self._output.progress)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number.name)
        serving = asyncio.ensure_future(self._serve(supervisor, demo=demo))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
                await asyncio.wait({serving})
                await self._unless_stopped_now(supervisor, self._drain(supervisor))
                return 0
            await self._unless_stopped_now(supervisor, self._end(supervisor))
            serving.result()
            return 0
        finally:
            stopping.cancel()
            supervisor.kill()
            await supervisor.wait_stopped()
            if self._state_file is not None:
                self._state_file.unlink(missing_ok=True)

    async def _serve(self, supervisor: Supervisor, *, demo: bool) -> None:
        """Returns never; raises ClusterFailed."""
        started = time.monotonic()
        addresses = await self._start(supervisor)
        print(f"READY tandem {addresses.gateway}", flush=True)
        options = self._options
        self._output.line(
            NAME,
            f"serving {options.served_model_name} at {addresses.gateway} after {time.monotonic() - started:.1f} s "
            f"(scheduler at {addresses.scheduler}; Ctrl-C drains)",
        )
        if demo:
            from cli.demo import show

            with self._output.held():
                await show(self._output.console, addresses.gateway, addresses.scheduler, options.served_model_name)
        await supervisor.failed
        raise ClusterFailed(supervisor.failed.result())

    async def _start(self, supervisor: Supervisor) -> Addresses:
        from cli.health import wait_serving

        options, output = self._options, self._output
        with output.waiting("starting the scheduler"):
            addresses = await supervisor.start(plan.scheduler_specs(options))
            scheduler = ",".join(addresses)
            output.now_waiting(f"starting the gateway and {options.num_workers} worker(s), which load the model")
            others = await supervisor.start(
                [
                    plan.gateway_spec(options, scheduler),
                    *plan.worker_specs(options, scheduler),
                    *plan.draft_specs(options, scheduler),
                ]
            )
            gateway = others[0]
            output.now_waiting("waiting until the gateway serves the model")
            await supervisor.unless_failed(asyncio.ensure_future(wait_serving(gateway, options.served_model_name)))
        return Addresses(gateway, addresses[0])

    async def _drain(self, supervisor: Supervisor) -> None:
        """In the order that lets streams finish."""
        options = self._options
        self._output.line(NAME, "draining: running requests finish, new ones are refused (again: stop at once)")
        drain_s = _DEFAULT_DRAIN_S if options.drain_timeout_s is None else options.drain_timeout_s
        limit_s = drain_s + _STOP_MARGIN_S
        await supervisor.stop(["gateway"], limit_s)
        await supervisor.stop([name for name in supervisor.members if name.startswith("worker")], limit_s)
        await supervisor.stop(["draft"], limit_s)
        await supervisor.stop([name for name in supervisor.members if name.startswith("scheduler")], limit_s)
        self._output.line(NAME, "stopped")

    async def _end(self, supervisor: Supervisor) -> None:
        """After a failure: nobody waits for anything."""
        await supervisor.stop(list(supervisor.members), _FAILED_STOP_S)

    async def _unless_stopped_now(self, supervisor: Supervisor, work: object) -> None:
        working = asyncio.ensure_future(work)  # type: ignore[call-overload]
        cutting = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait({working, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            supervisor.kill()
        cutting.cancel()
        await working

    def _on_signal(self, name: str) -> None:
        if self._stop.is_set():
            self._output.line(NAME, f"{name} again: stopping at once")
            self._stop_now.set()
        self._stop.set()
