"""`Summary`: what a finished `finetune` shows. Owns its content and its looks; where it is stored is the caller's.

Before = the first evaluation of the last stage, so for sft then grpo: what sft alone had reached.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engines.config import Frozen
from flows.embedded_server import EmbeddedServer
from trinity_tasks.evaluator import Evaluation
from trinity_tasks.inspection import JobState
from trinity_tasks.reports import History, reward_curve_png, rollout_rows, rollouts_html, rollouts_markdown

NUM_ROLLOUTS_PRINTED = 5
MAX_CELL = 60
"""Characters of a rollout on the terminal."""


class StageSummary(Frozen):
    """One stage, in short."""

    name: str
    """Last part of the job's name."""
    steps: int
    taskset: str | None
    accuracy_before: float | None
    accuracy_after: float | None
    checkpoint_url: str | None
    to_continue: tuple[str, ...]
    """What --set takes to make this stage twice as long."""


class Summary(Frozen):
    """What was learnt, and how to look at it and go on."""

    stages: tuple[StageSummary, ...]
    duration_s: float
    """Wall time of the run that trained, from its command's start on if it was one, seconds."""
    accuracy_before: float | None
    accuracy_after: float | None
    """Held-out accuracy on the evaluation task set whose name comes first; None if nothing was evaluated."""
    samples_before: tuple[dict[str, Any], ...]
    samples_after: tuple[dict[str, Any], ...]
    """Rollouts: prompt, response, reward."""
    history: dict[str, tuple[tuple[int, float], ...]]
    """Curves of the last stage: name -> (step, value)."""
    job_url: str
    model_url: str | None
    """HF folder of the last checkpoint."""
    reward_curve: str | None
    """Where the picture of the reward curve lies."""
    mlflow_ui: str | None
    """Command or address that opens the MLflow UI."""
    prefect_ui: str
    """Command or address that opens the Prefect UI."""
    already_finished: bool = False
    """Nothing was trained: the job had been finished before. The rest is what that run had found."""

    @classmethod
    def of(
        cls,
        results: Sequence[JobState],
        history: History,
        duration_s: float,
        *,
        reward_curve: str | None = None,
        mlflow_ui: str | None = None,
        flow_run_id: object = None,
    ) -> Self:
        """From the states of all stages, in order. history: curves of the last stage, as the tracker knows them."""
        last = results[-1]
        measured = _first_taskset(last.evaluations)
        curves = {name: tuple(points) for name, points in history.items() if points}
        if measured:
            curves["held-out accuracy"] = tuple((item.step, item.accuracy) for item in measured)
        return cls(
            stages=tuple(_stage(state, is_only=len(results) == 1) for state in results),
            duration_s=duration_s,
            accuracy_before=measured[0].accuracy if measured else None,
            accuracy_after=measured[-1].accuracy if measured else None,
            samples_before=measured[0].samples if measured else (),
            samples_after=measured[-1].samples if measured else (),
            history=curves,
            job_url=last.url,
            model_url=last.model_url,
            reward_curve=reward_curve,
            mlflow_ui=mlflow_ui,
            prefect_ui=_prefect_ui(flow_run_id),
        )

    @property
    def last_line(self) -> str:
        """The result in one line."""
        if self.accuracy_before is None or self.accuracy_after is None:
            return f"done in {self.duration_s:.0f} s; without buffer.explorer_input.eval_tasksets nothing was measured"
        change = f"{self.accuracy_before:.2f} -> {self.accuracy_after:.2f}"
        return f"held-out accuracy {change} in {self.duration_s:.0f} s"

    def texts(self) -> dict[str, str]:
        """Artifacts of the tracker's run: file name -> text."""
        rollouts = (self.samples_before, self.samples_after)
        return {
            "summary/summary.json": self.model_dump_json(indent=1),
            "summary/rollouts.md": rollouts_markdown(*rollouts),
            "summary/rollouts.html": rollouts_html(*rollouts, title="rollouts before and after"),
        }

    def files(self) -> dict[str, bytes]:
        """Artifacts of the tracker's run: file name -> bytes."""
        return {"summary/reward_curve.png": reward_curve_png(self.history)} if self.history else {}

    def metrics(self) -> dict[str, float]:
        """Metrics of the tracker's run."""
        found = {
            "summary/accuracy_before": self.accuracy_before,
            "summary/accuracy_after": self.accuracy_after,
            "summary/duration_s": self.duration_s,
        }
        return {name: value for name, value in found.items() if value is not None}

    def continue_command(self, command: Sequence[str]) -> str:
        """`command`, the one that was given, for a last stage of twice as many steps."""
        settings = self.stages[-1].to_continue
        keys = {setting.partition("=")[0] for setting in settings}
        return shlex.join([*_without(command, keys), *(word for setting in settings for word in ("--set", setting))])


def _without(command: Sequence[str], keys: Collection[str]) -> list[str]:
    """`command` without its settings of these keys: a new one comes instead."""
    kept: list[str] = []
    for word in command:
        if word.removeprefix("--set=").partition("=")[0].strip() not in keys:
            kept.append(word)
        elif not word.startswith("--set="):
            kept.pop()  # the --set before it
    return kept


def _first_taskset(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """By step, of the task set whose name comes first."""
    names = [item.taskset for item in evaluations]
    return sorted((item for item in evaluations if item.taskset == names[0]), key=lambda item: item.step)


def _stage(state: JobState, is_only: bool) -> StageSummary:
    measured = _first_taskset(state.evaluations)
    name = state.name.rpartition("/")[2]
    section = "trainer" if is_only else f"stages.{name}.trainer"
    met_target = state.finished and state.total_steps is not None and state.step < state.total_steps
    return StageSummary(
        name=name,
        steps=state.step,
        taskset=measured[0].taskset if measured else None,
        accuracy_before=measured[0].accuracy if measured else None,
        accuracy_after=measured[-1].accuracy if measured else None,
        checkpoint_url=state.checkpoint_url,
        to_continue=(f"{section}.total_steps={2 * state.step}", *([f"{section}.stop_when=null"] if met_target else [])),
    )


def _prefect_ui(flow_run_id: object) -> str:
    """The run's page, if a server shows it; for an embedded run the command that starts one on the same database."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    page = f"/runs/flow-run/{flow_run_id}" if flow_run_id else "/runs"
    if settings.api.url and not EmbeddedServer.running:
        return f"{settings.ui_url or settings.api.url.removesuffix('/api')}{page}"
    return f"prefect server start  # then http://127.0.0.1:4200{page}"


# -- on the terminal --------------------------------------------------------------------------------------------------


def print_summary(
    result: Mapping[str, Any], *, console: Console | None = None, command: Sequence[str] | None = None
) -> None:
    """Print everything; the last line is exactly `held-out accuracy 0.31 -> 0.93 in 214 s`, with its own numbers.

    command: what the user typed, for the command that continues; None: this process's arguments.
    """
    summary = Summary.model_validate(result)
    console = console or Console()
    stages = Table("stage", "steps", "held-out tasks", "before", "after", box=None, pad_edge=False)
    for stage in summary.stages:
        accuracies = (_number(stage.accuracy_before), _number(stage.accuracy_after))
        stages.add_row(stage.name, str(stage.steps), stage.taskset or "-", *accuracies)
    console.print("", stages)
    if summary.samples_before or summary.samples_after:
        console.print("", _rollout_table(summary))
    typed = _typed_command() if command is None else command
    for label, value in (
        ("model", summary.model_url),
        ("checkpoint", summary.stages[-1].checkpoint_url),
        ("reward curve", summary.reward_curve),
        ("Prefect UI", runnable(summary.prefect_ui)),
        ("MLflow UI", runnable(summary.mlflow_ui or "")),
        ("train longer", summary.continue_command(typed)),
    ):
        if value:
            _print_plain(console, f"{label:<13} {value}")
    _print_plain(console, "")
    if summary.already_finished:
        _print_plain(console, "this job was finished before: nothing was trained; the command above goes on with it")
    _print_plain(console, summary.last_line)


def _rollout_table(summary: Summary) -> Table:
    table = Table("prompt", "before", "reward", "after", "reward", box=None, pad_edge=False)
    for row in rollout_rows(summary.samples_before, summary.samples_after)[:NUM_ROLLOUTS_PRINTED]:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: str | float | None) -> Text:
    flat = "" if value is None else " ".join(value.split()) if isinstance(value, str) else f"{value:g}"
    return Text(flat if len(flat) <= MAX_CELL else flat[: MAX_CELL - 3] + "...")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)


def _typed_command() -> list[str]:
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        return ["trinity-flows", *sys.argv[1:]]
    return [runnable(program.name), *sys.argv[1:]]


def runnable(command: str) -> str:
    """`command` with its program as a path, if the shell would not find it: beside this Python, as in a virtual env."""
    program, space, rest = command.partition(" ")
    beside = Path(sys.executable).parent / program
    if "://" in program or not program or shutil.which(program) or not beside.exists():
        return command
    here = beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside
    return f"{shlex.quote(str(here))}{space}{rest}"
