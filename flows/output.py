"""What the command line prints of a job, a ledger entry or a flow's result. Owns looks, no content."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from trinity_tasks.inspection import JobState

console = Console(highlight=False)


@contextlib.contextmanager
def quiet(enabled: bool) -> Iterator[None]:
    """With --json: whatever is printed meanwhile goes to stderr, so that stdout holds one object."""
    if not enabled:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_job(state: JobState) -> None:
    """The answer of `show`."""
    total = "open end" if state.total_steps is None else str(state.total_steps)
    console.print(f"[bold]{state.name}[/]  {state.url}", soft_wrap=True)
    console.print(f"step {state.step} of {total}, {'finished' if state.finished else 'not finished'}")
    console.print(
        f"experiences trained: {state.num_experiences_trained}; steps in the ledger: {state.num_steps_recorded}"
    )
    console.print(f"MLflow run: {state.mlflow_run_id or 'none yet'}; attempts: {state.attempt}")
    commits = Table("commit", "step", "created", "MB", "in checkpoints/", box=None)
    for commit in state.commits:
        size = f"{commit.num_bytes / 1e6:.2f}"
        folder = commit.url.rpartition("/")[2]  # the whole URL would be cut where the terminal ends
        commits.add_row(str(commit.number), str(commit.step), commit.created_at, size, folder)
    console.print(commits)
    if state.metrics:
        metrics = Table("last metrics", "value", box=None)
        for name, value in sorted(state.metrics.items()):
            metrics.add_row(name, f"{value:.6g}")
        console.print(metrics)
    for item in state.evaluations:
        console.print(
            f"{item.taskset} at step {item.step}: accuracy {item.accuracy:.4f} "
            f"({item.num_tasks} tasks, {item.num_samples} samples)"
        )
    for change in state.changes:
        console.print(
            f"attempt {change['attempt']} changed {change['field']}: {change['before']!r} -> {change['after']!r}"
        )


def print_ledger(entry: Mapping[str, Any]) -> None:
    """The answer of `ledger`."""
    console.print(f"step {entry['step']}: {entry['num_rows']} experiences, recorded by attempt {entry['attempt']}")
    rows = Table("eid", "reward", "version", "tokens", "prompt", "response", box=None)
    for row in entry["experiences"]:
        cells = (row["eid"], row["reward"], row["model_version"], row["num_tokens"], row["prompt"], row["response"])
        rows.add_row(*(str(cell) for cell in cells))
    console.print(rows)


def print_result(flow: str, result: Mapping[str, Any], duration_s: float) -> None:
    """What a flow returned. duration_s: of the whole command."""
    content = dict(result)
    already_finished = content.pop("already_finished", False)
    if already_finished:
        console.print("already finished: nothing was trained; this is what it reached")
    if flow == "finetune":
        from flows.summary import print_summary

        print_summary(content if already_finished else {**content, "duration_s": duration_s})
    elif flow == "train":
        print_job(JobState.model_validate(content))
    elif flow == "compare":
        table = Table(*result["jobs"][0], box=None)
        for row in result["jobs"]:
            table.add_row(*(str(cell) for cell in row.values()))
        console.print(table)
    else:
        console.print_json(data=result)
