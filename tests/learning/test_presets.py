"""Every algorithm learns: the online ones to spell words that they have not seen, the offline ones their objective.

The settings are those of `preset_runs`, one seed; a gain of 0.08 is five standard errors of its measurement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from engines.algorithms.presets import PRESETS
from tests.learning import preset_runs
from tests.learning.preset_runs import Outcome, demonstrations, objective, pairs, preferred, reinforced, run, supervised

pytestmark = [pytest.mark.slow, pytest.mark.learning]

SUPERVISED = ("sft", "cpt")
DISTILLED = ("on_policy_distill", "jsd")
ONLINE = [name for name in PRESETS if name not in (*SUPERVISED, *DISTILLED, "dpo")]


class Runs:
    """Runs of this session, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[Outcome] = []

    def keep(self, outcome: Outcome) -> Outcome:
        """Note it for the table."""
        self.made.append(outcome)
        return outcome

    @functools.cached_property
    def start(self) -> str:
        """URL of the warm start."""
        return self._model(run(supervised(self.root, "start", 75)))

    @functools.cached_property
    def teacher(self) -> str:
        """URL of a model that spells nearly all words."""
        outcome = run(supervised(self.root, "teacher", 300))
        assert outcome.after > 0.9
        return self._model(outcome)

    @staticmethod
    def _model(outcome: Outcome) -> str:
        assert outcome.state.model_url is not None
        return outcome.state.model_url


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("presets"))


@pytest.fixture
def runs(all_runs: Runs, capsys: pytest.CaptureFixture[str]) -> Iterator[Runs]:
    """Prints what the test has run to the terminal, whatever pytest captures."""
    known = len(all_runs.made)
    yield all_runs
    with capsys.disabled():
        preset_runs.show(all_runs.made[known:])


def snapshot_of(outcome: Outcome) -> Path:
    """Local folder of its last checkpoint."""
    assert outcome.state.checkpoint_url is not None
    return Path(urlsplit(outcome.state.checkpoint_url).path)


def local(url: str) -> Path:
    return Path(urlsplit(url).path)


def mean_of(outcome: Outcome, key: str, steps: slice) -> float:
    return float(np.mean([metrics[key] for metrics in outcome.history[steps]]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ONLINE)
def test_an_online_algorithm_learns_to_spell(runs: Runs, algorithm: str) -> None:
    outcome = runs.keep(run(reinforced(runs.root, algorithm, runs.start, "")))
    assert 0.05 < outcome.before < 0.6
    assert outcome.gain > 0.08


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", DISTILLED)
def test_distillation_comes_nearer_to_its_teacher(runs: Runs, algorithm: str) -> None:
    """Divergence from the teacher on what the student samples, on fresh words each step; and what it is good for."""
    outcome = runs.keep(run(reinforced(runs.root, algorithm, runs.start, runs.teacher)))
    key = {"on_policy_distill": "kl/teacher", "jsd": "distill/jsd"}[algorithm]
    first, last = mean_of(outcome, key, slice(5)), mean_of(outcome, key, slice(-5, None))
    assert 0 < last < 0.5 * first
    assert outcome.gain > 0.08


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", SUPERVISED)
def test_supervised_training_makes_unseen_answers_likelier(runs: Runs, algorithm: str) -> None:
    config = supervised(runs.root, algorithm, 75, algorithm)
    rows = demonstrations("held_out")
    outcome = runs.keep(run(config))
    before, after = (objective(config, rows, None, each)["loss/total"] for each in (None, snapshot_of(outcome)))
    assert before == pytest.approx(math.log(102), rel=0.1)
    assert after < 0.5


@pytest.mark.timeout(900)
def test_preferences_are_told_apart_on_unseen_words(runs: Runs) -> None:
    """Loss log 2 and margin 0 before; the reference is the warm start."""
    config = preferred(runs.root, runs.start)
    rows, start = pairs("held_out", 0), local(runs.start)
    outcome = runs.keep(run(config))
    before, after = (objective(config, rows, start, each) for each in (None, snapshot_of(outcome)))
    assert before["loss/policy"] == pytest.approx(math.log(2), rel=1e-5)
    assert after["loss/policy"] < 0.5
    assert after["dpo/accuracy"] > 0.8
