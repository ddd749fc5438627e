"""What the command line prints: nothing cut at 80 columns, nothing left out."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from flows import output

LONG_URL = "s3://bucket/" + "folder/" * 20 + "global_step_00000012-0123abcd"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "console", Console(highlight=False, width=80))


def measured(**changes: Any) -> dict[str, Any]:
    result = {
        "taskset": "held_out", "step": 12, "accuracy": 0.25, "num_tasks": 4, "num_samples": 8, "duration_s": 1.0,
        "mean_response_tokens": 3.0, "definition": {}, "samples": (),
    }  # fmt: skip
    return result | changes


def test_a_comparison_keeps_its_numbers_in_a_row_and_every_url_whole(capsys: pytest.CaptureFixture[str]) -> None:
    job = {
        "name": "backward/grpo", "step": 320, "finished": True, "experiences": 163840, "checkpoint": LONG_URL,
        "mlflow_run_id": "f" * 32, "taskset": "held_out", "accuracy_before": 0.31, "accuracy": 0.92578,
    }  # fmt: skip
    new = job | {"name": "new", "step": 0, "finished": False, "experiences": 0, "checkpoint": None}
    new |= {"mlflow_run_id": None, "taskset": None, "accuracy_before": None, "accuracy": None}
    output.print_result("compare", {"jobs": [job, new]})
    head, first, second, *below = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "step", "experiences", "task", "set", "before", "after"]
    assert first.split() == ["1", "backward/grpo", "320", "163840", "held_out", "0.3100", "0.9258"]
    assert second.split() == ["2", "new", "0,", "not", "finished", "0", "-", "-", "-"]
    assert below == [
        f"1  checkpoint {LONG_URL}, MLflow run {'f' * 32}",
        "2  checkpoint none yet, MLflow run none yet",
    ]


def test_an_evaluation_is_a_line_for_each_task_set(capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = [measured(), measured(taskset="other", accuracy=1.0)]
    output.print_result("evaluate", {"name": "demo/grpo", "evaluations": evaluations})
    assert capsys.readouterr().out.splitlines() == [
        "demo/grpo",
        "held_out at step 12: accuracy 0.2500 (4 tasks, 8 samples)",
        "other at step 12: accuracy 1.0000 (4 tasks, 8 samples)",
    ]


def test_a_ledger_entry_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    prompt, response = "[b]" + "word " * 40, "x" * 100
    row = {
        "eid": "123/45/6-abcdef", "reward": 1 / 3, "model_version": 7, "num_tokens": 300, "prompt": prompt,
        "response": response,
    }  # fmt: skip
    rows = [row, row | {"reward": None, "prompt": "", "response": ""}]
    output.print_ledger({"step": 3, "num_rows": 2, "attempt": 1, "experiences": rows})
    printed = capsys.readouterr().out
    assert printed.startswith("step 3: 2 experiences, recorded by attempt 1\n")
    assert (printed.count("word"), printed.count("[b]"), printed.count("x") - printed.count("exp")) == (40, 1, 100)
    assert "0.333333" in printed
    assert "0.3333333" not in printed
    assert max(map(len, printed.splitlines())) <= 80
