"""The draft worker's configuration: one frozen dataclass, read once at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class DraftWorkerConfig:
    """Guesses for workers how their sequences go on, with a small model or an n-gram index."""

    target: str = field(metadata={"help": "served name of the target model", "metavar": "NAME"})
    draft: str = _setting("ngram", "folder or hub id of a small model, ngram or fake", metavar="FOLDER|ngram|fake")
    target_model: str = _setting("", "folder of the target model, whose vocabulary is compared", metavar="FOLDER")
    scheduler: str = _setting("127.0.0.1:50052", "the scheduler to announce to", metavar="HOST:PORT")
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(0, "port to listen on; 0: any free one", min=0, max=65535)
    advertise: str = _setting("", "HOST:PORT that workers dial, where it differs from the one listened on")
    worker_id: str = _setting("", "this draft worker's name; made at start when empty")
    dtype: str = _setting("bfloat16", "number format of weights and KV", choices=("bfloat16", "float32"))
    device: str = _setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    kv_cache_gib: float = _setting(0.5, "KV memory of the mirrors", min=0.001)
    max_draft_tokens: int = _setting(8, "longest draft that is looked for at once", min=0, max=64)
    max_mirrors: int = _setting(512, "most sequences followed at once, of all workers together", min=1)
    threads: int = _setting(0, "CPU threads of the model; 0: one per core", min=0)
    metrics_port: int = _setting(-1, "port of /metrics; 0: any free one, -1: none", min=-1, max=65535)
    fake_step_ms: float = _setting(0.0, "fake engine: time of one step", min=0.0)
    fake_disagreement: float = _setting(0.2, "fake engine: share of contexts it guesses wrong", min=0.0, max=1.0)
