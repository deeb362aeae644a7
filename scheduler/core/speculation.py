"""When a worker's rows draft, and how much: measured, chosen step by step, and off where it doesn't pay.

    MEASURING ──▶ ON ◀────────── gain > 1 + MARGIN ──────────┐
     plain steps   │ every PLAIN_EVERY steps: measure again  │
                   │ gain ≤ 1                                │
                   ▼        after `wait` steps               │
                  OFF ───────────────────────▶ PROBING ──────┤
                   ▲                            2 rows draft │
                   └──── wait doubles ◀──── gain ≤ 1 + MARGIN┘

MEASURING: T(n) without drafts is needed to know what drafts gain, at first and again now and then.
ON: `budget.choose` decides each step. A row that gets none probes alone, after ROW_WAIT steps, then twice as many, …
Now and then budgets are halved: were a size measured only together with its drafts, their cost and that of a draft
worker that slows the target could not be told apart.
OFF: costs a few comparisons a step. Is looked at again at once when fewer rows run or another one comes, since that
alone may make drafts pay; and after `wait` steps a few rows draft for PROBE_STEPS, for what was learned may be old.

The caller passes steps and their outcomes; time comes in only as their durations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from math import isfinite
from typing import TypeVar

from scheduler.core.acceptance import PositionTotals, shifted, survival
from scheduler.core.budget import Budget, Load, choose
from scheduler.core.config import CoreConfig
from scheduler.core.draft_kinds import DraftKinds, Kind, Known, kind_of
from scheduler.core.row_drafts import RowDrafts, may_be_read, most_drafted, tokens_left
from scheduler.core.sequence import Sequence
from scheduler.core.step import Step, StepOutcome
from scheduler.core.step_time import AGAIN_STEPS, Curve, Level, StepTimes, completed, measured_again_after

T = TypeVar("T")

MARGIN = 0.05
"""switched on only for more than this; twice as much after each time that didn't pay for long, up to LARGEST_MARGIN"""
LARGEST_MARGIN = 0.2
STAY = 0.01
"""switched off where drafts gain no more than this"""
PLAIN_STEPS = 6
"""plain steps measured before the first draft"""
OLD_SAMPLES = 4
"""of a size's durations so many are kept when it is measured again: fewer than come"""
SETTLING_STEPS = 3
"""plain steps after one with drafts in which the draft worker may still be busy: not measured"""
VARY_EVERY = 32
"""steps after which budgets are halved for once, so that T(n) is known on this side of them; VARY_FIRST at the start"""
VARY_FIRST = 4
READ_TOKENS = 64
"""by which the target's own reading of a token is told from T(n)"""
READING_SHARE = 0.15
"""what reading a token costs at the draft worker, by what it adds to a step of the target; a mirror is opened only for
a sequence that is expected to earn back the reading of all its tokens"""
BEST_ACCEPTANCE = 0.9
BEST_TOKENS = 4
"""so many drafted tokens of such acceptance, as of a copy: where even they would not pay nothing is probed"""
PROBE_STEPS = 8
PROBE_ROWS = 2
PROBE_TOKENS = 2
PROBE_WAIT = 64
LONE_PROBE_WAIT = 256
LONE_PROBE_SHARE = 0.01
"""a new sequence that runs nearly alone is probed after so long, or what makes the last probe's cost this share: what a
step takes changes with the machine, and most hangs on it there"""
LONGEST_PROBE_WAIT = 1024
LONGEST_COSTLY_WAIT = 4096
PROBE_SHARE = 0.005
"""of the time until the next one, what a probe may cost: a dear one is followed by a longer wait"""
ROW_TRIES = 3
GRACE_STEPS = 4
"""steps in which no draft is expected yet: the draft worker has just been told of the sequence"""
UNANSWERED_STEPS = 24
"""steps in a row without a draft after which a row is one that nobody drafts for"""


class Phase(Enum):
    """See the drawing."""

    MEASURING = auto()
    OFF = auto()
    PROBING = auto()
    ON = auto()


class Speculation:
    """One worker's."""

    def __init__(self) -> None:
        self.plain_times = StepTimes()
        self.drafting_times = StepTimes()
        """by the level of their time"""
        self.level = Level()
        self.totals = PositionTotals()
        self.gain = 1.0
        """expected tokens per second by those without drafts, as of the latest choice"""
        self.phase = Phase.MEASURING
        self.kinds = DraftKinds()
        self._plans = 0
        self._chooses = False
        """whether budgets are chosen here; with fixed ones nothing needs to be learned"""
        self._until = PLAIN_STEPS
        self._wait = PROBE_WAIT // 2
        self._margin = MARGIN / 2
        self._probed: tuple[int, ...] = ()
        """ids of the sequences of the latest probe"""
        self._probing_s = 0.0
        """by which the steps of the latest probe were longer than plain ones"""
        self._lone_until = 0
        self._on_since: int | None = None
        self._looked_at_rows = 0
        self._looked_at_plan = 0
        self._newest = 0
        """id of the sequence whose row came last in the latest look"""
        self._plain_in_a_row = SETTLING_STEPS

    # ------------------------------------------------------------------------------------------------- choosing

    def budgets(self, decodes: list[Sequence], num_other_tokens: int, config: CoreConfig) -> list[int] | None:
        """k for each decode row of the next step, in order; None: no row drafts.

        `num_other_tokens`: prompt tokens that the step may compute as well.
        """
        num_rows = len(decodes)
        room = min(config.draft_token_budget, config.token_budget) - num_rows
        if room < 1 or config.max_draft_tokens < 1:
            self.gain = 1.0
            return None
        self._plans += 1
        self._chooses = True
        if self._rests(decodes):
            return None
        if self.phase is Phase.PROBING and self._plans < self._until:
            return self._probe(decodes, room, config.max_draft_tokens)
        survivals = self._survivals(decodes, config.max_draft_tokens, begin=not num_other_tokens)
        if not any(survivals):
            return None
        if self.phase is Phase.ON and self._plans >= self._until:
            self.plain_times.age(OLD_SAMPLES)
            self._enter(Phase.MEASURING, AGAIN_STEPS)
            return None
        return self._look(decodes, survivals, Load(num_rows, num_other_tokens, room), config.max_draft_tokens)

    def _rests(self, decodes: list[Sequence]) -> bool:
        """Whether there is nothing to decide: the step is plain. Cheap."""
        if self.phase is Phase.MEASURING:
            return self._plans < self._until
        if self.phase is not Phase.OFF or self._plans >= self._until:
            return False
        num_rows = len(decodes)
        fewer = num_rows < 0.9 * self._looked_at_rows
        # A look costs by the row; with many rows another one comes every few steps.
        another = decodes[-1].sequence_id != self._newest and self._plans - self._looked_at_plan > num_rows // 8
        return not (fewer or another)

    def _look(
        self, decodes: list[Sequence], survivals: list[list[float]], load: Load, max_draft_tokens: int
    ) -> list[int] | None:
        """Choose; switch on or off accordingly."""
        self._looked_at_rows, self._looked_at_plan = load.num_rows, self._plans
        self._newest = decodes[-1].sequence_id
        plain, drafting = self.plain_times.curve, self.drafting_curve(load.num_rows)
        curves = completed(plain, drafting), completed(drafting, plain)
        was_on = self.phase in (Phase.ON, Phase.MEASURING)
        # What the others have shown says little of one that runs nearly alone: some gain threefold. And where few rows
        # come and go, what a look promises is no luck.
        lone = load.num_rows <= PROBE_ROWS
        most = MARGIN if lone else LARGEST_MARGIN
        margin = STAY if was_on else min(self._margin, most)
        shares = self._by_kind(decodes, lambda known: known.availability.shares(max_draft_tokens))
        chosen = choose(survivals, load, *curves, shares, margin)
        if chosen and (dear := self._dear(decodes, chosen, load)):
            survivals = [[] if row in dear else survival for row, survival in enumerate(survivals)]
            chosen = choose(survivals, load, *curves, shares, margin)
        self.gain = chosen.gain
        if chosen and not self.drafting_times.observed and load.num_rows > PROBE_ROWS:
            # Nothing is known of drafts yet: a few rows are enough to find out.
            self._enter(Phase.PROBING, PROBE_STEPS)
            return self._probe(decodes, load.max_draft_tokens, max_draft_tokens)
        if chosen:
            if self.phase is not Phase.ON:
                if self._on_since is None:
                    self._on_since = self._plans
                self._enter(Phase.ON, measured_again_after(chosen.gain))
            if self._plans % (VARY_EVERY if len(drafting.sizes) > 1 else VARY_FIRST) == 0:
                return [(k + 1) // 2 for k in chosen.drafts]
            self._probe_rows(decodes, survivals, chosen.drafts, load.max_draft_tokens)
            return chosen.drafts
        is_new = lone and decodes[-1].drafts is None
        until = min(self._until, self._lone_until) if is_new else self._until
        if self.phase is Phase.OFF and self._plans >= until:
            return self._begin_probe(decodes, load, max_draft_tokens, curves[0])
        if self.phase is not Phase.OFF:
            self._switch_off()
        return None

    def _dear(self, decodes: list[Sequence], chosen: Budget, load: Load) -> set[int]:
        """Rows of a choice that won't earn back, until they end, what the draft worker must read first.

        A sequence that may go on for n tokens is expected to for n / 2.
        """
        new = [row for row, k in enumerate(chosen.drafts) if k and decodes[row].drafts is None]
        if not new:
            return set()
        plain_s = self.plain_times.curve.at(load.num_rows)
        reading_s = READING_SHARE * (self.plain_times.curve.at(load.num_rows + READ_TOKENS) - plain_s) / READ_TOKENS
        saved_s = plain_s * (1.0 - 1.0 / chosen.gain) / sum(1 for k in chosen.drafts if k)
        dear = set()
        for row in new:
            num_steps = tokens_left(decodes[row]) / 2 / (1 + chosen.drafts[row])
            if num_steps * saved_s < reading_s * len(decodes[row].token_ids):
                dear.add(row)
        return dear

    def _begin_probe(
        self, decodes: list[Sequence], load: Load, max_draft_tokens: int, plain: Curve
    ) -> list[int] | None:
        """A probe, unless prompts are computed, which comes first, or the best of drafts would not pay either."""
        if load.num_other_tokens:
            return None
        best = [survival([BEST_ACCEPTANCE] * min(BEST_TOKENS, max_draft_tokens))] * load.num_rows
        if not choose(best, load, plain, plain, margin=self._margin):
            self._enter(Phase.OFF, self._wait)
            return None
        self.drafting_times.age(OLD_SAMPLES)
        self._probing_s = 0.0
        self._probed = ()
        self._enter(Phase.PROBING, PROBE_STEPS)
        return self._probe(decodes, load.max_draft_tokens, max_draft_tokens)

    def _switch_off(self) -> None:
        """The time until the next probe doubles, unless drafts have paid for long enough since the last."""
        paid_for = 0 if self._on_since is None else self._plans - self._on_since
        self._on_since = None
        paid = paid_for >= self._wait
        self._wait = PROBE_WAIT if paid else min(2 * self._wait, LONGEST_PROBE_WAIT)
        self._margin = MARGIN if paid else min(2 * self._margin, LARGEST_MARGIN)
        cost = self._probing_s / self.plain_times.curve.at(self._looked_at_rows)
        self._probing_s = 0.0
        self._lone_until = self._plans + max(LONE_PROBE_WAIT, int(cost / LONE_PROBE_SHARE))
        self._enter(Phase.OFF, max(self._wait, min(int(cost / PROBE_SHARE), LONGEST_COSTLY_WAIT)))

    def _enter(self, phase: Phase, num_plans: int) -> None:
        self.phase = phase
        self._until = self._plans + num_plans

    def _probe(self, decodes: list[Sequence], room: int, max_draft_tokens: int) -> list[int]:
        """A short budget for a few rows, the same throughout: those that the draft worker reads soonest."""
        drafts = [0] * len(decodes)
        rows = [row for row, sequence in enumerate(decodes) if most_drafted(sequence, max_draft_tokens) > 0]
        rows.sort(
            key=lambda row: (
                decodes[row].sequence_id not in self._probed,
                tokens_left(decodes[row]) < PROBE_STEPS,
                len(decodes[row].token_ids),
            )
        )
        del rows[PROBE_ROWS:]
        self._probed = tuple(decodes[row].sequence_id for row in rows)
        for row in rows:
            drafts[row] = min(PROBE_TOKENS, most_drafted(decodes[row], max_draft_tokens), room)
            room -= drafts[row]
        return drafts

    @staticmethod
    def _probe_rows(decodes: list[Sequence], survivals: list[list[float]], drafts: list[int], room: int) -> None:
        """One token for each row that has had none for long; until a draft has come, or was waited for in vain."""
        room -= sum(drafts)
        for row, (sequence, k) in enumerate(zip(decodes, drafts, strict=True)):
            state = sequence.drafts
            if state is None or not survivals[row]:
                continue
            if k:
                state.waited = 0
                continue
            state.waited += 1
            if state.waited <= state.wait:
                state.unanswered = 0
            elif state.waited > state.wait + 2 * GRACE_STEPS:
                state.end_probe(right=False)
            elif room > 0:
                drafts[row] = 1
                room -= 1

    def _survivals(self, decodes: list[Sequence], max_draft_tokens: int, begin: bool) -> list[list[float]]:
        """Per row, for as many positions as it may draft: none for one that never has, unless drafts may `begin`.

        A draft worker has to read all of a sequence before its first guess. Of those that wait for their prompts each
        will be a row soon, so what pays for the few that run already may be over before that is earned back.
        """

        def curve_and_survival(known: Known) -> tuple[list[float], list[float]]:
            curve = known.acceptance.explored(max_draft_tokens)
            return curve, survival(curve)

        survivals = []
        for sequence, (curve, common) in zip(decodes, self._by_kind(decodes, curve_and_survival), strict=True):
            state = sequence.drafts
            if state is None:
                positions = common if begin else []
            else:
                positions = survival(shifted(curve, state.evidence.odds_ratio))
            most = most_drafted(sequence, max_draft_tokens)
            survivals.append(positions if most >= max_draft_tokens else positions[: max(0, most)])
        return survivals

    def _by_kind(self, sequences: list[Sequence], value: Callable[[Known], T]) -> list[T]:
        """Of each sequence, what `value` makes of what is known of its kind."""
        values: dict[Kind, T] = {}
        found = []
        for sequence in sequences:
            kind = kind_of(sequence)
            if kind not in values:
                values[kind] = value(self.kinds.of(kind))
            found.append(values[kind])
        return found

    def drafting_curve(self, num_rows: int) -> Curve:
        """T(n) of steps of so many rows with drafts, as fast as the machine is now."""
        return self.drafting_times.curve.times(self.level.at(num_rows))

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, step: Step, outcome: StepOutcome) -> None:
        """A step is over."""
        num_rows, drafted = len(step.sequences), any(step.num_draft)
        self._plain_in_a_row = 0 if drafted else self._plain_in_a_row + 1
        if step.num_prefill and not step.num_prefill[-1] and outcome.num_model_tokens:  # decode rows only
            if drafted:
                # With many rows there is always one that is read; of few it says nothing of their later steps.
                if num_rows > PROBE_ROWS or not any(map(may_be_read, step.sequences, step.num_draft)):
                    self.drafting_times.observe(outcome.num_model_tokens, outcome.duration_s / self.level.at(num_rows))
                if self.phase is Phase.PROBING and isfinite(outcome.duration_s):
                    self._probing_s += outcome.duration_s - self.plain_times.curve.at(num_rows)
            elif self._plain_in_a_row > SETTLING_STEPS:
                self.level.observe(num_rows, outcome.duration_s, self.plain_times.start.at(num_rows))
                self.plain_times.observe(outcome.num_model_tokens, outcome.duration_s)
        if drafted and self._chooses:
            self._observe_drafts(step, outcome)
        elif drafted and outcome.num_drafted:
            for (verified, accepted), count in Counter(
                zip(outcome.num_drafted, outcome.num_accepted, strict=True)
            ).items():
                self.totals.observe(verified, accepted, count)

    def _observe_drafts(self, step: Step, outcome: StepOutcome) -> None:
        num_positions = max(step.num_draft)
        curves = self._by_kind(step.sequences, lambda known: known.acceptance.conditional(num_positions))
        nothing = [0] * len(step.sequences)
        rows = zip(
            step.sequences,
            curves,
            step.num_draft,
            outcome.num_drafted or nothing,
            outcome.num_accepted or nothing,
            outcome.num_tokens,
            outcome.finish,
            strict=True,
        )
        verdicts: Counter[tuple[Kind, int, int]] = Counter()
        for sequence, curve, k, drafted, accepted, emitted, finish in rows:
            if not k or not emitted or finish:
                continue  # a run cut by its end says nothing of the tokens behind it
            state = sequence.drafts
            if state is None:
                state = sequence.drafts = RowDrafts()
            kind = kind_of(sequence)
            if not drafted and state.unanswered >= UNANSWERED_STEPS:
                # Nobody drafts for it, whatever the others get: as if every draft were wrong.
                state.evidence.observe(1, 0, curve)
                continue
            self._observe_availability(kind, state, k, drafted)
            if not drafted:
                continue
            drafted = min(drafted, k)
            state.evidence.observe(drafted, accepted, curve)
            verdicts[kind, drafted, accepted] += 1
            if state.waited > state.wait:
                state.failed += not accepted
                if accepted or state.failed >= ROW_TRIES:
                    state.end_probe(accepted > 0)
        for (kind, drafted, accepted), count in verdicts.items():
            self.kinds.of(kind).acceptance.observe(drafted, accepted, count)
            self.totals.observe(drafted, accepted, count)

    def _observe_availability(self, kind: Kind, state: RowDrafts, k: int, drafted: int) -> None:
        if drafted:
            state.unanswered = GRACE_STEPS
        else:
            state.unanswered += 1
            if state.unanswered <= GRACE_STEPS:
                return
        self.kinds.of(kind).availability.observe(k, drafted)
