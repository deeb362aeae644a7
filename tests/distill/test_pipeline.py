"""`tandem distill` from a target's folder to a draft's: killed anywhere it goes on, and what it makes is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cli.__main__ import build_parser, main
from distill.pipeline import Plan, distill
from distill.prompts import TRAIN
from distill.shards import shard_paths
from draft_worker.config import DraftWorkerConfig
from draft_worker.loading import options_of
from drafting.loading import load_proposer
from engine.draft_folder import CONFIG, WEIGHTS
from tests.distill.killing import FLAGS


@dataclass(frozen=True)
class Made:
    folder: Path
    said: str


@pytest.fixture(scope="module")
def made(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Without interruption."""
    out = tmp_path_factory.mktemp("whole") / "draft"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("cli.distill_report.Shown.note", lambda self, text: said.append(text))
        assert main(["distill", f"--target={target_folder}", f"--out={out}", *FLAGS]) == 0
    return Made(out, "\n".join(said))


def test_every_stage_is_told(made: Made, target_folder: Path) -> None:
    for stage in ("held-out answers", "answers of the target", "training"):
        assert f"{stage} 100%" in made.said
    assert made.said.splitlines()[-1] == (
        f"the draft is in {made.folder}: tandem up --model {target_folder} --draft {made.folder}"
    )


def test_killed_anywhere_it_goes_on(made: Made, target_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    script = str(Path(__file__).with_name("killing.py"))
    run = subprocess.run(
        [sys.executable, "-P", script, str(target_folder), str(out)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *killed, last = run.stdout.splitlines()[-1].removeprefix("statuses ").split()
    # Writing held-out answers, each shard, the checkpoint; and once when the draft was there.
    shards = shard_paths(tmp_path / "draft.work" / "data" / TRAIN)
    assert killed == ["-9"] * (1 + len(shards) + 1 + 1)
    assert last == "0"
    assert "resumed at step 6" in run.stdout
    assert not list(tmp_path.rglob("*.partial-*"))
    assert (out / WEIGHTS).read_bytes() == (made.folder / WEIGHTS).read_bytes()
    assert json.loads((out / CONFIG).read_text()) == json.loads((made.folder / CONFIG).read_text())


def test_the_card_has_the_command(made: Made) -> None:
    text = (made.folder / "README.md").read_text()
    assert text.count("```") == 2
    command = text.split("```")[1].replace("\\\n", " ").split()
    given = build_parser().parse_args(command[1:])
    wanted = build_parser().parse_args(["distill", "--target=TARGET", "--out=FOLDER", *FLAGS])
    for name in ("layers", "head_tokens", "steps", "batch_tokens", "seed", "max_answer_tokens", "held_out_prompts"):
        assert getattr(given, name) == getattr(wanted, name), name
    # As many as there are; the same shards hold them.
    assert given.answer_tokens >= wanted.answer_tokens


def test_a_draft_worker_takes_the_folder(made: Made, target_folder: Path) -> None:
    config = DraftWorkerConfig(
        target="tiny", target_model=str(target_folder), draft=str(made.folder), threads=1, dtype="float32"
    )
    load_proposer(options_of(config))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--layers=4"], "--layers: the target has 3, and a draft 1 of them or more"),
        (["--max-answer-tokens=1000"], "--max-answer-tokens: two questions and answers of 1000 tokens take up to"),
        (["--device=cuda"], "--device: device 'cuda' was asked for"),
        (["--start-from={tmp}"], "--start-from: {tmp} has no config.json"),
        (["--start-from={made}", "--layers=3"], "--layers: {made} has 1"),
        (["--start-from={made}", "--head-tokens=300"], "--head-tokens: {made} has 200, of which fewer can be kept"),
        (["--target={tmp}/nowhere"], "--target: can't get the model"),
        (["--out={target}"], "--out: {target} holds something that is no draft"),
        (["--out={tmp}/file"], "--out: {tmp}/file can't be a folder: "),
        (["--work={tmp}/file"], "--work: {tmp}/file can't be a folder: "),
        (["--work={made}.work", "--seed=2"], "--work: {made}.work/data/data.json: seed is 1 instead of 2"),
        (["--work={made}.work", "--steps=7"], "--steps: {made}.work/checkpoint.pt was begun with 6 instead of 7"),
    ],
)
def test_what_is_wrong_is_named(
    flags: list[str],
    line: str,
    made: Made,
    target_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available() and "--device=cuda" in flags:
        pytest.skip("there is a GPU")
    (tmp_path / "file").touch()
    names = {"tmp": str(tmp_path), "target": str(target_folder), "made": str(made.folder)}
    given = [flag.format(**names) for flag in flags]
    assert main(["distill", f"--target={target_folder}", f"--out={tmp_path / 'out'}", *FLAGS, *given]) == 1
    assert f"tandem: {line.format(**names)}" in capfd.readouterr().err


def test_a_part_only_generates(target_folder: Path, tmp_path: Path) -> None:
    plan = Plan(
        target=target_folder,
        name="tiny",
        out=tmp_path / "out",
        work=tmp_path / "work",
        answer_tokens=3000,
        max_answer_tokens=24,
        batch_size=16,
        threads=1,
        part=1,
        parts=2,
    )
    assert distill(plan, lambda what, share: None, None) == []  # type: ignore[arg-type]
    assert {path.name[-17:-12] for path in shard_paths(tmp_path / "work" / "data" / TRAIN)} >= {"00001"}
    assert not (tmp_path / "out").exists()


def test_shards_may_begin_anywhere() -> None:
    for text, shards in (("97/1", (97, 1)), ("1/2", (1, 2))):
        assert build_parser().parse_args(["distill", "--out=x", f"--shards={text}"]).shards == shards


@pytest.mark.parametrize("flag", ["--shards=1/0", "--shards=1", "--shards=-1/2", "--part=2/2"])
def test_what_is_no_part_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["distill", "--out=x", flag])
    assert f"{flag.partition('=')[0]}: " in capsys.readouterr().err
