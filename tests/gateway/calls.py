"""Calls of the public service, and what came of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tandem.v1 import generation_pb2, types_pb2

from cluster import errors

Ask = generation_pb2.GenerateStreamRequest
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
EOS = 258


def ask(text: str = "hi", **fields: Any) -> Ask:
    return Ask(model="tiny", text=text, **fields)


async def collect(call: Any) -> list[Any]:
    messages = []
    async with asyncio.timeout(10):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


def joined(messages: list[Any], index: int = 0) -> tuple[str, list[int]]:
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


async def failure(call: Any) -> errors.TandemError:
    waiting = collect(call) if hasattr(call, "read") else asyncio.wait_for(call, 10)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await waiting
    return errors.from_rpc_error(error.value)
