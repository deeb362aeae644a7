"""Interprets scenario files: commands to a simulated cell, and what it says to each.

    command WORD key=value …        one command per paragraph
    ----
    what it prints

    config token_budget=5 …                 a cell; first
    worker W blocks=16 block_size=4 slots=4 context=64 fingerprint=x model=m                        attaches
             drafts=right|wrong|PROBABILITY cost=STEP_US,TOKEN_US,DRAFTING_US
    submit R prompt=8|NAME:8+4 max_tokens=4 n=1 priority=0 client= salt= patience= crashes=0 prompt_logprobs=1
    place                                   waiting sequences enter slots
    plan W · run W · apply W                one step is issued, is run, its result taken in
    step W [count]                          place, plan, run, apply
    budgets W count                         the same, two steps ahead; says only who may draft how much
    finish                                  until nothing moves
    cancel R [choice] · wait SECONDS        a client goes; time passes
    crash W · hang W · cut W · attach W · drain W · leave W · poison R at=0 · restart
    state · totals NAME…                    what is where; counters

Beneath runs everything that Simulation checks: each token against the oracle, each block against the fake memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby

from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.sequence import RequestSpec, Sequence
from scheduler.core.step import Admission, Failure, Step, Update
from scheduler.core.worker_state import WorkerSpec, WorkerState
from tests.scheduler.core.model_worker import VOCAB, DraftPolicy, Params, mix, no_drafts
from tests.scheduler.core.simulation import Simulation

FINISH = {0: "", 1: ", stop", 2: ", length"}
DRAFTS: dict[str, DraftPolicy] = {
    "none": no_drafts,
    "right": lambda known, budget: (budget, budget),
    "wrong": lambda known, budget: (budget, 0),
}


def name_of(sequence: Sequence) -> str:
    """a/0: request and choice."""
    return f"{label(sequence.request.spec.key)}/{sequence.choice}"


def label(key: object) -> str:
    """A request's key as a reader wants it; resubmitted ones have a tick per attempt."""
    ticks = ""
    while isinstance(key, tuple):
        key, ticks = key[2], ticks + "'"
    return f"{key}{ticks}"


def prompt_of(key: str, text: str) -> tuple[int, ...]:
    """`8`: own tokens; `sys:8+4`: 8 tokens that all prompts with sys begin with, and 4 own ones."""
    shared, _, own = text.rpartition("+")
    name, _, count = shared.partition(":")
    prefix = tuple(mix(sum(map(ord, name)), index) % VOCAB for index in range(int(count or 0)))
    return prefix + tuple(mix(sum(map(ord, key)) << 20, index) % VOCAB for index in range(int(own)))


def right_with(probability: float) -> DraftPolicy:
    """Drafts come whole, each token right with a probability, as a function of its position."""

    def policy(known: int, budget: int) -> tuple[int, int]:
        right = 0
        while right < budget and mix(known + right, 1) % 1000 < 1000 * probability:
            right += 1
        return budget, right

    return policy


class Scenario:
    """One cell and the commands it understands."""

    def __init__(self) -> None:
        self.simulation = Simulation(CoreConfig())
        self.entered: list[Admission] = []

    def run(self, command: str) -> str:
        """Carry a command out; returns what it has to say."""
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        method: Callable[..., Iterator[str]] = getattr(self, f"on_{verb}")
        return "\n".join(method(*names, **options)) or "ok"

    # ---------------------------------------------------------------------------------------------- what happens

    def on_config(self, **options: str) -> Iterator[str]:
        self.simulation = Simulation(CoreConfig(**{name: type_of(name)(value) for name, value in options.items()}))
        yield from ()

    def on_worker(self, name: str, **options: str) -> Iterator[str]:
        spec = WorkerSpec(
            model=options.get("model", "m"),
            fingerprint=options.get("fingerprint", "x"),
            num_blocks=int(options.get("blocks", 16)),
            block_size=int(options.get("block_size", 4)),
            max_sequences=int(options.get("slots", 4)),
            max_model_len=int(options.get("context", 64)),
        )
        drafts = options.get("drafts", "none")
        policy = DRAFTS[drafts] if drafts in DRAFTS else right_with(float(drafts))
        self.simulation.start(name, spec, policy)
        fixed, by_token, drafting = map(float, options.get("cost", "0,0,0").split(","))
        self.simulation.machines[name].model.cost_us = (fixed, by_token, drafting)
        yield from self._news()

    def on_submit(self, key: str, **options: str) -> Iterator[str]:
        patience = options.get("patience")
        spec = RequestSpec(
            key=key,
            model=options.get("model", "m"),
            prompt_token_ids=prompt_of(key, options.get("prompt", "8")),
            params=Params(),
            max_tokens=int(options["max_tokens"]) if "max_tokens" in options else None,
            wants_prompt_logprobs="prompt_logprobs" in options,
            choices=tuple((index, ()) for index in range(int(options.get("n", 1)))),
            priority=int(options.get("priority", 0)),
            deadline=None if patience is None else self.simulation.now + float(patience),
            client=options.get("client", ""),
            cache_salt=options.get("salt", ""),
            crashes=int(options.get("crashes", 0)),
        )
        refusal = self.simulation.submit(spec)
        if refusal is not None:
            yield f"refused, {refusal.kind.value}: {refusal.message}"

    def on_place(self) -> Iterator[str]:
        self.simulation.place()
        yield from self._entered()
        yield from self._news()

    def on_plan(self, worker_id: str) -> Iterator[str]:
        self.simulation.plan(worker_id)
        step = self.simulation.last_step
        yield from ["no step"] if step is None else describe(step)

    def on_run(self, worker_id: str) -> Iterator[str]:
        if not self.simulation.run(worker_id):
            yield "nothing to run"
        elif worker_id not in self.simulation.machines:
            yield f"{worker_id} crashed"
            yield from self._news()

    def on_apply(self, worker_id: str) -> Iterator[str]:
        if not self.simulation.apply(worker_id):
            yield "nothing to apply"
        yield from self._news()

    def on_step(self, worker_id: str, count: str = "1") -> Iterator[str]:
        for _ in range(int(count)):
            yield from self.on_place()
            yield from self.on_plan(worker_id)
            yield from self.on_run(worker_id)
            if worker_id not in self.simulation.machines:
                return
            yield from self.on_apply(worker_id)

    def on_budgets(self, worker_id: str, count: str) -> Iterator[str]:
        lines = []
        for _ in range(int(count)):
            self.simulation.place()
            while self.simulation.plan(worker_id):
                step = self.simulation.last_step
                assert step is not None
                if not any(step.num_prefill):
                    lines.append((step.number, describe_budgets(step)))
            self.simulation.run(worker_id)
            self.simulation.apply(worker_id)
        self._drain()
        for text, group in groupby(lines, key=lambda line: line[1]):
            numbers = [number for number, _ in group]
            yield f"steps {numbers[0]} to {numbers[-1]}: {text}"

    def on_finish(self) -> Iterator[str]:
        self.simulation.run_dry()
        ends: dict[str, str] = {}
        for item in self._drain():
            if isinstance(item, Failure):
                ends[label(item.request.spec.key)] = f"failed, {item.refusal.kind.value}"
            elif item.finish:
                total = item.first_index + len(item.token_ids)
                ends[name_of(item.sequence)] = f"{plural(total, 'token')}{FINISH[item.finish]}"
        yield from (f"{name}: {end}" for name, end in ends.items())

    def on_cancel(self, key: str, choice: str | None = None) -> Iterator[str]:
        self.simulation.cancel(key, None if choice is None else int(choice))
        yield from ()

    def on_wait(self, seconds: str) -> Iterator[str]:
        self.simulation.advance(float(seconds))
        yield from self._news()

    def on_crash(self, worker_id: str) -> Iterator[str]:
        self.simulation.crash(worker_id)
        yield from self._news()

    def on_hang(self, worker_id: str) -> Iterator[str]:
        self.simulation.hang(worker_id)
        yield from self._news()

    def on_cut(self, worker_id: str) -> Iterator[str]:
        self.simulation.cut(worker_id)
        yield from ()

    def on_attach(self, worker_id: str) -> Iterator[str]:
        self.simulation.attach(worker_id)
        pool = self.simulation.core.workers[worker_id].pool
        yield f"{pool.num_cached} blocks cached"

    def on_drain(self, worker_id: str) -> Iterator[str]:
        self.simulation.drain(worker_id)
        yield from ()

    def on_leave(self, worker_id: str) -> Iterator[str]:
        yield "left" if self.simulation.leave_if_drained(worker_id) else "not drained yet"

    def on_poison(self, key: str, at: str = "0") -> Iterator[str]:
        self.simulation.poison[key] = int(at)
        yield from ()

    def on_restart(self) -> Iterator[str]:
        self.simulation.restart()
        yield from ()

    # ------------------------------------------------------------------------------------------------ what is seen

    def on_totals(self, *names: str) -> Iterator[str]:
        totals = self.simulation.core.totals()
        yield from (f"{name} {totals[name]}" for name in names)

    def on_state(self) -> Iterator[str]:
        core = self.simulation.core
        for pool in core.models.values():
            if pool.num_waiting:
                waiting = ", ".join(f"{name_of(one)} {len(one.token_ids)}" for one in pool.waiting)
                yield f"waiting: {waiting}"
        held = [name_of(one) for request in core.requests.values() for one in request.held]
        if held:
            yield f"held: {', '.join(held)}"
        for worker in core.workers.values():
            yield from describe_worker(worker)

    def _entered(self) -> Iterator[str]:
        for worker in self.simulation.core.workers.values():
            for admission in worker.admissions:
                if not any(admission is told for told in self.entered):
                    self.entered.append(admission)
                    yield f"{name_of(admission.sequence)} enters {worker.worker_id}, {admission.num_computed} cached"

    def _drain(self) -> list[Update | Failure]:
        news, self.simulation.clients.news = self.simulation.clients.news, []
        return news

    def _news(self) -> Iterator[str]:
        for item in self._drain():
            if isinstance(item, Failure):
                yield f"{label(item.request.spec.key)} failed, {item.refusal.kind.value}: {item.refusal.message}"
                continue
            last = item.first_index + len(item.token_ids) - 1
            span = f"token {last}" if len(item.token_ids) == 1 else f"tokens {item.first_index} to {last}"
            parts = [span] if item.token_ids else []
            if not (item.token_ids or item.prompt_logprobs or item.finish):
                parts = [f"crash {item.sequence.crashes} in a row"]
            if item.prompt_logprobs:
                end = item.first_prompt_position + len(item.prompt_logprobs) - 1
                parts.append(f"prompt positions {item.first_prompt_position} to {end}")
            yield f"{name_of(item.sequence)}: {', '.join(parts)}{FINISH[item.finish]}"


def type_of(field: str) -> type:
    """How a configuration value is read."""
    if field == "speculation":
        return SpeculationMode
    return float if field in ("watermark", "capacity_wait_s") else int


def plural(count: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def describe(step: Step) -> Iterator[str]:
    """A step as lines."""
    yield f"step {step.number}: {plural(step.num_tokens, 'token')}"
    if step.released_slots:
        yield f"  release {' '.join(map(str, step.released_slots))}"
    for admission in step.admissions:
        table = " ".join(map(str, admission.block_ids))
        computed = f", {admission.num_computed} computed" if admission.num_computed else ""
        yield f"  admit {name_of(admission.sequence)} slot {admission.slot} blocks {table}{computed}"
    rows = zip(step.sequences, step.num_prefill, step.num_draft, step.new_blocks, step.reserved, strict=True)
    for sequence, prefill, draft, blocks, reserved in rows:
        kind = f"prefill {prefill}" if prefill else "decode"
        extra = f" k={draft}" if draft else ""
        extra += f" +{' '.join(map(str, blocks))}" if blocks else ""
        extra += "" if reserved else ", no token yet"
        yield f"  {kind} {name_of(sequence)}{extra}"


def describe_budgets(step: Step) -> str:
    """How many rows may draft how much."""
    rows = Counter(step.num_draft)
    return ", ".join(f"{plural(count, 'row')} k={k}" for k, count in sorted(rows.items(), reverse=True))


def describe_worker(worker: WorkerState) -> Iterator[str]:
    """A worker's memory and what runs there."""
    pool = worker.pool
    draining = ", draining" if worker.draining else ""
    yield (
        f"{worker.worker_id}: {pool.num_free} free, {pool.num_cached} cached, {pool.num_referenced} held, "
        f"{plural(len(worker.in_flight), 'step')} in flight{draining}"
    )
    for sequence in worker.running:
        suspect = ", suspect" if sequence is worker.suspect else ""
        yield f"  {name_of(sequence)} {sequence.computed} of {len(sequence.token_ids)} computed{suspect}"
    for sequence in sorted(worker.leaving, key=lambda one: one.sequence_id):
        yield f"  {name_of(sequence)} {sequence.state.name.lower()}"
