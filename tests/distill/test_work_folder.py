"""One run at a time, and no half a file under its name."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from distill.errors import Refused
from distill.work_folder import claimed, replace


def claim(folder: Path, part: int, parts: int) -> str:
    """In a process of its own: locks are a process's."""
    try:
        with claimed(folder, part, parts):
            return ""
    except Refused as error:
        return str(error)


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [((0, 1), (0, 1), True), ((0, 2), (0, 2), True), ((0, 2), (1, 2), False), ((1, 2), (0, 1), True)],
)
def test_one_run_at_a_time(tmp_path: Path, ours: tuple[int, int], theirs: tuple[int, int], refused: bool) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with claimed(tmp_path / "work", *ours):
            said = pool.apply(claim, (tmp_path / "work", *theirs))
        assert ("work: another run is at work in" in said) == refused
        assert pool.apply(claim, (tmp_path / "work", *theirs)) == ""


def test_what_is_cut_short_has_another_name(tmp_path: Path) -> None:
    path = tmp_path / "data" / "shard"
    path.parent.mkdir()
    path.write_text("before")

    def cut(partial: Path) -> None:
        partial.write_text("aft")
        raise InterruptedError

    with pytest.raises(InterruptedError):
        replace(path, cut)
    assert path.read_text() == "before"
    assert len(list(path.parent.iterdir())) == 2
    with claimed(tmp_path, 0, 2):
        assert len(list(path.parent.iterdir())) == 2, "another part may be writing it"
    with claimed(tmp_path):
        assert list(path.parent.iterdir()) == [path]
    replace(path, lambda partial: partial.write_text("after"))
    assert path.read_text() == "after"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"work: .*can't be a folder"), claimed(tmp_path / "file"):
        pass
