"""Reflection as grpcurl and ghz use it: both versions, methods by name, and descriptions that can be built again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from tandem.v1 import generation_pb2

from cluster.channel import connect
from cluster.reflection import V1, V1ALPHA
from cluster.server import add_reflection, bind, create_server

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = create_server()
    add_reflection(server, [GENERATION])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def ask(channel: grpc.aio.Channel, service: str, **question: object) -> reflection_pb2.ServerReflectionResponse:
    """One question by raw method name, as a client of that version would send it."""
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    answer = await call.read()
    await call.done_writing()
    return answer


@pytest.mark.parametrize("service", [V1, V1ALPHA])
async def test_services_are_listed(channel: grpc.aio.Channel, service: str) -> None:
    answer = await ask(channel, service, list_services="")
    assert [entry.name for entry in answer.list_services_response.service] == sorted([GENERATION, V1, V1ALPHA])


@pytest.mark.parametrize("service", [V1, V1ALPHA])
@pytest.mark.parametrize(
    "symbol",
    [
        "tandem.v1.GenerationService",
        "tandem.v1.GenerationService.GenerateStream",
        ".tandem.v1.GenerationService.Generate",
        "tandem.v1.GenerateRequest",
        "tandem.v1.GenerateRequest.model",
        "tandem.v1.GenerateRequest.prompt",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflection",
    ],
)
async def test_a_symbol_resolves_to_files_that_define_it(channel: grpc.aio.Channel, service: str, symbol: str) -> None:
    answer = await ask(channel, service, file_containing_symbol=symbol)
    assert answer.WhichOneof("message_response") == "file_descriptor_response", answer
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    pool = _pool_of(files)
    name = symbol.lstrip(".")
    service_name, _, method = name.rpartition(".")
    if "Service." in name or "ServerReflection." in name:
        assert method in pool.FindServiceByName(service_name).methods_by_name
    elif name.endswith(("Service", "ServerReflection")):
        assert pool.FindServiceByName(name).methods
    else:
        assert pool.FindMessageTypeByName("tandem.v1.GenerateRequest").fields_by_name["model"]


@pytest.mark.parametrize(
    "symbol", ["tandem.v1.GenerationService.Nothing", "tandem.v1.Nothing", "nothing", "", "tandem.v1.GenerateRequest.x"]
)
async def test_an_unknown_symbol_is_not_found(channel: grpc.aio.Channel, symbol: str) -> None:
    answer = await ask(channel, V1, file_containing_symbol=symbol)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_file_is_found_by_name(channel: grpc.aio.Channel) -> None:
    answer = await ask(channel, V1, file_by_filename="grpc/reflection/v1/reflection.proto")
    (data, *_) = answer.file_descriptor_response.file_descriptor_proto
    proto = descriptor_pb2.FileDescriptorProto.FromString(data)
    assert proto.package == "grpc.reflection.v1"
    assert "v1alpha" not in str(proto)


def _pool_of(files: list[descriptor_pb2.FileDescriptorProto]) -> descriptor_pool.DescriptorPool:
    """A fresh pool, files in the order of their imports: what a client makes of an answer."""
    pool, waiting = descriptor_pool.DescriptorPool(), {file.name: file for file in files}
    added: set[str] = set()
    while waiting:
        ready = [name for name, file in waiting.items() if set(file.dependency) <= added]
        assert ready, f"files import what was not sent: {sorted(waiting)}"
        for name in ready:
            pool.Add(waiting.pop(name))
            added.add(name)
    return pool
