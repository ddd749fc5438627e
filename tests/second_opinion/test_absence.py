"""Without TRL nothing is compared, and that is said; `make second-opinion` cannot pass by skipping."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TRAINERS = str(Path(__file__).with_name("trl_trainers.py"))
REPO = Path(__file__).parents[2]


def test_without_trl_the_modules_are_skipped_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delenv("SECOND_OPINION", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"NO SECOND OPINION: TRL is not.* `make second-opinion"):
        runpy.run_path(TRAINERS)


def test_where_it_is_required_its_absence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setenv("SECOND_OPINION", "required")
    with pytest.raises(ModuleNotFoundError, match="trl"):
        runpy.run_path(TRAINERS)
    recipe = (REPO / "Makefile").read_text().partition("\nsecond-opinion:")[2].partition("\n\n")[0]
    assert "BENCH_STAMP" in recipe
    assert "SECOND_OPINION=required" in recipe
