"""The step thread on an engine that runs ahead: what is launched when, what lands before what, and how it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from engine.fake import FakeEngine
from engine.noise import choice_seed
from engine.stream import Mark, ThreadStream
from worker.executor import EngineBroken, Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.stepping import StepThread
from worker.steps import Admission, SamplingParams, Step, StepOutcome

PROMPT = [ord(c) for c in "It was a bright cold day in April"]
LIMIT_S = 30


class GatedStream:
    """A stream on a thread, each of whose pieces of work waits for a permit."""

    def __init__(self) -> None:
        self.inner = ThreadStream()
        self.permits = threading.Semaphore(0)
        self.num_submitted = 0
        self.is_broken = False

    def submit(self, work: Callable[[], None]) -> None:
        self.num_submitted += 1

        def gated() -> None:
            assert self.permits.acquire(timeout=LIMIT_S)
            if self.is_broken:
                raise RuntimeError("the device has gone")
            work()

        self.inner.submit(gated)

    def mark(self) -> Mark:
        return self.inner.mark()


@dataclass
class Rig:
    steps: StepThread
    stream: GatedStream
    engine: FakeEngine
    outcomes: asyncio.Queue[StepOutcome]
    number: int = 0
    tokens: list[int] = field(default_factory=list)

    def submit(self, *, max_draft: int = 0, admissions: list[Admission] | None = None) -> None:
        """A step of one row, a chunk if it is admitted by this step."""
        self.number += 1
        prefill = 99 if admissions else 0
        self.steps.submit(
            Step(
                term=1,
                epoch=1,
                number=self.number,
                admissions=admissions or [],
                slots=[0],
                num_prefill_tokens=[prefill],
                max_draft_tokens=[max_draft],
                num_new_blocks=[0],
            )
        )

    def admit(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=16)
        blocks = list(range(20))
        self.submit(admissions=[Admission(0, 1, PROMPT, len(PROMPT), 0, params, 7, blocks, 0)])

    async def outcome(self) -> StepOutcome:
        found = await asyncio.wait_for(self.outcomes.get(), LIMIT_S)
        self.tokens += found.token_ids
        return found

    async def until_submitted(self, count: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        while self.stream.num_submitted < count:
            assert time.monotonic() < end_s, f"{self.stream.num_submitted} of {count} are launched"
            await asyncio.sleep(0.001)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    outcomes: asyncio.Queue[StepOutcome] = asyncio.Queue()
    stream = GatedStream()
    engine = FakeEngine(num_blocks=64, block_size=4, max_sequences=4, max_model_len=256, run_ahead=True, stream=stream)
    steps = StepThread(outcomes.put_nowait)
    steps.adopt(Executor(engine, SequenceTable(limits_of(engine.info), choice_seed), NoDrafting()))
    yield Rig(steps, stream, engine, outcomes)
    stream.permits.release(100)
    await steps.close(LIMIT_S)


async def test_the_next_step_is_launched_before_this_ones_tokens_are_there(
    rig: Rig, plain_tokens: Callable[..., list[int]]
) -> None:
    rig.admit()
    rig.submit()
    await rig.until_submitted(2)
    assert rig.outcomes.empty()
    assert rig.steps.running_step_s() > 0
    for _ in range(10):
        rig.stream.permits.release()
        await rig.outcome()
        # One is known, one is on the device: the next goes behind it.
        rig.submit()
        await rig.until_submitted(rig.number)
        assert rig.outcomes.empty()
    rig.stream.permits.release(2)
    await rig.outcome()
    await rig.outcome()
    assert rig.tokens == plain_tokens(PROMPT, 7, 0.0, 16)[:12]
    assert rig.steps.running_step_s() == 0


async def test_a_step_that_needs_the_host_waits_for_those_before_it(
    rig: Rig, plain_tokens: Callable[..., list[int]]
) -> None:
    rig.admit()
    rig.submit(max_draft=3)
    await rig.until_submitted(1)
    assert rig.outcomes.empty()
    rig.stream.permits.release()
    numbers = [(await rig.outcome()).number for _ in range(2)]
    assert numbers == [1, 2]
    assert rig.stream.num_submitted == 1  # it was run, not launched
    rig.submit()
    rig.stream.permits.release()
    await rig.outcome()
    assert rig.tokens == plain_tokens(PROMPT, 7, 0.0, 16)[:3]


async def test_what_is_called_between_steps_finds_them_landed(rig: Rig) -> None:
    rig.admit()
    rig.submit()
    await rig.until_submitted(2)
    calling = asyncio.ensure_future(rig.steps.call(lambda executor: executor.sequences.residents()))
    done, _ = await asyncio.wait([calling], timeout=0.05)
    assert not done
    rig.stream.permits.release(2)
    (resident,) = await asyncio.wait_for(calling, LIMIT_S)
    assert resident.num_computed_tokens == len(PROMPT) + 1
    assert rig.outcomes.qsize() == 2  # they were told before


async def test_settling_waits_for_what_is_on_the_device(rig: Rig) -> None:
    rig.admit()
    rig.submit()
    await rig.until_submitted(2)
    settling = asyncio.ensure_future(rig.steps.settle())
    done, _ = await asyncio.wait([settling], timeout=0.05)
    assert not done
    rig.stream.permits.release(2)
    await asyncio.wait_for(settling, LIMIT_S)
    assert [(await rig.outcome()).number for _ in range(2)] == [1, 2]
    rig.submit()
    rig.submit()
    rig.stream.permits.release(2)
    assert [(await rig.outcome()).number for _ in range(2)] == [3, 4]


async def test_closing_waits_for_what_is_on_the_device(rig: Rig) -> None:
    rig.admit()
    await rig.until_submitted(1)
    closing = asyncio.ensure_future(rig.steps.close(LIMIT_S))
    done, _ = await asyncio.wait([closing], timeout=0.05)
    assert not done
    rig.stream.permits.release()
    await closing
    assert (await rig.outcome()).number == 1
    assert not rig.steps._thread.is_alive()


async def test_a_device_that_has_gone_ends_the_thread(rig: Rig) -> None:
    """Nothing that it was given comes back, nor what is computed again."""
    rig.admit()
    rig.submit()
    await rig.until_submitted(2)
    rig.stream.is_broken = True

    def fail(batch: object) -> None:
        raise RuntimeError("the device has gone")

    rig.engine.forward = fail  # type: ignore[assignment,method-assign]
    rig.stream.permits.release(3)
    first = await rig.outcome()
    assert [failure.reason for failure in first.failures] == ["ENGINE_FAILED"]
    rig.submit()  # of a sequence that has ended: nothing to compute
    assert (await rig.outcome()).num_tokens == [0]
    assert (await rig.outcome()).num_tokens == [0]
    rig.admit()
    assert isinstance(await asyncio.wait_for(rig.steps.failed, LIMIT_S), EngineBroken)
