"""Workers that guess for themselves: killed, told which folder to use, asked for another tokenizer's drafts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.fake_model import write_fake_model
from tests.integration.harness import MODEL, OWN, expected_tokens, receive, request, running

LENGTH = 60


@pytest.mark.timeout(300)
async def test_a_killed_worker_costs_nobody_a_token(tmp_path: Path) -> None:
    options: dict[str, Any] = {"scheduler": {"speculation": "fixed"}, "fake_step_ms": 5, "draft": OWN}
    async with running(tmp_path, workers=2, **options) as cluster:
        status = await cluster.status()
        assert [worker.drafting for worker in status.workers] == [True, True]
        assert not status.draft_workers
        stub = cluster.stub()
        cases = []
        for index in range(16):
            params: dict[str, Any] = {"temperature": (0.0, 0.8)[index % 2], "seed": 1000 + index}
            cases.append((list(f"{index}: tell me".encode()), LENGTH + index, params))
        killed = asyncio.Event()

        def on_token(count: int) -> None:
            if count > LENGTH // 3 and not killed.is_set():
                killed.set()
                cluster.processes["worker-1"].kill()

        calls = [stub.GenerateStream(request(prompt, length, **params)) for prompt, length, params in cases]
        answers = await asyncio.gather(
            *(receive(call, on_token if index == 0 else None) for index, call in enumerate(calls))
        )
        for (prompt, length, params), answer in zip(cases, answers, strict=True):
            seed = params.pop("seed")
            assert answer.tokens[0] == expected_tokens(prompt, length, seed=seed, **params)
        assert sum(answer.usage.resumptions for answer in answers) > 0
        drafted = sum(answer.usage.drafted_tokens for answer in answers)
        assert 0 < sum(answer.usage.accepted_tokens for answer in answers) < drafted
        (worker,) = await left(cluster)
        assert worker.drafting_s > 0
        await cluster.assert_baseline()


async def left(cluster: Any) -> list[Any]:
    """The workers, once one has gone."""
    status = await cluster.until_status(lambda status: len(status.workers) == 1)
    return list(status.workers)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--draft-model=nowhere"], "not by --draft-model nowhere"),
        (["--draft-model=fake", "--proposer=nobody"], "nobody"),
        (["--draft-model=ngram", "--proposer=model"], "--draft-model FOLDER"),
    ],
)
async def test_a_draft_that_can_not_be_is_refused_by_name(tmp_path: Path, flags: list[str], why: str) -> None:
    folder = tmp_path / MODEL
    write_fake_model(folder)
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "worker", f"--model={folder}", "--engine=fake", "--draft=own", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    said, _ = await asyncio.wait_for(worker.communicate(), 60)
    assert worker.returncode == 2
    assert why in said.decode()
    assert "Traceback" not in said.decode()
