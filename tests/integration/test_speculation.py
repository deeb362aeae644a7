"""Drafts through the whole cluster: several workers and draft workers, run-ahead with branches, one of them killed."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster, expected_tokens, receive, request, running

LENGTH = 60


async def gauge(cluster: Cluster, name: str, metric: str) -> float:
    """A number of a draft worker's /metrics page, whose port its log tells."""
    log = cluster.processes[name].log.read_text()
    port = next(
        word.split("=")[1]
        for line in log.splitlines()
        if "metrics served" in line
        for word in line.split()
        if word.startswith("port=")
    )

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            return str(page.read().decode())

    lines = (await asyncio.to_thread(read)).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tandem_{metric}"))


@pytest.mark.timeout(300)
async def test_two_workers_two_draft_workers_and_one_of_them_killed(tmp_path: Path) -> None:
    scheduler = {"speculation": "fixed"}
    async with running(tmp_path, workers=2, scheduler=scheduler, fake_step_ms=40) as cluster:
        flags: dict[str, Any] = {"branches": 3, "metrics_port": 0, "fake_disagreement": 0.3}
        await asyncio.gather(*(cluster.add_draft_worker(name, "fake", **flags) for name in ("draft-0", "draft-1")))
        await cluster.until_status(
            lambda status: len(status.draft_workers) == 2 and all(one.drafting for one in status.workers)
        )
        stub = cluster.stub()
        cases = []
        for index in range(12):
            params: dict[str, Any] = {"temperature": (0.0, 0.8)[index % 2], "seed": 1000 + index}
            cases.append((list(f"{index}: tell me".encode()), LENGTH + index, params))
        killed = asyncio.Event()

        def on_token(count: int) -> None:
            if count > LENGTH // 2 and not killed.is_set():
                killed.set()
                cluster.processes["draft-1"].kill()

        calls = [stub.GenerateStream(request(prompt, length, **params)) for prompt, length, params in cases]
        answers = await asyncio.gather(
            *(receive(call, on_token if index == 0 else None) for index, call in enumerate(calls))
        )
        assert killed.is_set()
        for (prompt, length, params), answer in zip(cases, answers, strict=True):
            seed = params.pop("seed")
            assert answer.tokens[0] == expected_tokens(prompt, length, seed=seed, **params)
        drafted = sum(answer.usage.drafted_tokens for answer in answers)
        assert 0 < sum(answer.usage.accepted_tokens for answer in answers) < drafted
        # The other one takes all that is left, and what comes now.
        await cluster.until_status(
            lambda status: len(status.draft_workers) == 1 and all(one.drafting for one in status.workers)
        )
        before = await gauge(cluster, "draft-0", "draft_tokens_guessed")
        assert before > 0
        answer = await receive(stub.GenerateStream(request("and then", 100)))
        assert answer.usage.accepted_tokens > 0
        assert answer.tokens[0] == expected_tokens(list(b"and then"), 100)
        assert await gauge(cluster, "draft-0", "draft_tokens_guessed") > before
        await cluster.assert_baseline()


@pytest.mark.timeout(300)
async def test_a_request_bounds_its_own_drafts(tmp_path: Path) -> None:
    async with running(tmp_path, draft="fake", scheduler={"speculation": "fixed"}, fake_step_ms=20) as cluster:
        message = request("Once", 80)
        for max_draft_tokens in (0, 1):
            message.speculation.max_draft_tokens = max_draft_tokens
            answer = await receive(cluster.stub().GenerateStream(message))
            assert answer.tokens[0] == expected_tokens(list(b"Once"), 80)
            assert (answer.usage.drafted_tokens > 0) is (max_draft_tokens > 0)
            assert answer.usage.drafted_tokens <= 80 * max_draft_tokens
        # A proposer that isn't there makes none.
        message.speculation.ClearField("max_draft_tokens")
        message.speculation.mode = 3
        answer = await receive(cluster.stub().GenerateStream(message))
        assert answer.usage.drafted_tokens == 0
        message.speculation.mode = 4
        answer = await receive(cluster.stub().GenerateStream(message))
        assert answer.usage.drafted_tokens > 0
