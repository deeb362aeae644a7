"""Which processes a cluster has, and with which flags, checked against the services' own configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cli import plan
from cli.plan import ChildSpec, ClusterOptions
from cluster import config
from draft_worker.config import DraftWorkerConfig
from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

CONFIGS: dict[str, Any] = {
    "scheduler": SchedulerConfig,
    "gateway": GatewayConfig,
    "worker": WorkerConfig,
    "draft_worker": DraftWorkerConfig,
}


def options(**changes: Any) -> ClusterOptions:
    base = ClusterOptions(
        model="/models/m", served_model_name="m", num_workers=1, draft="ngram", engine="transformers", num_cores=2
    )
    return dataclasses.replace(base, **changes)


FULL = options(
    num_workers=3,
    port=0,
    metrics_port=9000,
    device="cpu",
    dtype="float32",
    kv_cache_gib=1.5,
    num_blocks=64,
    block_size=8,
    max_sequences=4,
    max_model_len=512,
    max_draft_tokens=3,
    proposer="ngram",
    draft_vocabulary="text",
    token_budget=128,
    max_waiting=7,
    max_concurrent_requests=9,
    max_message_mib=5.0,
    drain_timeout_s=11.0,
    fake_step_ms=2.0,
    fake_token_us=3.0,
)


def all_specs(given: ClusterOptions) -> list[ChildSpec]:
    return [
        *plan.scheduler_specs(given),
        plan.gateway_spec(given, "127.0.0.1:7"),
        *plan.worker_specs(given, "127.0.0.1:7"),
        *plan.draft_specs(given, "127.0.0.1:7"),
    ]


@pytest.mark.parametrize("given", [options(), FULL])
def test_every_service_understands_its_flags(given: ClusterOptions) -> None:
    for spec in all_specs(given):
        assert spec.arguments()[:3] == ["-P", "-m", spec.service]
        loaded = config.load(CONFIGS[spec.service], spec.service, argv=spec.arguments()[3:], env={})
        for name, value in spec.flags:
            parsed = getattr(loaded, name.replace("-", "_"))
            assert str(parsed[0] if isinstance(parsed, tuple) else parsed) == value


def test_options_reach_the_services() -> None:
    loaded = {
        spec.name: config.load(CONFIGS[spec.service], spec.service, argv=spec.arguments()[3:], env={})
        for spec in all_specs(FULL)
    }
    assert list(loaded) == ["scheduler", "gateway", "worker-0", "worker-1", "worker-2", "draft"]
    assert (loaded["scheduler"].max_waiting, loaded["scheduler"].metrics_port) == (7, 9001)
    assert (loaded["gateway"].model, loaded["gateway"].max_message_mib) == (("m=/models/m",), 5.0)
    worker = loaded["worker-1"]
    assert (worker.worker_id, worker.scheduler, worker.kv_cache_gib) == ("worker-1", "127.0.0.1:7", 1.5)
    assert (worker.served_model_name, worker.dtype, worker.threads, worker.draft) == ("m", "float32", 1, "on")
    draft = loaded["draft"]
    assert (draft.proposer, draft.vocabulary) == ("ngram", "text")
    assert (draft.target, draft.target_model, draft.draft, draft.threads) == ("m", "/models/m", "ngram", 1)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 1, 2), (2, 2, 1), (8, 3, 2), (1, 4, 1)])
def test_cores_are_split_among_workers(cores: int, workers: int, threads: int) -> None:
    given = options(num_cores=cores, num_workers=workers)
    specs = plan.worker_specs(given, "s")
    assert {dict(spec.flags)["threads"] for spec in specs} == {str(threads)}
    assert {dict(spec.env)["OMP_NUM_THREADS"] for spec in specs} == {str(threads)}


def test_workers_may_guess_for_themselves() -> None:
    given = options(own_drafts=True, draft="/models/d", proposer="combined", draft_vocabulary="text", dtype="float32")
    assert plan.draft_specs(given, "s") == []
    (spec,) = plan.worker_specs(given, "s")
    worker = config.load(WorkerConfig, "worker", argv=spec.arguments()[3:], env={})
    assert (worker.draft, worker.draft_model) == ("own", "/models/d")
    assert (worker.proposer, worker.vocabulary) == ("combined", "text")
    nobody = plan.worker_specs(options(own_drafts=True, draft="none"), "s")[0]
    assert dict(nobody.flags)["draft"] == "off"


def test_without_drafts_there_is_no_draft_worker() -> None:
    given = options(draft="none")
    assert plan.draft_specs(given, "s") == []
    assert dict(plan.worker_specs(given, "s")[0].flags)["draft"] == "off"


@pytest.mark.parametrize(("gateway", "scheduler"), [(-1, -1), (0, 0), (9000, 9001)])
def test_metrics_ports(gateway: int, scheduler: int) -> None:
    given = options(metrics_port=gateway)
    assert dict(plan.scheduler_specs(given)[0].flags)["metrics-port"] == str(scheduler)


def test_a_restart_takes_the_same_port() -> None:
    spec = plan.scheduler_specs(options(scheduler_port=0))[0].with_flag("port", "4711")
    assert spec.arguments().count("--port=4711") == 1
    assert not any(argument == "--port=0" for argument in spec.arguments())


def test_standbys_share_a_state_and_are_known_to_all() -> None:
    given = options(num_schedulers=3, state="redis://h:1/0", scheduler_port=50052, metrics_port=9000)
    specs = plan.scheduler_specs(given)
    assert [spec.name for spec in specs] == ["scheduler", "scheduler-1", "scheduler-2"]
    assert [dict(spec.flags)["port"] for spec in specs] == ["50052", "50053", "50054"]
    assert [dict(spec.flags)["metrics-port"] for spec in specs] == ["9001", "9002", "9003"]
    assert {dict(spec.flags)["state"] for spec in specs} == {"redis://h:1/0"}
    free = plan.scheduler_specs(options(num_schedulers=2, state="redis://h:1/0", scheduler_port=0))
    assert {dict(spec.flags)["port"] for spec in free} == {"0"}
    loaded = config.load(GatewayConfig, "gateway", argv=plan.gateway_spec(given, "a:1,b:2").arguments()[3:], env={})
    assert loaded.schedulers() == ("a:1", "b:2")
