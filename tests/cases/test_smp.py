"""Sampling, from what a client asks for to what it gets: cases 12, 28 and 30."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.text import ModelText
from tests.cases.cell import PIECE_IDS, ForcedEngine, whole_cell
from tests.integration.harness import expected_tokens, receive, request


async def test_case_12_no_spelling_of_a_bad_word_is_let_through(folder: Path) -> None:
    """The model wants nothing but "Rome": in letters, after a space, as one token of either form."""
    whole, spaced = PIECE_IDS["Rome"], PIECE_IDS[" Rome"]
    script = [*b"Rome Rome", whole, spaced, *b"Ro.Rom.", *b"R"]
    async with whole_cell(folder, ForcedEngine({ord("p"): (1, script)})) as cell:
        free = await receive(cell.stub.GenerateStream(request("p", len(script))))
        assert free.texts[0] == "Rome RomeRome RomeRo.Rom.R"
        message = request("p", len(script))
        message.sampling.bad_words.append("Rome")
        banned = await receive(cell.stub.GenerateStream(message))
    changed = [at for at, (a, b) in enumerate(zip(free.tokens[0], banned.tokens[0], strict=True)) if a != b]
    assert changed == [3, 8, 9, 10], "the last token of each spelling, and nothing else"
    assert "Rome" not in banned.texts[0]


def test_case_12_a_vocabulary_with_holes_hides_no_form(folder: Path, tmp_path: Path) -> None:
    """The ids of both tokens lie beyond the number of tokens."""
    path = shutil.copytree(folder, tmp_path / "holes")
    for name, change in (("tokenizer.json", _move_rome), ("config.json", lambda config: config.update(vocab_size=500))):
        content = json.loads((path / name).read_text())
        change(content)
        (path / name).write_text(json.dumps(content))
    forms = ModelText("holes", path).bad_word_sequences("Rome")
    assert {(400,), (401,), tuple(b"Rome")} <= set(forms)


def _move_rome(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] |= {"Rome": 400, "ĠRome": 401}


async def test_case_12_a_bad_word_never_appears_where_it_is_likely(folder: Path) -> None:
    async with whole_cell(folder) as cell:
        answers = []
        for bad_words in ([], ["Rome"]):
            message = request("of", 250, temperature=1.0)
            message.sampling.logit_bias.update(dict.fromkeys(map(ord, "Rome "), 6.0))
            message.sampling.logit_bias.update(dict.fromkeys((PIECE_IDS["Rome"], PIECE_IDS[" Rome"]), 39.5))
            message.sampling.bad_words.extend(bad_words)
            answers.append(await receive(cell.stub.GenerateStream(message)))
    free, banned = answers
    assert free.texts[0].count("Rome") > 20, "the word is too unlikely to show anything"
    assert free.texts[0].count(" Rome") > 5
    assert "Rome" not in banned.texts[0]
    assert banned.texts[0].count("R") > 20, "only the word itself is banned"


async def test_case_28_penalties_are_the_same_cold_and_warm(folder: Path) -> None:
    prompt = list(b"say the same thing, say it twice, say it cold and warm")
    truth = expected_tokens(prompt, 48, repetition_penalty=1.3)
    assert truth != expected_tokens(prompt, 48), "the penalty changes nothing here"
    async with whole_cell(folder) as cell:
        for cached in (0, 48):
            answer = await receive(cell.stub.GenerateStream(request(prompt, 48, repetition_penalty=1.3)))
            assert answer.usage.cached_tokens == cached
            assert answer.tokens[0] == truth


async def test_case_30_one_penalised_request_among_plain_ones(folder: Path) -> None:
    """Each gives what it gives alone; one that the engine cannot serve is all that fails."""
    engine = ForcedEngine(fail_on_token_ids=frozenset({7}), step_ms=1)
    async with whole_cell(folder, engine) as cell:
        penalised: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
        params = [{}, {}, penalised, {"temperature": 0.9}, {}]
        prompts = [list(f"request {index}".encode()) for index in range(5)]
        bad = asyncio.ensure_future(
            receive(cell.stub.GenerateStream(request([*b"bad", 7], 40, repetition_penalty=1.4)))
        )
        calls = [
            receive(cell.stub.GenerateStream(request(prompt, 40, **given)))
            for prompt, given in zip(prompts, params, strict=True)
        ]
        answers = await asyncio.gather(*calls)
        with pytest.raises(grpc.aio.AioRpcError, match="not finite"):
            await bad
        for prompt, given, answer in zip(prompts, params, answers, strict=True):
            assert answer.tokens[0] == expected_tokens(prompt, 40, **given)
        await cell.until_idle()
