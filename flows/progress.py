"""`Progress`: what a run shows while it trains. A bar on a terminal, else a line now and then; an artifact in Prefect.

Owns: what is shown and how often. `update` only stores numbers; threads draw and publish (`live_artifacts.py`), so
neither a slow terminal nor a slow Prefect server costs a step anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bar

from flows.live_artifacts import Content, LiveArtifact, LiveArtifacts, artifact_key
from flows.rollouts import Rollouts

SHOWN = (
    ("reward", ("data/reward_mean", "explore/reward_mean"), "{:.3f}"),
    ("loss", ("loss/policy", "loss/total"), "{:.4f}"),
    ("KL", ("kl/reference", "kl/teacher", "kl/penalty", "kl/policy"), "{:z.4f}"),
    ("tokens/s", ("perf/tokens_per_s",), "{:,.0f}"),
)
"""Label, the metrics of which the first known one is shown, format."""

DRAW_TIMEOUT_S = 5.0
"""Longest wait at the end for a terminal that hangs."""

PUBLISH_INTERVAL_S = 5.0
ROLLOUTS_INTERVAL_S = 20.0
"""How often the artifacts in Prefect follow: the progress, and the table of rollouts, which is longer."""

WINDOW = 50
"""Steps over which the time left is estimated."""


class Progress:
    """Follows one job. Use as a context manager, with `update` as the trainer's observer.

    Example:
        >>> with Progress("rft", total_steps=2, console=Console(quiet=True)) as progress:
        ...     progress.update(1, {"data/reward_mean": 0.5, "perf/tokens_per_s": 1200.0})
        ...     progress.line().split(", ETA")[0]
        'rft: step 1/2, reward 0.500, tokens/s 1,200'
    """

    def __init__(
        self,
        name: str,
        total_steps: int | None,
        *,
        console: Console | None = None,
        draw_interval_s: float = 0.5,
        line_interval_s: float = 10.0,
        publish_interval_s: float = PUBLISH_INTERVAL_S,
        flow_run_id: Any = None,
    ) -> None:
        """total_steps None: open end. console: stderr. flow_run_id: the Prefect run that is active, if there is one."""
        self.name = name
        self.total_steps = total_steps
        self.step = 0
        self._console = console or Console(stderr=True)
        self._is_live = self._console.is_terminal
        self._interval_s = draw_interval_s if self._is_live else line_interval_s
        self.rollouts = Rollouts(name)
        """Told of the rows of each step, it is a table in Prefect."""
        progress = LiveArtifact("progress", artifact_key("progress", name), self._content, publish_interval_s)
        table = LiveArtifact("table", artifact_key("rollouts", name), self.rollouts.content, ROLLOUTS_INTERVAL_S)
        self._artifacts = LiveArtifacts((progress, table), flow_run_id)
        self._metrics: Mapping[str, float] = {}
        self._phase = ""
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._shown_line = ""
        self._bar: Bar | None = None
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that `step` is done. Metrics that this step lacks keep their last value."""
        self._metrics = {**self._metrics, **metrics}
        self.step, self._phase = step, ""
        self._times.append((time.monotonic(), step))

    def phase(self, name: str) -> None:
        """Say what is going on until the next step, "evaluating" for example."""
        self._phase = name

    @property
    def eta_s(self) -> float | None:
        """Seconds left, by the pace of the last steps; None if unknown."""
        if self.total_steps is None or len(self._times) < 2:
            return None
        (first, first_step), (last, last_step) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        return max(self.total_steps - last_step, 0) * (last - first) / (last_step - first_step)

    def numbers(self) -> str:
        """The chosen metrics and the time left, as far as they are known."""
        parts: list[str] = []
        for label, keys, form in SHOWN:
            known = [self._metrics[key] for key in keys if math.isfinite(self._metrics.get(key, math.nan))]
            if known and not (label == "loss" and parts):  # the reward says more
                parts.append(f"{label} {form.format(known[0])}")
        if self._metrics.get("update/num_applied", 1) == 0:
            parts.append("no update")
        if (left := self.eta_s) is not None:
            parts.append(f"ETA {int(left) // 60}:{int(left) % 60:02d}")
        return ", ".join([*parts, self._phase] if self._phase else parts)

    def line(self) -> str:
        """Everything in one line of text."""
        steps = f"step {self.step}" if self.total_steps is None else f"step {self.step}/{self.total_steps}"
        return ", ".join(part for part in (f"{self.name}: {steps}", self.numbers()) if part)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._is_live:
            numbers = TextColumn("{task.fields[numbers]}", markup=False)
            columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(24)]
            self._bar = Bar(*columns, MofNCompleteColumn(), numbers, console=self._console, auto_refresh=False)
            self._bar.add_task(self.name, total=self.total_steps, numbers="")
            self._bar.start()
        self._follow("progress-display", self._draw, self._interval_s)
        self._artifacts.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(DRAW_TIMEOUT_S)
        self._artifacts.__exit__()
        if self._bar is not None:
            self._bar.stop()

    def _follow(self, name: str, show: Callable[[], None], interval_s: float) -> None:
        def repeat() -> None:
            while not self._done.wait(interval_s):
                show()
            show()

        self._threads.append(threading.Thread(target=repeat, name=name, daemon=True))
        self._threads[-1].start()

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.step, numbers=self.numbers(), refresh=True)
        elif (line := self.line()) != self._shown_line:
            self._shown_line = line
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _content(self) -> Content:
        """The artifact in Prefect."""
        percent = min(100.0 * self.step / self.total_steps, 100.0) if self.total_steps else 0.0
        return Content(percent, self.line())
