"""Whatever a client sends: an answer or a refusal that names the culprit, never a broken gateway."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from tandem.v1 import generation_pb2

from cluster import errors

from .calls import LENGTH, collect
from .conftest import Cell, Connection

TEXTS = [
    "",
    " ",
    "hi",
    "tiny",
    "<|im_end|>",
    "\x00",
    "a" * 300,
    "🦊",
    "\ud7ff",
    "{{ 7*7 }}",
    "user",
    "system",
    "\U000f0000",
]
INTS = [0, 1, 2, 5, 21, 64, 65, 255, 258, 263, 264, 511, 512, 2**31 - 1, 2**32 - 1]
SIGNED = [-(2**31), -2, -1, 0, 1, 50, 2**31 - 1]
FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 0.0, 1e-30, 1e-6, 0.5, 1.0, 1.5, 2.0, 3e38]
EXPECTED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def fill(message: Any, dice: random.Random, density: float) -> None:
    """Set some of the message's fields to nasty values."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() > density:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[dice.choice(INTS)] = dice.choice(FLOATS)
        elif field.is_repeated:
            for _ in range(dice.choice([1, 1, 2, 5])):
                if field.message_type is not None:
                    fill(getattr(message, field.name).add(), dice, density)
                else:
                    getattr(message, field.name).append(value(field, dice))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), dice, density)
        else:
            setattr(message, field.name, value(field, dice))


def value(field: FieldDescriptor, dice: random.Random) -> Any:
    kinds: dict[int, list[Any]] = {
        FieldDescriptor.CPPTYPE_STRING: TEXTS,
        FieldDescriptor.CPPTYPE_UINT32: INTS,
        FieldDescriptor.CPPTYPE_UINT64: INTS,
        FieldDescriptor.CPPTYPE_INT32: SIGNED,
        FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 77],
        FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
        FieldDescriptor.CPPTYPE_BOOL: [False, True],
    }
    return dice.choice(kinds[field.cpp_type])


async def answer_everything(connection: Connection) -> None:
    """End every submitted choice at once."""
    while True:
        submit = await connection.submits.get()
        rows = [generation_pb2.GenerateStreamResponse().prompt_logprobs.add() for _ in submit.prompt_token_ids]
        for choice in submit.choices:
            known = len(choice.token_ids)
            wanted = submit.params.HasField("prompt_logprobs")
            connection.emit(
                submit, b"!", known, choice=choice.index, finish_reason=LENGTH, prompt_logprobs=rows if wanted else []
            )


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_breaks_the_gateway(cell: Cell, seed: int) -> None:
    dice = random.Random(seed)
    answering = asyncio.create_task(answer_everything(await cell.scheduler.connection()))
    seen: dict[Any, int] = {}
    for _ in range(150):
        request = generation_pb2.GenerateStreamRequest()
        density = dice.choice([0.05, 0.15, 0.5])
        fill(request, dice, density)
        if dice.random() < 0.7:
            request.text = "hi"
            request.model = "tiny"
        try:
            messages = await collect(cell.stub.GenerateStream(request))
            assert messages[-1].HasField("usage")
            seen["ok"] = seen.get("ok", 0) + 1
        except grpc.aio.AioRpcError as error:
            told = errors.from_rpc_error(error)
            seen[told.code] = seen.get(told.code, 0) + 1
            if told.code not in EXPECTED:
                pytest.fail(f"{told.code} {told.message} for {request}")
    answering.cancel()
    assert seen["ok"] > 10
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 10
    assert len(cell.gateway.table) == 0


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize", "GetModel"])
async def test_nothing_breaks_the_small_methods(cell: Cell, method: str) -> None:
    dice = random.Random(method)
    kind = getattr(generation_pb2, f"{method}Request")
    for _ in range(100):
        request = kind()
        fill(request, dice, 0.5)
        try:
            await getattr(cell.stub, method)(request)
        except grpc.aio.AioRpcError as error:
            assert errors.from_rpc_error(error).code in EXPECTED  # noqa: PT017  an answer is as good as a refusal
