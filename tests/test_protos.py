"""The protos: rules that buf does not know, stubs that match them, and stubs that run under protobuf 6 and 7."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google.protobuf
import pytest
from google.protobuf import descriptor_pb2, json_format
from tandem.v1 import generation_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OTHER_RUNTIME = ("protobuf>=7,<8", "grpcio==1.81.1", "googleapis-common-protos>=1.70")

# Numbers of FileDescriptorProto's fields, as paths in its source info spell them.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED, NESTED_ENUMS, ONEOFS, VALUES, METHODS = 2, 3, 4, 8, 2, 2


def compile_protos(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    """The project's protos as protoc reads them now, comments included; `folder` is scratch space."""
    import grpc_tools
    from grpc_tools import protoc

    output = folder / "protos.bin"
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "tandem").rglob("*.proto"))
    assert len(sources) >= 5
    includes = [PROTOS, PROTOS / "third_party", Path(grpc_tools.__file__).parent / "_proto"]
    arguments = [f"-I{include}" for include in includes]
    code = protoc.main(["protoc", *arguments, "--include_source_info", f"--descriptor_set_out={output}", *sources])
    assert code == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    return compile_protos(tmp_path_factory.mktemp("protos"))


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """The path and name of everything that needs a comment."""

    def of_enum(enum: Any, path: tuple[int, ...], name: str) -> Iterator[tuple[tuple[int, ...], str]]:
        yield path, name
        for index, value in enumerate(enum.value):
            yield (*path, VALUES, index), f"{name}.{value.name}"

    def of_message(message: Any, path: tuple[int, ...], name: str) -> Iterator[tuple[tuple[int, ...], str]]:
        if message.options.map_entry:
            return
        yield path, name
        for index, field in enumerate(message.field):
            yield (*path, FIELDS, index), f"{name}.{field.name}"
        for index, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):
                yield (*path, ONEOFS, index), f"{name}.{oneof.name}"
        for index, inner in enumerate(message.nested_type):
            yield from of_message(inner, (*path, NESTED, index), f"{name}.{inner.name}")
        for index, enum in enumerate(message.enum_type):
            yield from of_enum(enum, (*path, NESTED_ENUMS, index), f"{name}.{enum.name}")

    for index, message in enumerate(file.message_type):
        yield from of_message(message, (MESSAGES, index), message.name)
    for index, enum in enumerate(file.enum_type):
        yield from of_enum(enum, (ENUMS, index), enum.name)
    for index, service in enumerate(file.service):
        yield (SERVICES, index), service.name
        for number, method in enumerate(service.method):
            yield (SERVICES, index, METHODS, number), f"{service.name}.{method.name}"


def uncommented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    comments = {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}
    return [f"{file.name}: {name}" for path, name in elements(file) if not comments.get(path)]


def test_everything_has_a_comment(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    assert [name for file in files for name in uncommented(file)] == []
    assert sum(1 for file in files for _ in elements(file)) > 200, "the checker sees the protos"
    bare = descriptor_pb2.FileDescriptorProto()
    bare.CopyFrom(files[0])
    bare.ClearField("source_code_info")
    assert len(uncommented(bare)) == sum(1 for _ in elements(files[0])), "and would notice"


def test_stubs_are_those_of_the_protos(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """A change to a .proto needs `make protos`; only the stubs are git-ignored."""
    for file in files:
        module = __import__(file.name.removesuffix(".proto").replace("/", ".") + "_pb2", fromlist=["DESCRIPTOR"])
        plain = descriptor_pb2.FileDescriptorProto()
        plain.CopyFrom(file)
        plain.ClearField("source_code_info")
        stub = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        # protoc writes json_name into descriptor sets but not into Python stubs.
        for message in _messages(plain):
            for field in message.field:
                field.ClearField("json_name")
        assert stub == plain, f"{file.name} has changed: run `make protos`"


def _messages(holder: Any) -> Iterator[Any]:
    inner: Any = holder.message_type if hasattr(holder, "message_type") else holder.nested_type
    for message in inner:
        yield message
        yield from _messages(message)


def test_generate_and_generate_stream_take_the_same_request() -> None:
    protos = []
    for name in ("GenerateRequest", "GenerateStreamRequest"):
        proto = descriptor_pb2.DescriptorProto()
        generation_pb2.DESCRIPTOR.message_types_by_name[name].CopyToProto(proto)
        assert proto.name == name
        proto.name = ""
        protos.append(proto)
    assert protos[0] == protos[1]
    assert len(protos[0].field) >= 10


def test_unset_differs_from_zero_in_every_sampling_field() -> None:
    for message in ("SamplingParams", "StopCriteria", "OutputOptions"):
        for field in generation_pb2.DESCRIPTOR.message_types_by_name[message].fields:
            assert field.has_presence or field.is_repeated, f"{message}.{field.name} is not `optional`"


def test_enums_begin_with_unspecified(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    assert enums
    for enum in enums:
        assert enum.value[0].number == 0
        assert enum.value[0].name.endswith("_UNSPECIFIED")


SAMPLE = {
    "model": "smollm2",
    "requestId": "r-🦊",
    "tokenIds": {"ids": [0, 1, 2**32 - 1]},
    "sampling": {"temperature": 0.0, "topK": -1, "seed": str(2**64 - 1), "logitBias": {"7": -100.0}},
    "stop": {"maxTokens": 0, "strings": ["a", ""]},
    "output": {"promptLogprobs": 0},
    "n": 2,
    "resume": [{"index": 1, "tokenIds": [5], "seed": "9"}],
}
UNDER_THE_OTHER_RUNTIME = """
import importlib, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import google.protobuf
from google.protobuf import json_format
names = sorted(path.stem for path in pathlib.Path(sys.argv[1], "tandem", "v1").glob("*_pb2*.py"))
for name in names:
    importlib.import_module("tandem.v1." + name)
from tandem.v1 import generation_pb2
message = generation_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
print(json.dumps({
    "version": google.protobuf.__version__,
    "modules": names,
    "message": json_format.MessageToDict(message),
    "again": message.SerializeToString(deterministic=True).hex(),
}))
"""


def other_runtime() -> Path:
    """The Python of a virtual environment with protobuf 7, made once and kept in .cache."""
    key = hashlib.sha256(json.dumps([OTHER_RUNTIME, sys.version, str(ROOT)]).encode()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"protobuf-7-{key}"
    python, made = folder / "bin" / "python", folder / "made"
    if made.exists():
        return python
    venv.create(folder, with_pip=False, clear=True)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *OTHER_RUNTIME]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        problem = done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = "pip took longer than 100 s"
    if problem:
        pytest.fail(
            f"this test installs protobuf 7 into a second environment, and pip can't:\n{problem}", pytrace=False
        )
    made.touch()
    return python


def test_stubs_run_under_protobuf_6_and_7() -> None:
    request = json_format.ParseDict(SAMPLE, generation_pb2.GenerateRequest())
    data = request.SerializeToString(deterministic=True)
    assert google.protobuf.__version__.startswith("6."), "the main environment has protobuf 6"
    command = [str(other_runtime()), "-P", "-W", "error", "-c", UNDER_THE_OTHER_RUNTIME, str(PROTOS), data.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"].startswith("7.")
    expected = sorted(path.stem for path in (PROTOS / "tandem" / "v1").glob("*_pb2*.py"))
    assert answer["modules"] == expected
    assert len(expected) >= 10
    assert answer["message"] == SAMPLE
    assert answer["again"] == data.hex()
