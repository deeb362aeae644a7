"""Any order of events: whatever happens, every client gets exactly its tokens, and nothing is lost or left over."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.sequence import RequestSpec
from scheduler.core.step import RefusalKind
from scheduler.core.worker_state import WorkerSpec
from tests.scheduler.core.model_worker import VOCAB, Params, expected_output, mix
from tests.scheduler.core.simulation import Simulation

MODELS = ("m1", "m2")
PREFIXES = tuple(tuple((7 * index + 31 * which) % VOCAB for index in range(20)) for which in range(2))
STOPS = (frozenset[int](), frozenset(range(0, VOCAB, 12)))
# The suite runs the same examples every time; a longer search takes new ones: TANDEM_STATE_MACHINE_EXAMPLES=5000.
SEARCHING = "TANDEM_STATE_MACHINE_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("TANDEM_STATE_MACHINE_EXAMPLES", "60"))
DEPTH = int(os.environ.get("TANDEM_STATE_MACHINE_STEPS", "60"))

CONFIGS = st.builds(
    CoreConfig,
    token_budget=st.sampled_from([3, 8, 64]),
    depth=st.sampled_from([2, 2, 1]),
    max_waiting=st.sampled_from([100, 4]),
    speculation=st.sampled_from([SpeculationMode.FIXED, SpeculationMode.AUTO]),
    max_draft_tokens=st.sampled_from([4, 1, 0]),
    draft_token_budget=st.sampled_from([40, 6]),
    watermark=st.sampled_from([0.01, 0.0]),
    row_cost=st.sampled_from([8, 0]),
)
WORKERS = st.builds(
    WorkerSpec,
    model=st.sampled_from(MODELS),
    fingerprint=st.sampled_from(["x", "y"]),
    num_blocks=st.sampled_from([12, 7, 30]),
    block_size=st.sampled_from([4, 2, 8]),
    max_sequences=st.sampled_from([4, 8, 1]),
    max_model_len=st.sampled_from([64, 28]),
)
PROMPTS = st.builds(
    lambda which, shared, own: PREFIXES[which][:shared] + own,
    st.integers(0, 1),
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple),
)


def drafts(salt: int) -> Any:
    """A draft worker that is late, right or wrong, as a function of what it is asked."""

    def policy(known: int, budget: int) -> tuple[int, int]:
        dice = mix(salt, known)
        count = dice % (budget + 1)
        return count, (dice // 7) % (count + 1)

    return policy


class Cell(RuleBasedStateMachine):
    """The rules are what can happen; the checks are in Simulation."""

    @initialize(config=CONFIGS, first=WORKERS)
    def begin(self, config: CoreConfig, first: WorkerSpec) -> None:
        self.simulation = Simulation(config)
        self.names = 0
        self.simulation.start("w0", first)

    # -------------------------------------------------------------------------------------------------- requests

    @rule(
        model=st.sampled_from([*MODELS, "m1", "m1"]),
        prompt=PROMPTS,
        max_tokens=st.none() | st.integers(1, 20),
        stop=st.sampled_from(STOPS),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.sampled_from([0, 0, 1, -1]),
        patience=st.sampled_from([None, None, None, 2.0]),
        client=st.sampled_from(["a", "b"]),
        salt=st.sampled_from(["", "", "salt"]),
        logprobs=st.sampled_from([False, False, True]),
        poison=st.sampled_from([None] * 9 + [0, 2]),
        plain=st.booleans(),
    )
    def submit(self, **draw: Any) -> None:
        self._submit([((index), ()) for index in range(draw["n"])], False, draw)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.none() | st.integers(2, 20),
        stop=st.sampled_from(STOPS),
        had=st.lists(st.integers(0, 18), min_size=1, max_size=3),
    )
    def submit_resumed(self, prompt: Any, max_tokens: int | None, stop: frozenset[int], had: list[int]) -> None:
        """A client that lost its gateway comes back with what it holds."""
        draw = {"model": "m1", "prompt": prompt, "max_tokens": max_tokens, "stop": stop}
        choices = []
        for choice, count in enumerate(had):
            whole, _ = expected_output(prompt, len(prompt), choice, stop, max_tokens or 30)
            choices.append((choice, tuple(whole[: min(count, len(whole) - 1)])))
        self._submit(choices, True, draw)

    def _submit(self, choices: Any, resumed: bool, draw: dict[str, Any]) -> None:
        self.names += 1
        patience = draw.get("patience")
        spec = RequestSpec(
            key=self.names,
            model=draw["model"],
            prompt_token_ids=draw["prompt"],
            params=Params(draw["stop"]),
            max_tokens=draw["max_tokens"],
            wants_prompt_logprobs=draw.get("logprobs", False),
            seed=len(draw["prompt"]),
            choices=tuple(choices),
            priority=draw.get("priority", 0),
            deadline=None if patience is None else self.simulation.now + patience,
            client=draw.get("client", ""),
            cache_salt=draw.get("salt", ""),
            max_draft_tokens=0 if draw.get("plain") else None,
            resumed=resumed,
        )
        refusal = self.simulation.submit(spec)
        if refusal is not None:
            assert not resumed
            assert refusal.kind in (RefusalKind.QUEUE_FULL, RefusalKind.INVALID)
        elif draw.get("poison") is not None:
            self.simulation.poison[self.names] = draw["poison"]

    @precondition(lambda self: self.simulation.core.requests)
    @rule(which=st.integers(0, 9), choice=st.none() | st.integers(0, 3))
    def cancel(self, which: int, choice: int | None) -> None:
        keys = list(self.simulation.core.requests)
        key = keys[which % len(keys)]
        if choice is None or choice in self.simulation.clients[key].open_choices:
            self.simulation.cancel(key, choice)

    @rule(seconds=st.sampled_from([0.5, 1.0, 90.0]))
    def advance(self, seconds: float) -> None:
        self.simulation.advance(seconds)

    # ----------------------------------------------------------------------------------------------------- steps

    @rule()
    def place(self) -> None:
        self.simulation.place()

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3), placing=st.booleans())
    def plan(self, which: int, placing: bool) -> None:
        if placing:
            self.simulation.place()
        self.simulation.plan(self._pick(which))

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def run(self, which: int) -> None:
        self.simulation.run(self._pick(which))

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def apply(self, which: int) -> None:
        self.simulation.apply(self._pick(which))

    @rule(count=st.integers(1, 6))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            if not self.simulation.round():
                self.simulation.check_quiescent()

    # --------------------------------------------------------------------------------------------------- workers

    def _pick(self, which: int) -> str:
        attached = self.simulation.attached
        return attached[which % len(attached)]

    @precondition(lambda self: len(self.simulation.machines) < 4)
    @rule(spec=WORKERS, drafting=st.booleans())
    def start(self, spec: WorkerSpec, drafting: bool) -> None:
        self.names += 1
        name = f"w{self.names}"
        if drafting:
            self.simulation.start(name, spec, drafts(self.names))
        else:
            self.simulation.start(name, spec)

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def crash(self, which: int) -> None:
        self.simulation.crash(self._pick(which))

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def hang(self, which: int) -> None:
        self.simulation.hang(self._pick(which))

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def cut(self, which: int) -> None:
        self.simulation.cut(self._pick(which))

    @precondition(lambda self: self.simulation.machines)
    @rule(which=st.integers(0, 3))
    def attach(self, which: int) -> None:
        names = list(self.simulation.machines)
        self.simulation.attach(names[which % len(names)])

    @precondition(lambda self: self.simulation.attached)
    @rule(which=st.integers(0, 3))
    def drain(self, which: int) -> None:
        name = self._pick(which)
        self.simulation.drain(name)
        self.simulation.leave_if_drained(name)

    @rule()
    def restart(self) -> None:
        self.simulation.restart()

    # ------------------------------------------------------------------------------------------------------- end

    def teardown(self) -> None:
        """Whatever is still open is answered once there is room for it."""
        simulation = getattr(self, "simulation", None)
        if simulation is None:
            return
        while simulation.core.requests:  # poison may kill the last workers, too
            for model in MODELS:
                self.names += 1
                simulation.start(f"last{self.names}", WorkerSpec(model, "z", 40, 4, 6, 120))
            simulation.run_dry()
        for name in simulation.attached:
            if simulation.core.workers[name].draining:
                assert simulation.leave_if_drained(name)
        simulation.check_over()


TestCell = Cell.TestCase
TestCell.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=DEPTH,
    deadline=None,
    derandomize=not SEARCHING,
    database=None,
    # Shrinking takes minutes, longer than a test may: ask for it once something is found.
    phases=[Phase.generate, Phase.shrink] if os.environ.get("TANDEM_STATE_MACHINE_SHRINK") else [Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
