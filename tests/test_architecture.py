"""The house rules: who may import whom, how long a file may be, and which names say nothing.

    row 5  */__main__, cli, bench            anything
    row 4  every other service module        own package and rows 0-3; engine and drafting only from worker and
                                             draft_worker
           drafting                          own package, engine, and of cluster what knows no network
           distill                           own package and engine
    row 3  */convert                         stubs, own pure modules and those of cluster
    row 2  cluster (no torch) | engine (no grpc), never each other
    row 1  scheduler/core, gateway/{admission,routing}, every service's config: stdlib without clocks, chance and I/O;
           one config builds on another where its package may import the other's
    row 0  stubs (tandem.v1): protobuf, grpc

The checker reads sources, so a forbidden import inside of a function is seen too. `tandem_client` is what users import:
it is a row-4 package of its own. Two readings of the table, both on purpose: `cluster.config` is the reader of
configurations, not one; and a convert may import `cluster.errors`, which is impure, since a google.rpc.Status inside
of a message is an exception of ours outside of it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gateway", "scheduler", "worker", "draft_worker")
PACKAGES = (*SERVICES, "drafting", "cluster", "engine", "distill", "cli", "tandem_client", "bench")

IMPURE = frozenset({"asyncio", "os", "time", "random", "logging", "socket"})
GRPC = frozenset({"grpc", "grpc_health", "grpc_reflection", "grpc_status"})
CLUSTER_LIBRARIES = GRPC | {"google", "prometheus_client", "redis", "uvloop"}
MODEL_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "safetensors", "gguf"})

WITHOUT_NETWORK = frozenset({"cluster.draft_news", "cluster.logs"})
"""what `drafting` may import of cluster"""

BANNED_WORDS = frozenset({"manager", "helper", "helpers", "util", "utils", "common", "misc"})
BANNED_VERBS = frozenset({"handle", "process", "do"})
MAX_LINES = 400


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_sources() -> dict[str, str]:
    """Module name -> source, of every package."""
    return {
        module_name(path): path.read_text("utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def nodes(source: str) -> list[ast.AST]:
    """All of a module's syntax tree."""
    return list(ast.walk(ast.parse(source)))


def imported(source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Every imported module; `from package import module` counts as package.module."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level if node.level else ""
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in modules or base in ("tandem.v1", "google") else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            argument = node.args[0] if node.args else None
            yield argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else "?"


def row(module: str) -> int:
    package, *rest = module.split(".")
    if package in ("cli", "bench") or rest[-1:] == ["__main__"]:
        return 5
    if package in ("cluster", "engine"):
        return 2
    if rest[-1:] == ["convert"]:
        return 3
    if module.startswith("scheduler.core") or rest[:1] in (["config"], ["core"]):
        return 1
    if package == "gateway" and rest[:1] in (["admission"], ["routing"]):
        return 1
    return 0 if package == "tandem" else 4


def refusal(module: str, target: str, modules: Mapping[str, str]) -> str | None:
    """Why this module may not import that one; None: it may."""
    package, top, level = module.split(".")[0], target.split(".")[0], row(module)
    own = top == package
    if level == 5 or not target:
        return None
    if target.startswith(".") or target == "?":
        return "imports are absolute and spelt out"
    if own and row(target) > level != 3:
        return f"row {level} imports only rows beneath it, not row {row(target)}"
    if top in ("cli", "bench", "tests", "distill", *SERVICES) and not own:
        return "services never import services, nor what stands above them"
    if top == "drafting" and not (own or package in ("worker", "draft_worker")):
        return "drafting is imported from worker and draft_worker only"
    if top == "tandem_client" and not own:
        return "the client library is for users"
    return {1: _row_1, 2: _row_2, 3: _row_3, 4: _row_4}[level](module, target, modules)


def _row_1(module: str, target: str, modules: Mapping[str, str]) -> str | None:
    top = target.split(".")[0]
    if top == module.split(".")[0] or target == "drafting.config":
        return None
    if top in IMPURE or top not in sys.stdlib_module_names:
        return f"row 1 imports the standard library without {', '.join(sorted(IMPURE))}, and nothing else"
    return None


def _row_2(module: str, target: str, modules: Mapping[str, str]) -> str | None:
    package, top = module.split(".")[0], target.split(".")[0]
    if top == package or top in sys.stdlib_module_names:
        return None
    if package == "cluster":
        return (
            None
            if top in CLUSTER_LIBRARIES | {"tandem"}
            else "cluster knows grpc, protobuf, redis, uvloop and metrics only"
        )
    if top in CLUSTER_LIBRARIES | {"tandem", "cluster"}:
        return "engine knows nothing of the network"
    return None


def _row_3(module: str, target: str, modules: Mapping[str, str]) -> str | None:
    package, top = module.split(".")[0], target.split(".")[0]
    if top in ("tandem", "google") or target == "cluster.errors":
        return None
    if top in (package, "cluster"):
        impure = impurity(target, modules)
        return f"a convert imports pure modules: {impure}" if impure else None
    if top in IMPURE or top not in sys.stdlib_module_names:
        return "a convert imports stubs and pure modules"
    return None


def _row_4(module: str, target: str, modules: Mapping[str, str]) -> str | None:
    package, top = module.split(".")[0], target.split(".")[0]
    if package in ("worker", "draft_worker"):
        return None
    if package == "drafting":
        spoken = top in CLUSTER_LIBRARIES | {"cluster", "tandem"} and target not in WITHOUT_NETWORK
        return "drafting knows nothing of the network" if spoken else None
    if package == "distill":
        return "distill makes models and serves nothing" if top in CLUSTER_LIBRARIES | {"cluster", "tandem"} else None
    if top == "engine":
        return "engine is imported from worker and draft_worker only"
    if top == "torch" or (top in MODEL_LIBRARIES and (package, top) != ("gateway", "transformers")):
        return "torch and model libraries stay in the workers"
    return None


def impurity(module: str, modules: Mapping[str, str], seen: frozenset[str] = frozenset()) -> str | None:
    """What makes a module, or one that it imports from its own package or cluster, touch the world; None: nothing."""
    homes = (module.split(".")[0], "cluster")
    for target in imported(modules.get(module, ""), modules):
        top = target.split(".")[0]
        if top in IMPURE | GRPC | {"tandem", "google", "subprocess"}:
            return f"{module} imports {target}"
        if top in homes and target not in seen | {module}:
            deeper = impurity(target, modules, seen | {module})
            if deeper:
                return deeper
    return None


def violations(modules: Mapping[str, str]) -> list[str]:
    found = []
    for module, source in modules.items():
        for target in sorted(set(imported(source, modules))):
            why = refusal(module, target, modules)
            if why:
                found.append(f"{module} imports {target}: {why}")
    return found


def names_that_say_nothing(module: str, source: str) -> list[str]:
    """Modules, classes and functions with a banned word in their name, or a banned verb as its first."""
    found = []
    names = [part for part in module.split(".") if part not in ("__main__", "__init__")]
    for node in nodes(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
    for name in names:
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
        if set(words) & BANNED_WORDS or (words[:1] and words[0] in BANNED_VERBS):
            found.append(f"{module}: {name}")
    return found


def test_who_imports_whom() -> None:
    modules = read_sources()
    assert len(modules) > 80, "the checker looks at the whole house"
    assert violations(modules) == []


def test_files_are_short() -> None:
    folders = [*PACKAGES, "tests", "deploy"]
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if (lines := path.read_text("utf-8").count("\n")) > MAX_LINES
    }
    assert long == {}, f"at most {MAX_LINES} lines"


def test_names_say_something() -> None:
    found = [entry for module, source in read_sources().items() for entry in names_that_say_nothing(module, source)]
    assert found == []


def test_tests_have_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("package", ["gateway", "scheduler", "cluster", "tandem_client", "cli"])
def test_importing_it_brings_no_torch(package: str) -> None:
    """What the checker can't see: a library that imports torch by itself."""
    modules = [name for name in read_sources() if name.split(".")[0] == package]
    # Prepares a model on its own, as a child process of `tandem up`.
    modules = [name for name in modules if name != "cli.resolve_model"]
    script = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"], f"{package} imports torch"


PLANTED = [
    ("scheduler.core.queue", "import asyncio"),
    ("scheduler.core.queue", "def f():\n    import time"),
    ("scheduler.core.queue", "import numpy"),
    ("scheduler.core.queue", "from tandem.v1 import scheduler_pb2"),
    ("scheduler.core.queue", "from cluster.errors import QueueFull"),
    ("scheduler.core.queue", "from scheduler import loop"),
    ("scheduler.core.queue", "from scheduler.convert import x"),
    ("gateway.admission", "import logging"),
    ("gateway.routing", "import random"),
    ("worker.config", "import os"),
    ("worker.config", "from cluster.config import load"),
    ("scheduler.core.config", "import socket"),
    ("cluster.server", "import torch"),
    ("cluster.server", "import engine.fake"),
    ("cluster.server", "from gateway import config"),
    ("engine.runner", "import grpc"),
    ("engine.runner", "from google.protobuf import message"),
    ("engine.runner", "from tandem.v1 import draft_pb2"),
    ("engine.runner", "import cluster.errors"),
    ("scheduler.convert", "import grpc"),
    ("scheduler.convert", "from cluster import channel"),
    ("scheduler.convert", "from cluster.channel import connect"),
    ("scheduler.convert", "from engine.batch import Batch"),
    ("scheduler.convert", "from scheduler import loop"),
    ("scheduler.convert", "from scheduler import reads_clock_indirectly"),
    ("scheduler.convert", "from scheduler import calls_indirectly"),
    ("gateway.servicer", "import scheduler.core.queue"),
    ("gateway.servicer", "import torch"),
    ("gateway.servicer", "from engine.batch import Batch"),
    ("gateway.servicer", "from cli import up"),
    ("gateway.servicer", "from gateway import __main__"),
    ("gateway.servicer", "from . import convert"),
    ("gateway.servicer", "importlib.import_module(name)"),
    ("gateway.servicer", "__import__('torch')"),
    ("scheduler.loop", "import transformers"),
    ("worker.convert", "from drafting.mirror import Mirror"),
    ("draft_worker.servicer", "from worker import tails"),
    ("tandem_client.client", "import gateway.text"),
    ("tandem_client.client", "from engine import noise"),
    ("distill.training", "import grpc"),
    ("distill.training", "from cluster import logs"),
    ("distill.training", "from draft_worker import mirrors"),
    ("draft_worker.loading", "import distill.training"),
    ("drafting.mirror", "from cluster import channel"),
    ("drafting.mirror", "from worker import tails"),
    ("drafting.config", "import os"),
    ("scheduler.loop", "from drafting.mirror import Mirror"),
    ("scheduler.config", "from drafting import mirror"),
    ("engine.runner", "from drafting.mirror import Mirror"),
]
ALLOWED = [
    ("gateway.__main__", "import torch, engine.fake, worker.tails"),
    ("cli.up", "import engine.fake, scheduler.loop"),
    ("bench.x", "import scheduler.core.queue"),
    ("scheduler.core.queue", "import heapq\nfrom scheduler.core import sequence\nfrom collections import deque"),
    ("scheduler.convert", "from tandem.v1 import scheduler_pb2\nfrom scheduler.core import sequence\nimport struct"),
    ("scheduler.convert", "from google.rpc import status_pb2\nfrom cluster.errors import to_status"),
    ("worker.convert", "from cluster.draft_news import Tail"),
    ("worker.config", "from drafting.config import ProposerConfig"),
    ("drafting.mirror", "import torch\nfrom cluster.draft_news import Tail\nfrom engine import noise"),
    ("draft_worker.servicer", "from drafting.mirror import Mirror"),
    ("scheduler.loop", "import asyncio, grpc, time\nfrom scheduler import convert\nfrom cluster import channel"),
    ("gateway.text", "from transformers import PreTrainedTokenizerFast\nfrom gateway.admission import x"),
    ("worker.executor", "import torch\nfrom engine import sampler"),
    ("engine.runner", "import torch, os, time\nfrom engine import batch"),
    ("distill.training", "import torch, random\nfrom engine import noise"),
    ("cluster.server", "import grpc, os\nfrom google.rpc import status_pb2\nfrom cluster import channel"),
]
SYNTHETIC = {
    "scheduler.loop": "import asyncio",
    "scheduler.core.sequence": "import enum",
    "scheduler.reads_clock_indirectly": "from scheduler import reads_clock",
    "scheduler.reads_clock": "import time",
    "scheduler.calls_indirectly": "from cluster import channel",
    "scheduler.convert": "",
    "gateway.convert": "",
    "gateway.__main__": "",
    "gateway.config": "",
    "worker.tails": "",
    "cluster.channel": "import grpc",
    "cluster.draft_news": "from dataclasses import dataclass",
    "drafting.config": "",
    "drafting.mirror": "",
    "cli.up": "",
    "engine.sampler": "",
    "engine.batch": "",
    "engine.noise": "",
}


@pytest.mark.parametrize(("module", "source"), PLANTED)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    found = violations({**SYNTHETIC, module: source})
    assert [entry for entry in found if entry.startswith(f"{module} imports ")], f"{source!r} in {module} went unseen"


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    assert violations({**SYNTHETIC, module: source}) == []


def test_planted_names_are_found() -> None:
    for module, source in [
        ("gateway.utils", ""),
        ("gateway.text_helpers", ""),
        ("gateway.x", "class PoolManager: ..."),
        ("gateway.x", "def handle_request(): ..."),
        ("gateway.x", "async def process(): ..."),
        ("gateway.x", "class X:\n    def do_it(self): ..."),
        ("gateway.x", "def _common_part(): ..."),
    ]:
        assert names_that_say_nothing(module, source), (module, source)
    fine = "def donate(): ...\nclass ProcessorTable: ...\ndef unhandled(): ...\nclass RequestHandle: ..."
    assert names_that_say_nothing("engine.processors", fine) == []
