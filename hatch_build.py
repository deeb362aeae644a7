"""Build hook: generates the protobuf and gRPC stubs beside their .proto files.

Runs for wheels and for editable installs alike, so that `pip install -e .` is all a checkout needs.
`python hatch_build.py` does the same by hand after a change to a .proto file.
"""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def generate_stubs(root: Path = ROOT) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` for every proto of the project; raise if protoc refuses."""
    import grpc_tools
    from grpc_tools import protoc

    protos = root / "protos"
    sources = sorted(str(path.relative_to(protos)) for path in (protos / "tandem").rglob("*.proto"))
    well_known_types = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{protos}",
        f"-I{protos / 'third_party'}",
        f"-I{well_known_types}",
        f"--python_out={protos}",
        f"--pyi_out={protos}",
        f"--grpc_python_out={protos}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see its messages above")


class StubsBuildHook(BuildHookInterface):
    """Hatchling's entry point."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict) -> None:
        generate_stubs(Path(self.root))


if __name__ == "__main__":
    generate_stubs()
