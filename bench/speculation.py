"""Does speculation pay? Pairs of runs with and without drafts, in one running cluster, through the gateway.

    .venv/bin/python -m bench.speculation                       five pairs of each load, 25 minutes at most
    .venv/bin/python -m bench.speculation --resume              go on with what was interrupted
    .venv/bin/python -m bench.speculation --quick               one short pair of a few loads: does it all work?

Workloads: chat prompts that no draft was trained on (distill/prompts.py, held-out split), and copying tasks over given
texts (correct, extract, summarise in quotes), the latter drafted by the n-gram index alone. Each stream sends two
requests, six are sent at least, and --run-tokens bounds what all of a run may answer: the more streams, the shorter the
answers. They end where the model ends them, after --max-tokens at most. With and without drafts they are the same
tokens, which is checked, so that each pair does the same work; every request has a cache_salt of its own, so that
nothing is cached or remembered from before.

Pairing: drafts are switched by request (`speculation.mode`), so both halves of a pair run on the same processes within
seconds of each other; which half goes first alternates. Speed-up is tokens/s with drafts by tokens/s without, its
median over the rounds, and the 90 % interval of that median by bootstrap. Before its first pair each load is run once
with drafts, unmeasured, since a budget is learned from traffic.

What was measured is kept after every pair (pairs.json in the output folder). After --minutes no other pair begins;
rounds come one after the other, so all loads have about as many.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2

from bench import peers, speculation_prompts
from bench.peer_table import HOST, MAX_MODEL_LEN, MODEL_NAME, Peer, Site
from bench.servers import ServerFailed, cpu_seconds
from bench.speculation_plan import Plan, missing, plan_of, prompts_of
from bench.speculation_report import as_json, as_text, plot
from bench.speculation_runs import Case, Run, Sample, StepTimes, load, pairs_of, save
from cli import model_source
from cluster import event_loop
from cluster.channel import connect
from engine.default_model import fetch_default_model
from tandem_client.convert import speculation_mode

SAMPLE_EVERY_S = 0.25


@dataclass(slots=True)
class Cluster:
    """The running cluster, and how it is asked."""

    target: peers.Target
    stub: generation_pb2_grpc.GenerationServiceStub
    admin: admin_pb2_grpc.AdminServiceStub

    async def status(self) -> admin_pb2.GetStatusResponse:
        """The scheduler's account."""
        answer: admin_pb2.GetStatusResponse = await self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
        return answer


def command(draft: str) -> Peer:
    """Tandem as its users start it, with slots for 64 streams."""

    def line(site: Site, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "cli", "up", "--model", str(site.model), "--served-model-name", MODEL_NAME),
            *("--draft", draft, "--host", HOST, "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--kv-cache-gib", "2", "--max-sequences", "128", *site.tandem_flags),
        ]

    return Peer("tandem", "tandem", lambda site: True, line)


def request(case: Case, number: int, drafts: bool, index: int, prompt: str, max_tokens: int) -> object:
    """One prompt; seeds depend on round and prompt only, salts on everything."""
    salt = f"{os.getpid()} {case.name} {number} {drafts} {index}"
    return generation_pb2.GenerateStreamRequest(
        model=MODEL_NAME,
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=generation_pb2.SamplingParams(temperature=case.temperature, seed=1000 * number + index),
        stop=generation_pb2.StopCriteria(max_tokens=max_tokens),
        speculation=types_pb2.Speculation(mode=speculation_mode(case.mode if drafts else "off")),
        cache_salt=salt,
    )


async def answer(stub: generation_pb2_grpc.GenerationServiceStub, message: object) -> list[int] | str:
    """The tokens of an answer, or why there is none."""
    token_ids: list[int] = []
    finished = False
    try:
        async for response in stub.GenerateStream(message):
            for delta in response.deltas:
                token_ids += delta.token_ids
                finished |= delta.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return token_ids if finished else "SHORT_ANSWER"


async def run_once(cluster: Cluster, case: Case, number: int, drafts: bool, prompts: Sequence[str], plan: Plan) -> Run:
    """One load, closed loop: each stream sends its next request when its last one has ended."""
    _, max_tokens = plan.size_of(case)
    messages = [request(case, number, drafts, index, one, max_tokens) for index, one in enumerate(prompts)]
    answers: list[list[int] | str] = [[]] * len(messages)
    upcoming = iter(range(len(messages)))

    async def stream() -> None:
        for index in upcoming:
            answers[index] = await answer(cluster.stub, messages[index])

    before, cpu_before, own_before = await cluster.status(), _cpu_s(cluster), time.process_time()
    samples: list[Sample] = []
    sampling = asyncio.ensure_future(_sample(cluster, samples))
    began_s = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(case.streams)))
    duration_s = time.perf_counter() - began_s
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    after = await cluster.status()
    good = [one for one in answers if not isinstance(one, str)]
    return Run(
        case=case,
        round=number,
        drafts=drafts,
        output_tokens=sum(map(len, good)),
        duration_s=duration_s,
        errors=tuple(one for one in answers if isinstance(one, str)),
        steps=_total(after, "steps") - _total(before, "steps"),
        decode_rows=_total(after, "decode_rows") - _total(before, "decode_rows"),
        draft_budget=_total(after, "draft_budget_tokens") - _total(before, "draft_budget_tokens"),
        drafted=_by_position(before, after, "position_drafted_tokens"),
        accepted=_by_position(before, after, "position_accepted_tokens"),
        waited_s=_total(after, "drafting_s") - _total(before, "drafting_s"),
        parts_cpu_s={name: spent - cpu_before[name] for name, spent in _cpu_s(cluster).items()},
        client_cpu_s=time.process_time() - own_before,
        samples=tuple(samples),
        answers_digest=hashlib.sha256(json.dumps(answers).encode()).hexdigest(),
    )


async def _sample(cluster: Cluster, samples: list[Sample]) -> None:
    """Note the drafting now and then, until cancelled."""
    began_s, before = time.perf_counter(), await cluster.status()
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        now = await cluster.status()
        rows, budget, right = (
            _total(now, name) - _total(before, name)
            for name in ("decode_rows", "draft_budget_tokens", "accepted_tokens")
        )
        if rows:
            gain = max((worker.speculation_gain for worker in now.workers), default=1.0)
            samples.append(Sample(time.perf_counter() - began_s, budget / rows, 1 + right / rows, gain))
        before = now


def _total(status: admin_pb2.GetStatusResponse, name: str) -> Any:
    return sum(getattr(worker, name) for worker in status.workers)


def _by_position(before: admin_pb2.GetStatusResponse, after: admin_pb2.GetStatusResponse, name: str) -> tuple[int, ...]:
    counts: list[int] = []
    for status, sign in ((after, 1), (before, -1)):
        for worker in status.workers:
            for position, count in enumerate(getattr(worker, name)):
                counts += [0] * (position + 1 - len(counts))
                counts[position] += sign * count
    return tuple(counts)


def _cpu_s(cluster: Cluster) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in cluster.target.parts.items()}


Keep = Callable[[list[Run], StepTimes], None]


async def compare(
    cluster: Cluster, plan: Plan, done: Sequence[Run] = (), keep: Keep = lambda runs, step_times: None
) -> tuple[list[Run], StepTimes]:
    """All rounds but the pairs that are done; and T(n) as measured by their end. `keep` is called after every pair."""
    runs = [run for case in plan.cases for pair in pairs_of(done, case) for run in pair]
    until_s = time.monotonic() + 60 * plan.minutes
    for number in range(plan.rounds + 1):
        for case in plan.cases:
            if not missing(plan, runs, case, number) or time.monotonic() > until_s:
                continue
            prompts = prompts_of(case, number, plan.size_of(case)[0])
            halves = (False, True) if number % 2 else (True, False)
            pair = []
            for drafts in halves if number else (True,):
                run = await run_once(cluster, case, number, drafts, prompts, plan)
                what = "warm-up" if not number else f"round {number}"
                shown = f"{case.name:16} {'on ' if drafts else 'off'} {run.tokens_per_s:7.1f} tok/s {run.errors or ''}"
                print(f"{what:8} {shown}", file=sys.stderr, flush=True)
                pair.append(run)
            if number:
                runs += pair
                keep(runs, await step_times_of(cluster))
    return runs, await step_times_of(cluster)


async def step_times_of(cluster: Cluster) -> StepTimes:
    """T(n) as the scheduler knows it now."""
    status = await cluster.status()
    return {
        kind: [(step.num_tokens, step.seconds) for worker in status.workers[:1] for step in getattr(worker, field)]
        for kind, field in (("plain", "plain_steps"), ("drafting", "drafting_steps"))
    }


def setup_of(site: Site, draft: str, plan: Plan) -> dict[str, object]:
    """What pairs must have in common to stand in one table."""
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": site.num_cores,
        "model": site.model.name,
        "draft": Path(draft).name,
        "flags": list(site.tandem_flags),
        "sizes": {case.name: plan.size_of(case) for case in plan.cases},
        "chat_prompts_sha256": speculation_prompts.digest(speculation_prompts.chat(256)),
        "copying_tasks_sha256": speculation_prompts.digest(speculation_prompts.copying(40)),
    }


@contextlib.contextmanager
def serving(site: Site, draft: str, folder: Path) -> Iterator[peers.Target]:
    """A cluster for as long as the block runs."""
    target = peers.start(command(draft), site, folder)
    try:
        yield target
    finally:
        target.server.stop()


async def measure(target: peers.Target, plan: Plan, done: Sequence[Run], keep: Keep) -> tuple[list[Run], StepTimes]:
    """Connect, and run the plan."""
    # `tandem up` puts the scheduler one port above the gateway.
    async with connect(f"{HOST}:{target.port}") as gateway, connect(f"{HOST}:{target.port + 1}") as scheduler:
        stubs = generation_pb2_grpc.GenerationServiceStub(gateway), admin_pb2_grpc.AdminServiceStub(scheduler)
        return await compare(Cluster(target, *stubs), plan, done, keep)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="default: the default model")
    add("--draft", default="auto", metavar="D", help="as of `tandem up --draft` (default auto)")
    add("--mode", default="auto", metavar="M", help="speculation mode of the chat runs with drafts (default auto)")
    add("--rounds", type=int, default=5, metavar="N", help="pairs of each load (default 5)")
    add("--streams", default="1,4,16,64", metavar="N,…", help="streams at once (default 1,4,16,64)")
    add("--temperatures", default="0,0.7", metavar="T,…", help="of the chat loads (default 0,0.7)")
    add("--copy-streams", type=int, default=1, metavar="N", help="copying is run up to so many streams (default 1)")
    add("--requests", type=int, default=6, metavar="N", help="of a run at least (default 6)")
    add("--max-tokens", type=int, default=128, metavar="N", help="of an answer (default 128)")
    add("--run-tokens", type=int, default=4096, metavar="N", help="of all answers of a run (default 4096)")
    add("--minutes", type=float, default=25.0, metavar="M", help="after which no other pair begins (default 25)")
    add("--resume", action="store_true", help="take up the pairs that the output folder holds")
    add("--quick", action="store_true", help="one short pair of few loads")
    add("--tandem-flag", action="append", default=[], metavar="FLAG", help="one more for `tandem up`")
    add("--output", type=Path, default=Path("bench-speculation"), metavar="FOLDER", help="JSON, plot and logs")
    return parser.parse_args()


def main() -> int:
    """Run the pairs; the exit status is 1 if anything failed or any answer differs."""
    args = _arguments()
    site = Site(model=args.model or fetch_default_model(), tandem_flags=tuple(args.tandem_flag))
    plan = plan_of(args)
    args.output.mkdir(parents=True, exist_ok=True)
    draft = args.draft
    if draft == "auto" and args.model is None:
        # The cluster is given the model's folder, and with that it could not know whose draft is meant.
        draft = model_source.resolve_draft(draft, model_source.DEFAULT, "transformers", args.output)
    kept = args.output / "pairs.json"
    done: list[Run] = []
    step_times: StepTimes = {}
    setup = setup_of(site, draft, plan)
    try:
        if args.resume and kept.exists():
            done, step_times = load(kept, setup)
    except ValueError as error:
        print(f"speculation: {error}", file=sys.stderr)
        return 2
    # A SIGTERM unwinds like a Ctrl-C, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs = done
    if any(missing(plan, done, case) for case in plan.cases):
        try:
            with serving(site, draft, args.output) as target:
                keep = partial(save, kept, setup=setup)
                runs, step_times = event_loop.run(measure(target, plan, done, keep))
        except ServerFailed as failure:
            print(f"speculation: {failure}", file=sys.stderr)
            return 1
    about = {**setup, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
    text = as_text(runs, step_times)
    print(text)
    (args.output / "speculation.json").write_text(json.dumps(as_json(runs, step_times, about), indent=1) + "\n")
    if not plot(runs, step_times, args.output / "speculation.png"):
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 1 if "### Wrong" in text else 0


if __name__ == "__main__":
    sys.exit(main())
