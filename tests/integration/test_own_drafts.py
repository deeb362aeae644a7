"""Workers that guess for themselves: killed, and told to guess with what can't be."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.fake_model import write_fake_model
from tests.integration.harness import MODEL, OWN, running
from tests.integration.test_failures import run_crowd


@pytest.mark.timeout(300)
async def test_a_killed_worker_costs_nobody_a_token(tmp_path: Path) -> None:
    options: dict[str, Any] = {"scheduler": {"speculation": "fixed"}, "fake_step_ms": 5, "draft": OWN}
    async with running(tmp_path, workers=2, **options) as cluster:
        status = await cluster.status()
        assert [worker.drafting for worker in status.workers] == [True, True]
        assert not status.draft_workers
        answers = await run_crowd(cluster, {20: cluster.processes["worker-1"].kill})
        assert sum(answer.usage.resumptions for answer in answers) > 0
        drafted = sum(answer.usage.drafted_tokens for answer in answers)
        assert 0 < sum(answer.usage.accepted_tokens for answer in answers) < drafted
        (worker,) = (await cluster.until_status(lambda status: len(status.workers) == 1)).workers
        assert worker.drafting_s > 0
        await cluster.assert_baseline()


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
