"""Nothing is NaN or infinite: groups of one, equal rewards, nothing to train, ratios of e^+-90, rewards of 1e6."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from engines.algorithms.objective import Objective
from engines.algorithms.spec import RewardFilter
from engines.experience import Experience
from tests.properties.batches import Shape, batch, changed
from tests.properties.conftest import Explore
from tests.properties.flat_inputs import counts_of, flat_inputs, gradients_of
from tests.properties.small_models import Outcome, one_step, table_models
from tests.properties.variants import ALGORITHMS, REC

EVERY = ALGORITHMS | REC
DTYPES = (torch.float32, torch.float64)
LOG_RATIOS = (-90.0, -25.0, 0.0, 25.0, 90.0)
SHAPES = (
    ((1,),),
    ((6,),),
    ((1, 1, 1, 1),),
    ((1,), (1,), (1,)),
    ((3, 1, 5, 2), (1, 6), (4,)),
)
"""Responses of one token, groups of one, a batch of one row."""


def assert_finite(outcome: Outcome) -> None:
    assert outcome.num_nonfinite == 0
    bad = {key: value for key, value in outcome.metrics.items() if not math.isfinite(value)}
    assert not bad
    for name, gradient in outcome.gradients.items():
        assert bool(torch.isfinite(gradient).all()), name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_logprobs_and_rewards(explore: Explore, name: str) -> None:
    algorithm = ALGORITHMS[name]

    @explore(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
    def holds(groups: tuple[tuple[int, ...], ...], dtype: torch.dtype, seed: int) -> None:
        random = np.random.default_rng(seed)

        def extreme(row: Experience) -> None:
            for values in (row.logprobs, row.teacher_logprobs):
                if values is not None:
                    values[:] = random.choice([0.0, -1e-3, -25.0, -90.0], len(values))
            if row.reward is not None:
                row.reward = float(random.choice([-1e6, 0.35, 1e6]))
            if row.token_level_reward is not None:
                row.token_level_reward[:] = random.choice([-1e6, 0.35, 1e6], row.response_length)

        rows = changed(batch(algorithm, Shape(groups, seed)), extreme)
        assert_finite(one_step(table_models(algorithm, dtype, scale=40.0), algorithm, rows))


@pytest.mark.parametrize("name", EVERY)
def test_every_pair_of_extreme_ratios(name: str) -> None:
    """To old, to reference and to the sampler, in float32, with advantages of either sign, 0 and 1e6."""
    algorithm = EVERY[name]
    cases = list(itertools.product(LOG_RATIOS, LOG_RATIOS, (-1e6, -1.0, 0.0, 1.0, 1e6)))
    logprobs = torch.full((len(cases),), -95.0)
    to_old, to_reference, advantages = torch.tensor(cases).T
    lengths = [5] * (len(cases) // 5 - 1) + [4, 1]
    x = flat_inputs(algorithm, lengths, 0, torch.float32)
    for field, values in {
        "logprobs": logprobs.clone().requires_grad_(),
        "old_logprobs": logprobs - to_old,
        "reference_logprobs": logprobs - to_reference,
        "rollout_logprobs": logprobs - to_old.roll(7),
        "advantages": advantages,
    }.items():
        object.__setattr__(x, field, values)
    loss, stats = Objective(algorithm).loss(x, counts_of(x))
    gradients = gradients_of(loss, x)
    assert math.isfinite(float(loss.detach()))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert all(math.isfinite(float(stat.value)) for stat in stats.values())
    assert math.isfinite(float(torch.nn.utils.get_total_norm(gradients)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_are_finite(name: str) -> None:
    algorithm, reward = ALGORITHMS[name], 1e6 / 3

    def level(row: Experience) -> None:
        row.reward = None if row.reward is None else reward
        row.token_level_reward = None
        row.info.pop("step_reward", None)

    rows = changed(batch(algorithm, Shape(((3, 1, 5, 2, 4), (1, 6, 2)), 3)), level)
    assert_finite(one_step(table_models(algorithm, torch.float32), algorithm, rows))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_an_action_token_is_a_step_without_update(name: str) -> None:
    """Finite metrics, weights untouched. A pair has no mask: each of its response tokens trains."""
    algorithm, num_updates = ALGORITHMS[name], 2
    rows = batch(algorithm, Shape(((3, 1, 5), (2,)), 3))
    for row in rows:
        row.action_mask = np.zeros(row.response_length, np.bool_) if row.chosen is None else row.action_mask
    outcome = one_step(table_models(algorithm), algorithm, rows, num_updates=num_updates)
    assert_finite(outcome)
    trains = "pairs" in algorithm.needs
    assert outcome.num_applied == (num_updates if trains else 0)
    assert outcome.metrics["num_empty"] == (0 if trains else num_updates)
    assert bool(outcome.gradients) == trains


@pytest.mark.parametrize("name", [name for name, each in ALGORITHMS.items() if "rewards" in each.needs])
def test_a_batch_that_filters_leave_nothing_of_is_a_step_without_update(name: str) -> None:
    """An expert's rows pass filters: where there are some, they train."""
    algorithm = ALGORITHMS[name].model_copy(update={"filters": (RewardFilter(threshold=1e3),)})
    rows = batch(algorithm, Shape(((3, 1, 5), (2,)), 3))
    outcome = one_step(table_models(algorithm), algorithm, rows)
    assert_finite(outcome)
    experts = [row for row in rows if row.info.get("is_expert")]
    assert outcome.num_applied == bool(experts)
    assert outcome.metrics["filter/reward_filter_num_dropped"] == len(rows) - len(experts)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_without_rows_has_a_loss_of_0_that_can_go_backward(name: str) -> None:
    algorithm = ALGORITHMS[name]
    x = flat_inputs(algorithm, [], 0)
    loss, stats = Objective(algorithm).loss(x, counts_of(x))
    assert float(loss.detach()) == 0
    loss.backward()
    assert all(math.isfinite(float(stat.value)) for stat in stats.values())
