"""Requests choose who drafts for them; tenants copy from their own outputs only; tokens are plain decoding's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tandem.v1 import types_pb2

from tests.integration.harness import OWN, Cluster, expected_tokens, receive, request, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 96
PROMPT = list(b"Say it once and say it again, say it once and")


@pytest.fixture(scope="module", params=["draft worker", OWN])
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"scheduler": {"speculation": "fixed"}, "fake_step_ms": 3}
    own = request.param == OWN
    if own:
        options |= {"draft": OWN, "proposer": "combined"}
    async with running(tmp_path_factory.mktemp("cluster"), **options) as started:
        if not own:
            await started.add_draft_worker("draft", "fake", proposer="combined")
            await started.until_serving(1, drafting=True)
            assert (await started.status()).draft_workers[0].proposer == "ngram+fake"
        yield started


async def answer(cluster: Cluster, mode: int, salt: str = "", **params: Any) -> Any:
    message = request(PROMPT, LENGTH, cache_salt=salt, **params)
    message.speculation.mode = mode
    found = await receive(cluster.stub().GenerateStream(message))
    params = {"seed": 7, **params}
    assert found.tokens[0] == expected_tokens(PROMPT, LENGTH, **params)
    return found.usage


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_every_proposer_gives_plain_tokens(cluster: Cluster, temperature: float) -> None:
    modes = types_pb2.SpeculationMode
    for mode in (modes.SPECULATION_MODE_OFF, modes.SPECULATION_MODE_NGRAM):
        usage = await answer(cluster, mode, temperature=temperature)
        assert mode != modes.SPECULATION_MODE_OFF or usage.drafted_tokens == 0
    for mode in (
        modes.SPECULATION_MODE_UNSPECIFIED,
        modes.SPECULATION_MODE_MODEL,
        modes.SPECULATION_MODE_COMBINED,
    ):
        accepted = drafted = 0
        # How much is drafted in time is a matter of speed, so again until enough was.
        async with asyncio.timeout(60):
            while not 0 < accepted < drafted:
                usage = await answer(cluster, mode, temperature=temperature)
                accepted, drafted = accepted + usage.accepted_tokens, drafted + usage.drafted_tokens


async def test_a_tenant_copies_from_its_own_outputs(cluster: Cluster) -> None:
    """The same answer again: drafts from memory are right, for whoever had it before and for nobody else."""
    mode, params = types_pb2.SPECULATION_MODE_NGRAM, {"temperature": 1.0, "seed": 99}
    first = await answer(cluster, mode, "mine", **params)
    async with asyncio.timeout(60):
        # The memory learns an output once its slot is closed, which follows the answer.
        while (await answer(cluster, mode, "mine", **params)).accepted_tokens < LENGTH // 2:
            continue
    for salt in ("another's", ""):
        usage = await answer(cluster, mode, salt, **params)
        assert usage.accepted_tokens <= first.accepted_tokens + 4 < LENGTH // 4
