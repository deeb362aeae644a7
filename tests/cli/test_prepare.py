"""What `tandem prepare` writes is what the services read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.__main__ import main
from cli.fake_model import write_fake_model
from cluster import config
from draft_worker.config import DraftWorkerConfig
from gateway.config import GatewayConfig
from worker.config import WorkerConfig


def read(path: Path) -> tuple[GatewayConfig, WorkerConfig, DraftWorkerConfig]:
    """As the services' own `main` does."""
    argv = [f"--config={path}"]
    return (
        config.load(GatewayConfig, "python -m gateway", argv, {}),
        config.load(WorkerConfig, "worker", argv, {}),
        config.load(DraftWorkerConfig, "draft_worker", argv, {}),
    )


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_fake_model(tmp_path / 'a "quoted" näme 🚲')
    to = tmp_path / "new" / "cluster.toml"
    assert main(["prepare", f"--model={folder}", f"--draft={write_fake_model(tmp_path / 'small')}", f"--to={to}"]) == 0
    gateway, worker, draft = read(to)
    assert gateway.models() == {folder.name: str(folder)}
    assert (worker.model, worker.model_name, worker.engine, worker.draft) == (
        str(folder),
        folder.name,
        "transformers",
        "on",
    )
    assert (draft.target, draft.target_model, draft.draft) == (folder.name, str(folder), str(tmp_path / "small"))
    assert worker.draft_model == draft.draft
    assert folder.name in capsys.readouterr().out
    assert [path.name for path in to.parent.iterdir()] == ["cluster.toml"], "nothing is left behind"


def test_without_weights(tmp_path: Path) -> None:
    to = tmp_path / "cluster.toml"
    flags = ["--engine=fake", "--draft=none", "--served-model-name=smol", f"--to={to}"]
    assert main(["prepare", *flags]) == 0
    gateway, worker, draft = read(to)
    assert gateway.models() == {"smol": worker.model}
    assert (Path(worker.model) / "tokenizer.json").is_file()
    assert (worker.engine, worker.draft) == ("fake", "off")
    assert draft.draft == worker.draft_model == "ngram"


def test_again_with_another_model(tmp_path: Path) -> None:
    to = tmp_path / "cluster.toml"
    for name in ("one", "two"):
        assert main(["prepare", "--engine=fake", f"--served-model-name={name}", f"--to={to}"]) == 0
        assert list(read(to)[0].models()) == [name]


def test_a_model_that_isnt_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "cluster.toml"
    assert main(["prepare", f"--model={tmp_path / 'nowhere'}", "--engine=fake", f"--to={to}"]) == 1
    assert "is no model folder" in capsys.readouterr().err
    assert not to.exists()
