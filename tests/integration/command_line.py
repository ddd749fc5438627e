"""Commands one after another, each with what it left behind: for tests that wait for the command they are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.integration.command import Ended, Workplace


@dataclasses.dataclass(frozen=True)
class Start:
    """A command that has ended, and the state of its job then."""

    ended: Ended
    commits: list[int]
    """Steps."""
    num_points: int
    """Metric points in MLflow, of all runs."""
    status: str
    """Of the MLflow run that was begun last."""


class Line:
    """Commands one after another. Each runs when it, or one after it, is first asked for."""

    def __init__(self, place: Workplace, job: str, commands: dict[str, Callable[[], Ended]]) -> None:
        self.place = place
        self._job = job
        self._commands = commands
        self._starts: dict[str, Start] = {}

    def __getitem__(self, name: str) -> Start:
        for before, command in self._commands.items():
            if before not in self._starts:
                self._starts[before] = self._start(command)
            if before == name:
                return self._starts[name]
        raise KeyError(name)

    def _start(self, command: Callable[[], Ended]) -> Start:
        ended = command()
        statuses = self.place.mlflow("select status from runs order by start_time") or [("NONE",)]
        ((num_points,),) = self.place.mlflow("select count(*) from metrics")
        return Start(ended, self.place.commits(self._job), num_points, statuses[-1][0])


def assert_good(ended: Ended) -> None:
    assert (ended.code, ended.noise) == (0, []), ended.err
    assert ended.left_behind == ()


def assert_refused(ended: Ended, code: int, *words: str) -> None:
    """One clear message on stderr, and the same as the one object that --json promises."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    error = ended.json["error"]
    assert error["exit_code"] == code
    assert ended.err.splitlines()[-1] == f"{error['type']}: {error['message']}"
    for word in words:
        assert word in ended.err.splitlines()[-1]
    assert ended.left_behind == ()
