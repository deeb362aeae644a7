"""A cluster whose workers run ahead: short of blocks, with rows that need the host, streams that stop or are left
alone, and a worker killed. Every token is what it would have been, and nothing is held in the end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.integration.harness import Answer, expected_tokens, receive, request, running

LENGTHS = (90, 105, 120, 75, 110, 96, 80, 115)


def prompt_of(index: int) -> list[int]:
    return list(f"{'A shared beginning of a few blocks. ' * (index % 2)}number {index}".encode())


def params_of(index: int) -> dict[str, Any]:
    """Two of eight can't be launched ahead."""
    params: dict[str, Any] = {"temperature": 0.8 if index % 3 else 0.0, "seed": index}
    return params | ({"top_p": 0.9} if index in (3, 6) else {})


async def test_every_token_is_what_it_would_have_been(tmp_path: Path) -> None:
    expected = {
        index: expected_tokens(prompt_of(index), length, **params_of(index)) for index, length in enumerate(LENGTHS)
    }
    stops = {index: expected[index][30] for index in (1, 4)}  # found out a step after the next was launched
    for index, token_id in stops.items():
        expected[index] = expected[index][: expected[index].index(token_id) + 1]
    async with running(tmp_path, workers=2, run_ahead="on", fake_step_ms=10, num_blocks=16) as cluster:
        for index in range(2):
            assert "runs_ahead=True" in cluster.processes[f"worker-{index}"].tail()
        stub = cluster.stub()

        def call(index: int) -> Any:
            message = request(prompt_of(index), LENGTHS[index], **params_of(index))
            if index in stops:
                message.stop.token_ids.append(stops[index])
            return stub.GenerateStream(message)

        def watch(count: int) -> None:
            if count == 20:
                cluster.processes["worker-0"].kill()

        async def leave(index: int) -> None:
            """Take a few tokens and hang up."""
            left, answer = call(index), Answer()
            async for response in left:
                answer.take(response)
                if len(answer.tokens.get(0, [])) >= 5:
                    break
            left.cancel()

        async with asyncio.timeout(120):
            answers, _ = await asyncio.gather(
                asyncio.gather(*(receive(call(index), watch if index == 0 else None) for index in range(8))),
                asyncio.gather(*(leave(index) for index in (5, 7))),
            )
        for index, answer in enumerate(answers):
            shown = expected[index][: len(answer.tokens[0])]
            assert answer.tokens[0] == shown, index
            assert len(expected[index]) - len(shown) <= (index in stops), index  # the stop itself may be left out
        counters = (await cluster.status()).counters
        assert counters.preemptions > 0
        assert counters.resumptions > 0
        await cluster.restore(workers=2)
        await cluster.assert_baseline()
