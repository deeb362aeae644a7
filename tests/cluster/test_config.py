"""Configuration: the three sources and their order, each kind of mistake, and the way back to flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import load, to_flags, variable


@dataclass(frozen=True)
class Sample:
    """A service for tests.

    Not shown in --help.
    """

    scheduler: str = field(metadata={"help": "HOST:PORT of the scheduler"})
    port: int = field(default=50051, metadata={"help": "port; 100% free with 0", "min": 0, "max": 65535})
    gib: float = field(default=1.5, metadata={"help": "GiB"})
    dtype: str = field(default="bfloat16", metadata={"help": "number type", "choices": ("bfloat16", "float32")})
    json_logs: bool = field(default=False, metadata={"help": "JSON log lines"})
    drain: bool = field(default=True, metadata={"help": "drain"})
    num_blocks: int | None = field(default=None, metadata={"help": "blocks", "min": 1})
    model: tuple[str, ...] = field(default=(), metadata={"help": "models", "metavar": "NAME=FOLDER"})
    devices: tuple[int, ...] = field(default=(0,), metadata={"help": "devices", "min": 0})

    def validate(self) -> None:
        if self.port == 13:
            raise ValueError("port: 13 brings bad luck (--port)")


def read(*argv: str, env: dict[str, str] | None = None) -> Sample:
    return load(Sample, "python -m draft_worker", ["--scheduler=h:1", *argv], env or {})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as caught:
        read(*argv, env=env)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_defaults() -> None:
    assert read() == Sample("h:1")


def test_each_type_from_each_source(tmp_path: Path) -> None:
    expected = Sample("s:2", 7, 2.0, "float32", True, False, 9, ("a=/x", "b=/y"), (1, 2))
    flags = [
        "--scheduler",
        "s:2",
        "--port",
        "7",
        "--gib",
        "2",
        "--dtype",
        "float32",
        "--json-logs",
        "--no-drain",
        "--num-blocks",
        "9",
    ]
    flags += ["--model", "a=/x", "--model", "b=/y", "--devices", "1", "--devices", "2"]
    assert read(*flags) == expected
    values = ["s:2", "7", "2", "float32", "yes", "off", "9", "a=/x,b=/y", "1, 2"]
    names = [entry.name for entry in dataclasses.fields(Sample)]
    env = {variable("draft_worker", name): value for name, value in zip(names, values, strict=True)}
    assert load(Sample, "draft_worker", [], env) == expected
    file = tmp_path / "c.toml"
    file.write_text(
        'scheduler="s:2"\nport=7\ngib=2\ndtype="float32"\njson-logs=true\ndrain=false\nnum_blocks=9\n'
        'model=["a=/x","b=/y"]\ndevices=[1,2]\n'
    )
    assert load(Sample, "draft_worker", ["--config", str(file)], {}) == expected
    assert load(Sample, "draft_worker", [], {"TANDEM_DRAFT_WORKER_CONFIG": str(file)}) == expected


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[draft_worker]\nport = 1\ngib = 1.0\ndtype = "float32"\n[gateway]\nunknown = 1\n')
    env = {"TANDEM_DRAFT_WORKER_PORT": "2", "TANDEM_DRAFT_WORKER_GIB": "2", "TANDEM_GATEWAY_PORT": "9"}
    config = read(f"--config={file}", "--port=3", env=env)
    assert (config.port, config.gib, config.dtype) == (3, 2.0, "float32")


def test_a_kubernetes_service_link_is_not_a_setting() -> None:
    assert read(env={"TANDEM_DRAFT_WORKER_PORT": "tcp://10.0.0.11:50051"}).port == 50051


def test_none_can_be_said() -> None:
    assert read("--num-blocks=none", env={"TANDEM_DRAFT_WORKER_NUM_BLOCKS": "5"}).num_blocks is None


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--port=x", ["port", "--port", "'x'", "whole number"]),
        ("--port=70000", ["port", "at least 0", "at most 65535"]),
        ("--port=1.5", ["whole number"]),
        ("--gib=nan", ["gib", "finite"]),
        ("--dtype=int8", ["dtype", "'int8'", "bfloat16, float32"]),
        ("--num-blocks=0", ["num_blocks", "at least 1"]),
        ("--devices=-1", ["devices", "'-1'", "at least 0"]),
        ("--port=13", ["port: 13 brings bad luck"]),
        ("--prt=1", ["unrecognized arguments: --prt=1"]),
        ("--por=1", ["unrecognized arguments: --por=1"]),
        ("--config=/nowhere/x.toml", ["/nowhere/x.toml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_named(capsys: pytest.CaptureFixture[str], flag: str, words: list[str]) -> None:
    message = refusal(capsys, flag)
    assert all(word in message for word in words), message


def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, env={"TANDEM_DRAFT_WORKER_JSON_LOGS": "maybe"})
    assert "TANDEM_DRAFT_WORKER_JSON_LOGS gives 'maybe'" in message
    assert "--json-logs" in message
    assert "true or false" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["unknown setting prot", "did you mean port?"]),
        ("zzz = 1", ["unknown setting zzz", "known are scheduler, port"]),
        ("port = ", ["not valid TOML"]),
        ("port = true", ["port", "whole number"]),
        ("port = 1.0", ["port", "whole number"]),
        ("dtype = 3", ["dtype", "text"]),
        ("model = 3", ["model", "list of str"]),
        ("port = 1\n[draft_worker]\n", ["port stands outside of a table"]),
    ],
)
def test_a_wrong_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    message = refusal(capsys, f"--config={file}")
    assert all(word in message for word in words), message


def test_a_missing_required_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Sample, "draft_worker", [], {})
    message = capsys.readouterr().err
    assert "scheduler is missing: set --scheduler, TANDEM_DRAFT_WORKER_SCHEDULER or scheduler in the file" in message


def test_help_lists_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for entry in dataclasses.fields(Sample):
        assert "--" + entry.name.replace("_", "-") in text
    for part in (
        "A service for tests.",
        "port; 100% free with 0 (default 50051)",
        "--dtype bfloat16|float32",
        "(required)",
        "--no-drain",
        "--model NAME=FOLDER models (may be repeated)",
        "TANDEM_DRAFT_WORKER_FIELD",
    ):
        assert part in text
    assert "Not shown" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("python -m draft_worker 0.")


def test_a_type_that_no_flag_can_carry_is_a_bug_told_at_once() -> None:
    @dataclass(frozen=True)
    class Wrong:
        table: dict[str, str] = field(default_factory=dict)

    with pytest.raises(TypeError, match="table"):
        load(Wrong, "x", [], {})


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)


@given(
    st.builds(
        Sample,
        scheduler=words,
        port=st.integers(14, 65535),
        gib=st.floats(-1e6, 1e6),
        dtype=st.sampled_from(["bfloat16", "float32"]),
        json_logs=st.booleans(),
        drain=st.booleans(),
        num_blocks=st.none() | st.integers(1, 99),
        model=st.lists(words.filter(lambda word: "," not in word), max_size=3).map(tuple),
        devices=st.just((0,)) | st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    )
)
def test_to_flags_is_the_inverse_of_load(config: Sample) -> None:
    assert load(Sample, "draft_worker", to_flags(config), {}) == config
