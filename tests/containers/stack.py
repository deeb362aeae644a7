"""A stack started from compose.yaml, to scale, kill, stop and look at.

Podman runs health checks by systemd's timers. Where there is no systemd, `HealthChecks` runs those of containers that
aren't healthy yet, so that `depends_on: service_healthy` has something to go by.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.containers.images import ROOT, engine, is_podman, run

PATIENCE_S = 600.0
"""How long anything may take: the machine may be a slow one."""


def compose_command() -> list[str]:
    """The program of that name, or Docker's own plug-in."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    assert "Compose" in run("docker", "compose", "version", check=False), "docker compose is needed"
    return ["docker", "compose"]


def compose_environment() -> dict[str, str]:
    """Where compose finds the engine."""
    return {"DOCKER_HOST": "unix:///run/podman/podman.sock", **os.environ} if is_podman() else dict(os.environ)


@dataclass
class Stack:
    """One compose project; `environment` holds the settings of compose.yaml."""

    project: str
    overlay: str
    environment: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, timeout_s: float = PATIENCE_S, check: bool = True) -> str:
        """Output of `docker compose …` for this project."""
        files = ["-f", "compose.yaml", "-f", f"tests/containers/{self.overlay}.yaml"]
        command = [*compose_command(), *files, "-p", self.project, "--profile", "cpu", *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**compose_environment(), **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(arguments)} failed:\n{done.stdout[-4000:]}"
        return done.stdout

    def up(self, workers: int = 1, gateways: int = 1) -> None:
        """Start what isn't running, and return once the containers are."""
        scale = ["--scale", f"worker={workers}", "--scale", f"gateway={gateways}"]
        self.compose("up", "-d", "--no-build", *scale)

    def stop(self, service: str) -> None:
        """SIGTERM to a service's containers; returns once they have ended, by themselves or by force."""
        self.compose("stop", service)

    def containers(self, service: str = "", *, stopped: bool = False) -> list[str]:
        """Ids of a service's containers."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        flags = [word for one in filters for word in ("--filter", one)] + (["-a"] if stopped else [])
        return run(engine(), "ps", "-q", "--no-trunc", *flags).split()

    def inspect(self, container: str) -> Any:
        """Everything that the engine knows of it."""
        return json.loads(run(engine(), "inspect", container))[0]

    def health(self, container: str) -> str:
        """healthy, starting, unhealthy, or empty where it has no check."""
        state = self.inspect(container)["State"]
        found = state.get("Health") or state.get("Healthcheck") or {}
        status: str = found.get("Status", "")
        return status

    def until_healthy(self, service: str, count: int = 1) -> None:
        """Wait until so many containers of a service are healthy."""
        self.until(
            lambda: [self.health(one) for one in self.containers(service)] == ["healthy"] * count,
            f"{count} healthy {service}",
        )

    def until(self, condition: Any, what: str) -> None:
        """Poll; AssertionError with everybody's last words if it never comes to be."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, f"never: {what}\n{self.logs()}"
            time.sleep(0.2)

    def status(self) -> Any:
        """What the scheduler that leads says of the cell, by way of the `tandem` command in a container."""
        for service in ("scheduler", "standby"):
            for container in self.containers(service):
                output = run(engine(), "exec", container, "tandem", "status", "--json", "--interval=0", check=False)
                lines = [line for line in output.splitlines() if line.startswith("{")]
                if lines and json.loads(lines[-1])["leading"]:
                    return json.loads(lines[-1])
        return None

    def crash(self, container: str) -> None:
        """SIGKILL to its first process, with which all others end; not through the engine, to which that is a stop."""
        os.kill(self.inspect(container)["State"]["Pid"], signal.SIGKILL)

    def logs(self) -> str:
        """The end of everybody's log."""
        return self.compose("logs", "--tail=30", check=False)[-12000:]


class HealthChecks:
    """Does what systemd's timers do elsewhere, for podman only; a context manager."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HealthChecks:
        if is_podman() and not Path("/run/systemd/system").is_dir():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for container in self._stack.containers():
                try:
                    if self._stack.health(container) in ("starting", "unhealthy"):
                        run(engine(), "healthcheck", "run", container, check=False)
                except (AssertionError, subprocess.TimeoutExpired):
                    continue  # it has gone in the meantime
