"""Server reflection for grpcurl, ghz and their like, in both versions of the protocol.

grpcio-reflection speaks v1alpha only and answers `Symbol not found` to the name of a method, which is what ghz asks
for. v1 has the same bytes on the wire under another service name, so one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(
    server: grpc.aio.Server, service_names: Iterable[str], pool: descriptor_pool.DescriptorPool | None = None
) -> None:
    """Describe these services (full names, for instance tandem.v1.GenerationService) and reflection itself."""
    pool = pool or descriptor_pool.Default()
    _describe_v1(pool)
    servicer = _SymbolReflection([*service_names, V1, V1ALPHA], pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method}),))


class _SymbolReflection(ReflectionServicer):
    """Reflection that also knows what is inside a symbol: methods, fields, oneofs, enum values."""

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        name = fully_qualified_name.lstrip(".")
        owner, _, member = name.rpartition(".")
        if _has_member(self._pool, owner, member):
            name = owner
        return super()._file_containing_symbol(request, name)


def _has_member(pool: descriptor_pool.DescriptorPool, owner: str, member: str) -> bool:
    lookups: list[tuple[Any, tuple[str, ...]]] = [
        (pool.FindServiceByName, ("methods_by_name",)),
        (pool.FindMessageTypeByName, ("fields_by_name", "oneofs_by_name")),
        (pool.FindEnumTypeByName, ("values_by_name",)),
    ]
    for find, tables in lookups:
        try:
            descriptor = find(owner)
        except KeyError:
            continue
        return any(member in getattr(descriptor, table) for table in tables)
    return False


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    """Put the v1 protocol's own description into the pool: v1alpha's under the other package."""
    try:
        pool.FindFileByName(_V1_FILE)
        return
    except KeyError:
        pass
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    data = proto.SerializeToString()
    proto = descriptor_pb2.FileDescriptorProto.FromString(data)
    proto.name = _V1_FILE
    _rename_types(proto, f".{proto.package}.", ".grpc.reflection.v1.")
    proto.package = "grpc.reflection.v1"
    pool.AddSerializedFile(proto.SerializeToString())


def _rename_types(proto: descriptor_pb2.FileDescriptorProto, old: str, new: str) -> None:
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
