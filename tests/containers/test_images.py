"""What is in the two images, and what is not."""

from __future__ import annotations

import json

import pytest

from tests.containers import images

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]

LEVELS = {"avx2", "avx512", "avx512bf16"}


@pytest.fixture(autouse=True)
def _built(built: None) -> None:
    """Every test needs the images."""


def test_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = images.sizes()
    with capsys.disabled():
        print("\nimage sizes: " + ", ".join(f"tandem-{name} {size:.0f} MB" for name, size in sizes.items()))
    assert sizes["service"] < sizes["engine"]


def test_services_have_no_torch() -> None:
    status, output = images.in_image("service", "python", "-c", "import torch")
    assert (status, output.splitlines()[-1]) == (1, "ModuleNotFoundError: No module named 'torch'")
    for module in ("gateway", "scheduler"):
        assert images.in_image("service", "python", "-m", module, "--version")[0] == 0


def test_nobody_is_root() -> None:
    for target in images.TARGETS:
        assert images.in_image(target, "id", "-u") == (0, "10001")
        assert images.in_image(target, "touch", "/cache/mine")[0] == 0


def test_kernels_are_there_and_no_compiler_is() -> None:
    assert images.in_image("engine", "sh", "-c", "command -v c++ g++ cc gcc clang")[1] == ""
    script = "import json; from engine.kernels import build; print(json.dumps([build.library(), str(build.built())]))"
    status, output = images.in_image("engine", "python", "-c", script)
    assert status == 0, output
    level, path = json.loads(output.splitlines()[-1])
    assert level in LEVELS
    assert path.startswith("/opt/tandem/kernels/")


def test_pip_settings_stay_out() -> None:
    for target in images.TARGETS:
        tag = f"docker.io/library/tandem-{target}"
        told = images.run(images.engine(), "history", "--no-trunc", tag)
        told += images.run(images.engine(), "image", "inspect", "--format", "{{.Config.Env}}", tag)
        told += images.in_image(target, "sh", "-c", "cat /etc/pip.conf; pip config list; env")[1]
        for name, value in images.pip_settings().items():
            assert len(value) < 6 or value not in told, name  # a short one, such as a number, may be anywhere
