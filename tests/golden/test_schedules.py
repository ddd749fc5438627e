"""Learning-rate factors against verl's schedulers."""

from typing import Any

import pytest

from engines.hf.optim import lr_factor
from tests.golden.cases import cases

VERL = [case for case in cases("lr_schedules") if case["name"].startswith("verl_")]
"""The tinker_* cases are of another engine."""


@pytest.mark.parametrize("case", VERL, ids=[case["name"] for case in VERL])
def test_lr_factor(case: Any) -> None:
    kind, settings = case["name"].removeprefix("verl_").split("/")
    numbers = dict(part.split("=") for part in settings.split(","))
    warmup, total = int(numbers["W"]), int(numbers["N"]) if "N" in numbers else None
    ours = [lr_factor(kind, t, warmup, total, float(numbers.get("min", 0))) for t in range(len(case["outputs"]))]
    assert ours == pytest.approx(case["outputs"], rel=1e-12, abs=1e-15)
