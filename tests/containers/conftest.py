"""Real containers take minutes and an engine that runs them, so they are started only where `-m containers` asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import images
from tests.containers.stack import HealthChecks, Stack

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave this folder's tests out of every other run."""
    if "containers" in config.option.markexpr:
        return
    mine = [item for item in items if HERE in item.path.parents]
    if mine:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both images, of the code as it is now."""
    images.build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module", params=["fake", "real"])
def stack(request: pytest.FixtureRequest, built: None) -> Iterator[Stack]:
    """A stack of one worker, one gateway, two schedulers, Redis and a draft worker; gone afterwards, volumes too."""
    kind: str = request.param
    settings = {"TANDEM_LISTEN": "127.0.0.1:"}  # each gateway on any free port
    if kind == "real":
        from engine.default_model import fetch_default_model

        settings["TANDEM_MODELS"] = str(fetch_default_model().parent)
    one = Stack(f"tandem-test-{kind}", kind, settings)
    one.compose("down", "-v", "-t", "5", check=False)  # of a round that was interrupted
    with HealthChecks(one):
        try:
            one.up()
            yield one
        finally:
            one.compose("down", "-v", "-t", "30")
            assert one.containers(stopped=True) == []
