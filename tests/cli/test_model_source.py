"""What a user may call a model."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli import model_source
from cli.fake_model import write_fake_model
from cli.model_source import ModelUnavailable, resolve, resolve_draft, served_name


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    assert resolve(str(folder), "transformers", tmp_path) == folder
    assert resolve(str(folder), "fake", tmp_path) == folder


def test_the_fake_engine_makes_its_own_model(tmp_path: Path) -> None:
    folder = resolve("default", "fake", tmp_path)
    assert (folder / "tokenizer.json").is_file()
    assert served_name("default", folder) == "fake"


def test_the_fake_engine_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        resolve(str(tmp_path), "fake", tmp_path)


def test_a_cached_default_model_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    cached = tmp_path / "models" / model_source.DEFAULT_NAME
    cached.mkdir(parents=True)
    assert resolve("default", "transformers", tmp_path) == cached
    assert served_name("default", cached) == model_source.DEFAULT_NAME


def test_the_default_models_name_is_the_engines() -> None:
    """Read, not imported: the engine's module brings torch."""
    source = Path(model_source.__file__).parent.parent / "engine" / "default_model.py"
    names = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert names["DEFAULT_MODEL_NAME"] == model_source.DEFAULT_NAME


def finished(monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str) -> list[Any]:
    calls: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout=stdout)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_everything_else_is_the_engines_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fake_model(tmp_path / "converted")
    calls = finished(monkeypatch, 0, f"some noise\n{folder}\n")
    assert resolve("some/hub-model", "transformers", tmp_path) == folder
    assert calls[0][-3:] == ["-m", "cli.resolve_model", "some/hub-model"]


def test_a_model_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(monkeypatch, 2, "")
    with pytest.raises(ModelUnavailable, match="the model nowhere/m"):
        resolve("nowhere/m", "transformers", tmp_path)


@pytest.mark.parametrize(
    ("model", "name"), [("org/Model-7B", "Model-7B"), ("Model-7B", "Model-7B"), ("org/Model-7B/", "Model-7B")]
)
def test_hub_models_are_served_under_their_own_name(model: str, name: str) -> None:
    assert served_name(model, Path("/cache/1234")) == name


def test_files_and_folders_are_served_under_their_own_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4.gguf").touch()
    assert served_name(str(tmp_path / "tiny.Q4.gguf"), Path("/cache/1234")) == "tiny.Q4"
    (tmp_path / "folder").mkdir()
    assert served_name(f"{tmp_path}/folder/", tmp_path / "folder") == "folder"


def test_a_draft_is_a_model_or_a_word(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    for word in ("ngram", "none", "fake"):
        assert resolve_draft(word, "default", "transformers", tmp_path) == word
    assert resolve_draft(str(folder), "default", "transformers", tmp_path) == str(folder)


def test_the_default_model_comes_with_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_SHIPPED_DRAFT", tmp_path)
    assert resolve_draft("auto", "default", "transformers", tmp_path) == "ngram"
    (tmp_path / "config.json").write_text("{}")
    assert resolve_draft("auto", "default", "transformers", tmp_path) == str(tmp_path)
    assert resolve_draft("auto", "default", "fake", tmp_path) == "ngram"
    assert resolve_draft("auto", str(tmp_path / "m"), "transformers", tmp_path) == "ngram"
