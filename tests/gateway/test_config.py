"""Flags of the gateway."""

from __future__ import annotations

import pytest

from cluster.config import load
from gateway.config import GatewayConfig


def test_models_and_schedulers() -> None:
    flags = ["--model", "a=/m/a", "--model", "b=/m/b=x", "--scheduler", "h:1, h:2", "--port", "0"]
    config = load(GatewayConfig, "python -m gateway", flags, {"TANDEM_GATEWAY_DRAIN_TIMEOUT_S": "3"})
    assert config.models() == {"a": "/m/a", "b": "/m/b=x"}
    assert config.schedulers() == ("h:1", "h:2")
    assert (config.port, config.drain_timeout_s, config.host) == (0, 3.0, "127.0.0.1")


@pytest.mark.parametrize("flags", [[], ["--model=a"], ["--model==f"], ["--model=a=1", "--model=a=2"]])
def test_wrong_models_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(GatewayConfig, "python -m gateway", flags, {})
    assert exit_.value.code == 2
