"""compose.yaml, as far as it can be judged without starting anything; `make containers` starts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.prepare import render, tables
from cluster import config, probe
from draft_worker.config import DraftWorkerConfig
from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "compose.yaml").read_text("utf-8")
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
CONFIGS: dict[str, Any] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "draft_worker": DraftWorkerConfig,
}
LASTING = sorted(set(SERVICES) - {"model"})
OURS = sorted(name for name, service in SERVICES.items() if service["command"][:2] == ["python", "-m"])
GPU = sorted(name for name in SERVICES if "gpu" in name)

lasting = pytest.mark.parametrize("name", LASTING)
ours = pytest.mark.parametrize("name", OURS)


def seconds(text: str) -> float:
    """Of a duration as compose spells it."""
    match = re.fullmatch(r"(\d+)(s|m)", text)
    assert match, text
    return float(match[1]) * {"s": 1, "m": 60}[match[2]]


def settings(name: str, tmp_path: Path) -> Any:
    """What the service makes of its command, on top of the file that `tandem prepare` writes."""
    module, *flags = SERVICES[name]["command"][2:]
    file = tmp_path / "cluster.toml"
    file.write_text(render(tables("/cache/model", "smol", "ngram", "transformers")))
    flags = [flag.replace("/cache/cluster.toml", str(file)) for flag in flags]
    return config.load(CONFIGS[module], module, flags, {})


def test_everybody_is_there() -> None:
    assert set(SERVICES) >= {"model", "redis", "scheduler", "standby", "gateway", "worker", "draft"}
    assert len(GPU) >= 2
    assert set(OURS) == set(LASTING) - {"redis"}


@lasting
def test_health_user_and_grace(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] not in ("0", "root", "0:0")
    assert service["cap_drop"] == ["ALL"]
    assert service["init"] is True, "the first process of a container ignores SIGTERM until it asks for it"
    assert service["restart"] == "unless-stopped"
    assert "container_name" not in service, "it could not be scaled"
    test = service["healthcheck"]["test"]
    assert test[0] == "CMD"
    assert not any(" " in word for word in test)
    assert seconds(service["healthcheck"]["timeout"]) >= 10 * probe.TIMEOUT_S, "a probe starts late on a busy host"
    assert "stop_grace_period" in service


@ours
def test_flags_fit_together(name: str, tmp_path: Path) -> None:
    """The probe asks where the service listens, and nobody is killed while it drains."""
    found = settings(name, tmp_path)
    service = SERVICES[name]
    assert service["healthcheck"]["test"][1:] == ["python", "-m", "cluster.probe", f"127.0.0.1:{found.port}"]
    drain_s = getattr(found, "drain_timeout_s", 0.0)
    assert seconds(service["stop_grace_period"]) >= drain_s + 5.0
    if "worker" not in name:  # a worker's port is for its own health check
        assert found.host == "0.0.0.0"
    if getattr(found, "advertise", ""):
        assert found.advertise == f"{name}:{found.port}"
    if name not in ("scheduler", "standby"):
        assert found.schedulers() == ("scheduler:50052", "standby:50052")


@lasting
def test_who_waits_for_whom(name: str) -> None:
    waits = {one: how["condition"] for one, how in SERVICES[name].get("depends_on", {}).items()}
    expected = {"model": "service_completed_successfully", "scheduler": "service_healthy"}
    if name in ("scheduler", "standby"):
        expected = {"redis": "service_healthy"}
    assert waits == ({} if name == "redis" else expected)


def test_images() -> None:
    for name in OURS:
        target = "service" if name in ("gateway", "scheduler", "standby") else "engine"
        assert SERVICES[name]["build"]["target"] == target
        assert SERVICES[name]["image"].startswith(f"tandem-{target}")
    for service in SERVICES.values():
        assert re.fullmatch(r"(tandem-[\w-]+|redis:[\w.-]+)", service["image"]), "no registry, no floating version"
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    assert {"service", "engine"} <= set(re.findall(r"^FROM .* AS ([\w-]+)$", dockerfile, re.M))


def test_every_gpu_worker_has_its_own_gpu() -> None:
    devices = []
    for name in GPU:
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        devices.append(tuple(device["device_ids"]))
    assert devices == [(str(index),) for index in range(len(GPU))]
    profiles = [tuple(SERVICES[name]["profiles"]) for name in GPU]
    assert profiles == [("gpu",), *[(f"gpu-{index}",) for index in range(1, len(GPU))]]
    assert SERVICES["worker"]["profiles"] == ["cpu"]
    rest = [{**SERVICES[name], "deploy": None, "profiles": None} for name in GPU]
    assert all(one == rest[0] for one in rest)
    assert "--device=cuda" in rest[0]["command"]
    assert "--device=cpu" in SERVICES["worker"]["command"]


def test_settings_are_few_and_explained() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    assert len(re.findall(r"\$\{", TEXT)) == len(re.findall(r"\$\{\w+:-[^}]+\}", TEXT)), "each has a default"
    example = (ROOT / "deploy" / "example.env").read_text("utf-8")
    assert dict(re.findall(r"^(\w+)=(.*)$", example, re.M)) == used
    assert len(used) <= 4


def test_the_page_has_all_settings_and_services() -> None:
    page = (ROOT / "docs" / "containers.md").read_text("utf-8")
    explained = dict(re.findall(r"^\| `(TANDEM_\w+)` \| `([^`]*)` \|", page, re.M))
    assert explained == dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    told = re.search(r"## What runs\n(.*?)\n## ", page, re.S)
    assert told
    named = set(re.findall(r"`([\w-]+)`", "".join(line.split("|")[1] for line in told[1].splitlines() if "|" in line)))
    assert named == (set(SERVICES) - set(GPU)) | {GPU[0], GPU[-1]}
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (ROOT / "docs" / link).exists(), link


def test_only_gateways_are_published_and_only_here() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": ["${TANDEM_LISTEN:-127.0.0.1:50051}:50051"]}


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose here")
@pytest.mark.parametrize(
    ("profiles", "expected"),
    [
        (["cpu"], {"worker": []}),
        (["gpu", "gpu-1", "gpu-3"], {"worker-gpu-0": ["0"], "worker-gpu-1": ["1"], "worker-gpu-3": ["3"]}),
    ],
    ids="+".join,
)
def test_docker_compose_renders_it(profiles: list[str], expected: dict[str, list[str]]) -> None:
    """As compose itself reads it, anchors resolved: who runs under which profiles, and on which GPUs."""
    flags = [word for name in profiles for word in ("--profile", name)]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    done = subprocess.run(
        ["docker-compose", "-f", "compose.yaml", *flags, "config"],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rendered = yaml.safe_load(done.stdout)["services"]
    everywhere = {"model", "redis", "scheduler", "standby", "gateway", "draft"}
    # Version 1 renders the services of all profiles, the later ones those that would run.
    assert everywhere | set(expected) <= set(rendered)
    for name, gpus in expected.items():
        devices = rendered[name].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert [gpu for device in devices for gpu in device["device_ids"]] == gpus
        assert set(rendered[name]["profiles"]) <= set(profiles)
        assert f"--device={'cuda' if gpus else 'cpu'}" in rendered[name]["command"]
        assert rendered[name]["healthcheck"]["start_period"] in ("600s", "10m", "10m0s")
    assert "--draft=auto" in rendered["model"]["command"], "the draft that is shipped is the default"
