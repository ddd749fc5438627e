"""`trainer.stop_when` ends a job at the first step that reaches the target, and only a change of it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.errors import ConfigError
from tests.fake_job import fake_config
from tests.integration.small_job import train
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.config import Config, StopWhen
from trinity_tasks.inspection import JobState, describe
from trinity_tasks.job import already_done, job_store, job_url

STEPS = 6


def config(root: Path, *overrides: str) -> Config:
    return fake_config(root, f"trainer.total_steps={STEPS}", "trainer.save_interval=1", *overrides)


def trained(job: Config) -> JobState:
    train(job)
    return describe(job_url(job))


def losses(job: Config) -> list[float]:
    return [commit.metrics["loss/policy"] for commit in CheckpointStore(job_store(job)).commits()]


@pytest.mark.parametrize("side", ["below", "above"])
def test_the_first_step_that_reaches_the_target_is_the_last(side: str, tmp_path: Path) -> None:
    whole = config(tmp_path, "name=whole")
    full = trained(whole)
    values = losses(whole)
    assert (full.step, len(set(values))) == (STEPS, STEPS)
    bound = sorted(values)[STEPS // 2]
    first = next(step for step, value in enumerate(values, 1) if (value < bound if side == "below" else value > bound))
    assert first < STEPS

    setting = f'trainer.stop_when={{"metric": "loss/policy", "{side}": {bound!r}}}'
    early = config(tmp_path, "name=early", setting)
    assert not already_done(config(tmp_path, "name=early"))
    state = trained(early)
    assert (state.step, state.finished) == (first, True)
    assert already_done(early)
    again = trained(early)
    assert [commit.number for commit in again.commits] == [commit.number for commit in state.commits]

    without = config(tmp_path, "name=early")  # the same job: what it stopped at is no part of the experiment
    assert not already_done(without)
    assert (trained(without).step, losses(without)) == (STEPS, values)


def test_a_metric_that_is_not_measured_is_named_at_the_first_step(tmp_path: Path) -> None:
    job = config(tmp_path, 'trainer.stop_when={"metric": "loss/policyy", "below": 1}')
    with pytest.raises(
        ConfigError, match=r"stop_when\.metric = 'loss/policyy' is not measured.* did you mean loss/policy"
    ):
        train(job)
    assert describe(job_url(job)).commits == ()


@pytest.mark.parametrize("bounds", ["", ', "below": 1, "above": 2'])
def test_there_is_one_bound(bounds: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stop_when needs one bound: below or above"):
        config(tmp_path, f'trainer.stop_when={{"metric": "loss/policy"{bounds}}}')


def test_what_is_not_a_number_reaches_nothing() -> None:
    for target in (StopWhen(metric="m", below=1.0), StopWhen(metric="m", above=-1.0)):
        assert (target.reached({"m": 0.0}), target.reached({"m": float("nan")}), target.reached({})) == (
            True,
            False,
            False,
        )
