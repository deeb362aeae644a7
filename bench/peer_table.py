"""The servers that are compared: how each is started, asked and configured. One entry each; add yours here.

Every server gets the same weights, the same prompts, as many cores as the machine has, and settings with which it is at
its best here. What was tried is said with the entry.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL_NAME = "bench"
HOST = "127.0.0.1"
MAX_MODEL_LEN = 2048
KV_GIB = 2
LLAMA_SLOTS = 64
LLAMA_SLOT_TOKENS = 1280
"""room for the longest load; memory is split evenly, and a longer prompt is refused"""


@dataclass(frozen=True, slots=True)
class Site:
    """What this machine has; None: not installed."""

    model: Path
    """a folder with weights and tokenizer"""
    vllm_python: Path | None = None
    """the interpreter of a virtual environment with vLLM"""
    llama_server: Path | None = None
    """llama.cpp's own server binary"""
    gguf: Path | None = None
    """the same weights for llama.cpp"""
    tandem_flags: tuple[str, ...] = ()

    @property
    def num_cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))


Command = Callable[[Site, int], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One kind of server."""

    name: str
    protocol: str
    """tandem: gRPC, as `tandem bench` speaks it; openai: /v1/completions"""
    is_installed: Callable[[Site], bool]
    command: Command
    """the command line for a site and a port"""
    env: Callable[[Site], Mapping[str, str]] = lambda site: {}
    health_path: str = "/health"
    """answers 200 once the model is served; unused for tandem, which says so on stdout"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """of every request's body, besides prompt and length"""
    start_timeout_s: float = 600.0
    by_default: bool = True
    """False: settings that were tried and are not the best everywhere; run where it is named"""


def tandem_command(site: Site, port: int) -> list[str]:
    """No drafts: the others have none either. 128 slots, so that 64 clients never wait for one."""
    return [
        *(sys.executable, "-m", "cli", "up", "--model", str(site.model), "--served-model-name", MODEL_NAME),
        *("--draft", "none", "--dtype", "bfloat16", "--kv-cache-gib", str(KV_GIB)),
        *("--host", HOST, "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-sequences", "128"),
        *site.tandem_flags,
    ]


def vllm_command(site: Site, port: int) -> list[str]:
    """As its documentation starts it on a CPU; request logs are off, which is the default of `vllm serve`."""
    return [
        *(str(site.vllm_python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(site.model), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
        *("--host", HOST, "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "128"),
        "--disable-uvicorn-access-log",
    ]


def vllm_env(site: Site) -> Mapping[str, str]:
    """Its default keeps one core free for the network side."""
    return {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def vllm_all_cores_env(site: Site) -> Mapping[str, str]:
    """Every core computes, the one that the default would keep free as well."""
    cores = f"0-{site.num_cores - 1}"
    return {**vllm_env(site), "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(site.num_cores)}


def llama_command(site: Site, port: int) -> list[str]:
    """As many slots as clients. No prompts are kept for later ones, as none is ever sent again."""
    return [
        *(str(site.llama_server), "--model", str(site.gguf), "--alias", MODEL_NAME, "--host", HOST),
        *("--port", str(port), "--threads", str(site.num_cores), "--parallel", str(LLAMA_SLOTS)),
        *("--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS), "--cont-batching", "--cache-ram", "0", "--no-webui"),
    ]


PEERS = (
    Peer("tandem", "tandem", lambda site: True, tandem_command),
    Peer(
        "vllm",
        "openai",
        lambda site: site.vllm_python is not None,
        vllm_command,
        vllm_env,
        fields={"model": MODEL_NAME, "ignore_eos": True},
    ),
    Peer(
        "vllm-all-cores",
        "openai",
        lambda site: site.vllm_python is not None and site.num_cores > 1,
        vllm_command,
        vllm_all_cores_env,
        fields={"model": MODEL_NAME, "ignore_eos": True},
        by_default=False,
    ),
    Peer(
        "llama.cpp",
        "openai",
        lambda site: site.llama_server is not None and site.gguf is not None,
        llama_command,
        fields={"model": MODEL_NAME, "ignore_eos": True},
    ),
)


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
