"""A run that is killed anywhere and run again ends in the same bits as one that was not.

Compared: weights, optimizer, engine state (RNG included), which rows each step took, and every deterministic metric of
the one MLflow run, each step exactly once.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.job_digest import final_state, ledger, metrics
from tests.integration.kill_target import start

pytestmark = pytest.mark.integration


def job_of(root: Path) -> Path:
    return root / "tests" / "small"


@pytest.fixture
def new_root(tmp_path: Path, empty_database: Path) -> Callable[[], Path]:
    """Makes an empty folder for jobs."""
    numbers = itertools.count()

    def make() -> Path:
        root = tmp_path / str(next(numbers))
        root.mkdir()
        shutil.copy(empty_database, root)
        return root

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> tuple[Path, int]:
    """(root, number of durable actions) of a run that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(empty_database, root)
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


def test_two_undisturbed_runs_agree(undisturbed: tuple[Path, int], new_root: Callable[[], Path]) -> None:
    root = new_root()
    assert start(root, 0, root / "count") == 0
    assert_same(root, undisturbed[0])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_points", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.torture])])
def test_killed_at_random_points(num_points: int, undisturbed: tuple[Path, int], new_root: Callable[[], Path]) -> None:
    reference, num_actions = undisturbed
    draw = random.Random(20261202)
    points = [draw.randrange(1, num_actions) for _ in range(num_points)]
    for point in points:
        root = new_root()
        assert kill_and_finish(root, [point]) == 1, f"action {point} of {num_actions} was not reached"
        assert_same(root, reference)


@pytest.mark.timeout(300)
def test_killed_again_and_again(undisturbed: tuple[Path, int], new_root: Callable[[], Path]) -> None:
    reference, num_actions = undisturbed
    draw = random.Random(7)
    root = new_root()
    deaths = kill_and_finish(root, [draw.randrange(1, max(num_actions // 2, 2)) for _ in range(8)])
    assert deaths >= 2
    assert_same(root, reference)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(5400)
def test_killed_at_a_hundred_random_points(undisturbed: tuple[Path, int], new_root: Callable[[], Path]) -> None:
    reference, num_actions = undisturbed
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    draw = random.Random(seed)
    for _ in range(100):
        point = draw.randrange(1, num_actions)
        root = new_root()
        assert kill_and_finish(root, [point, draw.randrange(1, num_actions)]) >= 1, f"action {point} was not reached"
        assert_same(root, reference)
        shutil.rmtree(root)
