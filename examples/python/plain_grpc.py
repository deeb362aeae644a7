"""Calls a Tandem cluster with nothing but gRPC: python examples/python/plain_grpc.py [HOST:PORT]

Needs grpcio, grpcio-status and the stubs; outside of this repository, make them from protos/tandem/v1:

    pip install grpcio grpcio-status grpcio-tools
    python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. \\
        protos/tandem/v1/types.proto protos/tandem/v1/generation.proto
"""

from __future__ import annotations

import asyncio
import json
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tandem.v1 import generation_pb2 as pb
from tandem.v1.generation_pb2_grpc import GenerationServiceStub

# gRPC's own retries: UNAVAILABLE comes while a gateway starts, drains or has lost its scheduler, and asks with its
# pushback how long to wait. A stream is retried until its first message; from there on `tandem_client` can resume.
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS = [
    ("grpc.service_config", json.dumps(RETRIES)),
    ("grpc.max_receive_message_length", -1),  # log-probabilities of a long prompt are more than the default of 4 MiB
    ("grpc.keepalive_time_ms", 10_000),  # notices a gateway that was cut off in the middle of a stream
]


async def unary(stub: GenerationServiceStub) -> None:
    """The whole answer at once. The same seed always gives the same answer."""
    request = pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingParams(temperature=0.7, seed=1),
        stop=pb.StopCriteria(max_tokens=32, ignore_eos=True),
    )
    response = await stub.Generate(request, timeout=60)
    print("unary:", repr(response.choices[0].text))


async def chat(stub: GenerationServiceStub) -> None:
    """A conversation, rendered with the model's own template; text as it comes."""
    request = pb.GenerateStreamRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Why is the sky blue?")]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopCriteria(max_tokens=32),
    )
    print("chat: ", end="")
    async for response in stub.GenerateStream(request, timeout=60):
        for delta in response.deltas:
            print(delta.text, end="", flush=True)
        if response.HasField("usage"):  # on the last message only
            usage = response.usage
            print(f"\nusage: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens")


def long_story() -> pb.GenerateStreamRequest:
    """As many tokens as the context holds."""
    return pb.GenerateStreamRequest(text="A very long story:", stop=pb.StopCriteria(ignore_eos=True))


async def deadline(stub: GenerationServiceStub) -> None:
    """No more than so many seconds, the waiting included. What came until then is yours."""
    num_tokens = 0
    try:
        async for response in stub.GenerateStream(long_story(), timeout=1):
            num_tokens += sum(len(delta.token_ids) for delta in response.deltas)
    except grpc.aio.AioRpcError as error:
        print(f"deadline: {error.code().name} after {'some' if num_tokens else 'no'} tokens")


async def cancel(stub: GenerationServiceStub) -> None:
    """The cluster stops at the next step and has its memory back."""
    call = stub.GenerateStream(long_story())
    num_tokens = 0
    async for response in call:
        num_tokens += sum(len(delta.token_ids) for delta in response.deltas)
        if num_tokens >= 5:
            break
    call.cancel()
    print("cancelled after 5 tokens or a few more")


async def wrong_field(stub: GenerationServiceStub) -> None:
    """Every error of the cluster carries an ErrorInfo, and most one detail more."""
    request = pb.GenerateRequest(text="Once upon a time", sampling=pb.SamplingParams(temperature=-1))
    try:
        await stub.Generate(request)
    except grpc.aio.AioRpcError as error:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        status = rpc_status.from_call(error)
        for detail in status.details if status else ():
            detail.Unpack(info) or detail.Unpack(bad_request)
        for violation in bad_request.field_violations:
            print(f"error: {error.code().name} {info.reason} {violation.field}: {violation.description}")


async def main(target: str) -> None:
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        stub = GenerationServiceStub(channel)
        await unary(stub)
        await chat(stub)
        await deadline(stub)
        await cancel(stub)
        await wrong_field(stub)


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:2] or ["127.0.0.1:50051"])))
