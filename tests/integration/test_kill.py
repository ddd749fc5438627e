"""A run that is killed anywhere and run again ends in the same bits as one that was not.

Compared: weights, optimizer, engine state (RNG included), which rows each step took, and every deterministic metric of
the one MLflow run, each step exactly once.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.job_digest import final_state, ledger, metrics
from tests.integration.kill_target import start

pytestmark = pytest.mark.integration


def job_of(root: Path) -> Path:
    return root / "tests" / "small"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """(root, number of durable actions) of a run that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert start(root, 0, root / "count") == 0
    return root, int((root / "count").read_text())


def assert_same(root: Path, reference: Path) -> None:
    assert final_state(job_of(root)) == final_state(job_of(reference))
    assert ledger(job_of(root)) == ledger(job_of(reference))
    killed, whole = metrics(root, job_of(root)), metrics(reference, job_of(reference))
    assert killed.keys() == whole.keys()
    for key, history in whole.items():
        assert killed[key] == history, key


def kill_and_finish(root: Path, points: list[int]) -> int:
    """Start until it ends by itself, dying at `points` in turn; returns how many deaths there were."""
    for deaths, kill_at in enumerate([*points, 0]):
        code = start(root, kill_at, root / "count")
        if code == 0:
            return deaths
        assert code == -9, f"the run failed by itself with exit code {code}"
    raise AssertionError("the last run cannot be killed")


def test_two_undisturbed_runs_agree(undisturbed: tuple[Path, int], tmp_path: Path) -> None:
    assert start(tmp_path, 0, tmp_path / "count") == 0
    assert_same(tmp_path, undisturbed[0])


@pytest.mark.timeout(300)
def test_killed_at_ten_random_points(undisturbed: tuple[Path, int], tmp_path: Path) -> None:
    reference, num_actions = undisturbed
    draw = random.Random(20261202)
    points = [draw.randrange(1, num_actions) for _ in range(10)]
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        root.mkdir()
        assert kill_and_finish(root, [point]) == 1, f"action {point} of {num_actions} was not reached"
        assert_same(root, reference)


@pytest.mark.timeout(300)
def test_killed_again_and_again(undisturbed: tuple[Path, int], tmp_path: Path) -> None:
    reference, num_actions = undisturbed
    draw = random.Random(7)
    deaths = kill_and_finish(tmp_path, [draw.randrange(1, max(num_actions // 2, 2)) for _ in range(8)])
    assert deaths >= 2
    assert_same(tmp_path, reference)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(5400)
def test_killed_at_a_hundred_random_points(undisturbed: tuple[Path, int], tmp_path: Path) -> None:
    reference, num_actions = undisturbed
    draw = random.Random()
    for number in range(100):
        point = draw.randrange(1, num_actions)
        root = tmp_path / str(number)
        root.mkdir()
        assert kill_and_finish(root, [point, draw.randrange(1, num_actions)]) >= 1, f"action {point} was not reached"
        assert_same(root, reference)
