"""compose.yaml for real: started, scaled, killed, handed over, drained. Each test goes on where the last one ended."""

from __future__ import annotations

import asyncio
import time
import tomllib

import pytest

from tandem_client import SyncTandemClient
from tandem_client.types import Options
from tests.containers import streams
from tests.containers.images import engine, run
from tests.containers.stack import Stack
from tests.containers.streams import Load

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]

GRACE_S = 70.0
"""of workers and schedulers, as compose.yaml has it"""


@pytest.fixture(scope="module")
def address(stack: Stack) -> str:
    """Where the first gateway is published."""
    stack.until_healthy("gateway")
    return published(stack, *stack.containers("gateway"))


@pytest.fixture(scope="module")
def load(stack: Stack, address: str) -> Load:
    """What every test runs."""
    if stack.overlay == "fake":
        return streams.fake_load()
    return asyncio.run(streams.real_load(address, served(address)))


def served(address: str) -> str:
    """The one model's name."""
    with SyncTandemClient(address) as client:
        (model,) = client.models()
    return model.name


def workers(address: str) -> int:
    """Workers of the model that the gateway knows of."""
    with SyncTandemClient(address) as client:
        return client.models()[0].workers


def published(stack: Stack, container: str) -> str:
    """HOST:PORT of a gateway, for clients on this machine."""
    return run(engine(), "port", container, "50051").split()[-1]


def test_everything_is_healthy(stack: Stack, address: str) -> None:
    for service in ("redis", "scheduler", "standby", "worker", "draft", "gateway"):
        stack.until_healthy(service)
    (model,) = stack.containers("model", stopped=True)
    state = stack.inspect(model)["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)
    with SyncTandemClient(address) as client:
        answer = client.generate("Once upon a time", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == 8


def test_alive_and_ready_are_told_apart(stack: Stack, address: str) -> None:
    (container,) = stack.containers("gateway")
    probe = ("python", "-m", "cluster.probe", "127.0.0.1:50051")
    assert "SERVING" in run(engine(), "exec", container, *probe)
    assert "SERVICE_UNKNOWN" in run(engine(), "exec", container, *probe, "--service=other", "--live")
    assert "SERVICE_UNKNOWN" in run(engine(), "exec", container, *probe, "--service=other", check=False)


def test_the_shipped_draft_drafts(stack: Stack, address: str) -> None:
    """Who drafts by default: for the default model the one that comes with it, out of the image."""
    (container,) = stack.containers("draft")
    draft = tomllib.loads(run(engine(), "exec", container, "cat", "/cache/cluster.toml"))["draft_worker"]["draft"]
    if stack.overlay == "fake":
        assert draft == "ngram"
        return
    assert draft.endswith("/drafts/smollm2-135m-instruct")
    assert not draft.startswith("/cache"), "nothing was fetched"
    assert f"draft model ready  folder={draft}" in run(engine(), "logs", container)


def test_tokens_are_right(stack: Stack, address: str, load: Load) -> None:
    stack.until(lambda: stack.status()["workers"][0]["drafting"], "a worker that has found the draft worker")
    answers = asyncio.run(streams.run(address, load))
    assert all(answer.usage.resumptions == 0 for answer in answers)
    assert sum(answer.usage.drafted_tokens for answer in answers) > 0


def test_another_worker(stack: Stack, address: str) -> None:
    stack.up(workers=2)
    stack.until_healthy("worker", 2)
    stack.until(lambda: workers(address) == 2, "a gateway that knows both workers")
    packed = run(engine(), "exec", stack.containers("worker")[0], "sh", "-c", "ls /cache/packed || true")
    assert len([name for name in packed.split() if "-" in name]) == (stack.overlay == "real"), "packed once for both"


def test_a_killed_worker_costs_nothing(stack: Stack, address: str, load: Load) -> None:
    victim = stack.containers("worker")[0]
    answers = asyncio.run(streams.run(address, load, lambda: stack.crash(victim)))
    assert sum(answer.usage.resumptions for answer in answers) > 0
    # Its restart policy brings it back.
    stack.until(lambda: workers(address) == 2, "two workers again")


def test_the_standby_takes_over(stack: Stack, address: str, load: Load) -> None:
    before = stack.status()
    leader = before["leader"].split(":")[0]
    asyncio.run(streams.run(address, load, lambda: stack.stop(leader)))
    after = stack.status()
    assert after["term"] > before["term"]
    assert after["leader"].split(":")[0] == {"scheduler": "standby", "standby": "scheduler"}[leader]
    stack.up(workers=2)
    stack.until_healthy(leader)


def test_redis_is_not_missed(stack: Stack, address: str, load: Load) -> None:
    stack.stop("redis")
    asyncio.run(streams.run(address, load))
    stack.up(workers=2)
    stack.until_healthy("redis")


def test_a_rolling_upgrade(stack: Stack, address: str, load: Load) -> None:
    """As docs/containers.md has it: containers made anew, one service after the other, while streams run."""

    def renew() -> None:
        for service in ("standby", "scheduler", "draft"):
            stack.compose("up", "-d", "--no-build", "--no-deps", "--force-recreate", service)

    before = stack.containers()
    asyncio.run(streams.run(address, load, renew))
    for service in ("standby", "scheduler", "draft"):
        stack.until_healthy(service)
    assert len(set(before) - set(stack.containers())) == 3


def test_a_killed_gateway_costs_a_pause(stack: Stack, load: Load) -> None:
    """Clients that know another one go on there."""
    stack.up(workers=2, gateways=2)
    stack.until_healthy("gateway", 2)
    first, second = stack.containers("gateway")
    message = load.requests[0]
    tokens: list[int] = []
    prompt = message.text or list(message.token_ids.ids)
    options: Options = {"temperature": message.sampling.temperature, "seed": 7, "ignore_eos": True}
    options["max_tokens"] = message.stop.max_tokens
    addresses = [published(stack, one) for one in (first, second)]
    with SyncTandemClient(*addresses) as client:
        for chunk in client.stream(prompt, **options):
            began = not tokens
            tokens += [token for delta in chunk.deltas for token in delta.token_ids]
            if began:
                stack.crash(first)
    assert tokens == load.expected[0]
    stack.until_healthy("gateway", 2)
    assert stack.inspect(first)["RestartCount"] > 0, "it was the one that was killed, and it is back"


def test_one_worker_less(stack: Stack, address: str, load: Load) -> None:
    """Scaling down under load: the one that goes hands over what it runs."""
    asyncio.run(streams.run(address, load, lambda: stack.up(workers=1)))
    stack.until(lambda: workers(address) == 1, "one worker left")


def test_draining_within_the_grace(stack: Stack, address: str, load: Load) -> None:
    """Nobody is left to hand over to: the last worker finishes what it runs, and ends by itself."""
    (last,) = stack.containers("worker")
    elapsed_s = 0.0

    def stop() -> None:
        nonlocal elapsed_s
        began = time.monotonic()
        stack.stop("worker")
        elapsed_s = time.monotonic() - began

    asyncio.run(streams.run(address, load, stop))
    assert elapsed_s < GRACE_S
    assert stack.inspect(last)["State"]["ExitCode"] == 0
