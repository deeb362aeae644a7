"""Planted faults can still be planted: one whose place was rewritten guards nothing, and `make mutants` runs rarely."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_faults_place_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from mutants import MUTANTS

    lost = {
        mutant.name: mutant.file
        for mutant in MUTANTS
        if not (path := ROOT / mutant.file).is_file() or path.read_text().count(mutant.old) != 1
    }
    assert not lost, "found elsewhere, or not once; tests/mutants must follow"
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


def test_every_faults_tests_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from mutants import MUTANTS

    files = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert not [name for name in files if not (ROOT / name).exists()]
