"""What the command line prints of a job, a ledger entry or a flow's result. Owns looks, no content."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trinity_tasks.evaluator import Evaluation
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
    console.print(f"[bold]{state.name}[/]  {state.url}", soft_wrap=True)
    console.print(_standing(state))
    for stage in state.stages:
        console.print(f"stage {stage.name}: {_standing(stage)}  {stage.url}", soft_wrap=True)
    console.print(
        f"experiences trained: {state.num_experiences_trained}; steps in the ledger: {state.num_steps_recorded}"
    )
    console.print(f"MLflow run: {state.mlflow_run_id or 'none yet'}; attempts: {state.attempt}")
    if state.commits:
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
    _print_evaluations(state.evaluations)
    for change in state.changes:
        console.print(
            f"attempt {change['attempt']} changed {change['field']}: {change['before']!r} -> {change['after']!r}"
        )


def _standing(state: JobState) -> str:
    total = "open end" if state.total_steps is None else str(state.total_steps)
    return f"step {state.step} of {total}, {'finished' if state.finished else 'not finished'}"


def _print_evaluations(evaluations: Iterable[Evaluation]) -> None:
    for item in evaluations:
        console.print(
            f"{item.taskset} at step {item.step}: accuracy {item.accuracy:.4f} "
            f"({item.num_tasks} tasks, {item.num_samples} samples)"
        )


def print_ledger(entry: Mapping[str, Any]) -> None:
    """The answer of `ledger`."""
    console.print(f"step {entry['step']}: {entry['num_rows']} experiences, recorded by attempt {entry['attempt']}")
    rows = Table(box=None)
    for name in ("eid", "reward", "version", "tokens", "prompt", "response"):
        rows.add_column(name, overflow="fold")  # to the next line: nothing is cut
    for row in entry["experiences"]:
        reward = "-" if row["reward"] is None else f"{row['reward']:g}"
        cells = (row["eid"], reward, row["model_version"], row["num_tokens"], row["prompt"], row["response"])
        rows.add_row(*(escape(str(cell)) for cell in cells))
    console.print(rows)


def json_result(flow: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a flow returned, for --json: the commands in it can be run from here."""
    if flow != "finetune":
        return dict(result)
    from flows.summary import runnable

    return {**result, **{key: runnable(result[key]) for key in ("prefect_ui", "mlflow_ui") if result[key]}}


def print_result(flow: str, result: Mapping[str, Any]) -> None:
    """What a flow returned."""
    if flow == "finetune":
        from flows.summary import print_summary

        print_summary(result)
    elif flow == "train":
        state = dict(result)
        if state.pop("already_finished"):
            console.print("already finished: nothing was trained; this is what it reached")
        print_job(JobState.model_validate(state))
    elif flow == "compare":
        _print_comparison(result["jobs"])
    elif flow == "evaluate":
        console.print(result["name"])
        _print_evaluations(map(Evaluation.model_validate, result["evaluations"]))
    else:
        console.print(f"{result['name']}: {result['num_steps']} steps explored, one shard of experiences each")


def _print_comparison(jobs: Sequence[Mapping[str, Any]]) -> None:
    """A narrow table, and below it what would not fit into one."""
    table = Table("", "job", "step", "experiences", "task set", "before", "after", box=None)
    for number, job in enumerate(jobs, start=1):
        accuracies = ("-" if job[key] is None else f"{job[key]:.4f}" for key in ("accuracy_before", "accuracy"))
        step = f"{job['step']}{'' if job['finished'] else ', not finished'}"
        table.add_row(str(number), job["name"], step, str(job["experiences"]), job["taskset"] or "-", *accuracies)
    console.print(table)
    for number, job in enumerate(jobs, start=1):
        where = f"checkpoint {job['checkpoint'] or 'none yet'}, MLflow run {job['mlflow_run_id'] or 'none yet'}"
        console.print(f"{number}  {where}", soft_wrap=True)
