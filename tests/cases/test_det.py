"""Streamed text and stopping, from forced tokens to what a client reads: cases 1, 4, 5, 7, 10 and 13."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tandem.v1 import types_pb2

from tests.cases.cell import EOS, PIECE_IDS, ForcedEngine, WholeCell, whole_cell
from tests.integration.harness import request

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
FOX = "🦊好"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def pieces(*texts: str) -> list[int]:
    return [PIECE_IDS[text] if text in PIECE_IDS else ord(text) for text in texts]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(folder: Path) -> AsyncIterator[WholeCell]:
    # Slow enough for every token to travel alone.
    async with whole_cell(folder, ForcedEngine(step_ms=2)) as started:
        yield started


async def say(cell: WholeCell, script: Sequence[int], max_tokens: int = 64, **stop: Any) -> tuple[list[Any], Any]:
    """A stream's deltas and a whole answer, after the prompt "p" that is answered with `script`, then with "z"."""
    cell.engine.scripts[ord("p")] = (1, [*script, *b"z" * 64])
    message = request("p", max_tokens)
    message.stop.ignore_eos = False
    for name, value in stop.items():
        getattr(message.stop, name).extend(value) if isinstance(value, list) else setattr(message.stop, name, value)
    deltas = [delta async for response in cell.stub.GenerateStream(message) for delta in response.deltas]
    choice = (await cell.whole(message)).choices[0]
    await cell.until_idle()
    check_both_agree(deltas, choice)
    return deltas, choice


def check_both_agree(deltas: list[Any], choice: Any) -> None:
    """Streamed or not: the same text, ids and end."""
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(choice.token_ids)
    assert deltas[-1].finish_reason == choice.finish_reason
    assert (deltas[-1].stop_string, deltas[-1].stop_token_id) == (choice.stop_string, choice.stop_token_id)


async def test_case_1_characters_of_several_tokens_come_whole(cell: WholeCell) -> None:
    deltas, choice = await say(cell, list(FOX.encode()), max_tokens=7)
    assert choice.text == FOX
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert (list(choice.token_ids), choice.finish_reason) == (list(FOX.encode()), LENGTH)


@pytest.mark.parametrize(("max_tokens", "text"), [(6, "🦊"), (5, "🦊"), (4, "🦊"), (3, "")])
async def test_case_1_an_incomplete_character_at_max_tokens_has_no_text(
    cell: WholeCell, max_tokens: int, text: str
) -> None:
    deltas, choice = await say(cell, list(FOX.encode()), max_tokens=max_tokens)
    assert (choice.text, len(choice.token_ids)) == (text, max_tokens)
    assert all("\ufffd" not in delta.text for delta in deltas)


async def test_case_4_nothing_of_a_stop_string_is_sent_before_it_completes(cell: WholeCell) -> None:
    deltas, choice = await say(cell, pieces("QR", "S", "TU"), strings=["QRSTU"])
    assert [delta.text for delta in deltas] == ["", "", ""]
    assert (choice.text, choice.finish_reason, choice.stop_string) == ("", STOP, "QRSTU")
    assert list(choice.token_ids) == pieces("QR", "S", "TU")


@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a b c")])
async def test_case_5_a_stop_across_tokens_is_cut_where_it_stands(cell: WholeCell, include: bool, text: str) -> None:
    _, choice = await say(cell, pieces("a b", " cd"), strings=["b c"], include_stop=include)
    assert (choice.text, choice.finish_reason, choice.stop_string) == (text, STOP, "b c")


async def test_case_7_what_was_held_back_comes_at_the_end_of_sequence(cell: WholeCell) -> None:
    deltas, choice = await say(cell, [*pieces("the", " end"), EOS], strings=["end###"])
    assert (choice.text, choice.finish_reason, choice.stop_token_id) == ("the end", STOP, EOS)
    assert deltas[-1].text == "end", "it was never held back"


@pytest.mark.parametrize("stop", [{"strings": ["S"]}, {"token_ids": [ord("S")]}])
async def test_case_10_a_list_of_one_stop_of_one_token_stops(cell: WholeCell, stop: dict[str, Any]) -> None:
    _, choice = await say(cell, list(b"abSd"), **stop)
    assert (choice.text, choice.finish_reason) == ("ab", STOP)
    assert list(choice.token_ids) == list(b"abS")


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        (b"\n" * 20, {"strings": ["\n"]}, "\n" * 7),
        ([10] * 20, {"token_ids": [10]}, None),
        ([EOS] * 20, {}, None),
    ],
    ids=["stop string", "stop token", "end of sequence"],
)
async def test_case_13_no_stop_of_any_kind_beats_min_tokens(
    cell: WholeCell, script: Sequence[int], stop: dict[str, Any], text: str | None
) -> None:
    """A stop string is let through until then; a stop token is banned, so that something else takes its place."""
    _, choice = await say(cell, list(script), min_tokens=8, **stop)
    if text is not None:
        assert choice.text == text
        assert len(choice.token_ids) == 8
    else:
        assert script[0] not in list(choice.token_ids)[:8]
        assert len(choice.token_ids) == 9
    assert choice.finish_reason == STOP
