"""Tokens that do not train have exactly no gradient and no influence, bit for bit.

By definition: a reward on a token that does not train counts for the last action before it, and a row without an action
token is still compared with its group; a token that does not train is still context, up to the last one that does.
"""

import dataclasses

import numpy as np
import pytest
import torch

from engines.experience import Experience
from tests.properties.batches import LIMITS, Shape, batch, changed, shapes
from tests.properties.conftest import Explore
from tests.properties.small_models import Outcome, one_step, table_models
from tests.properties.variants import ALGORITHMS

IDS = 128
"""Vocabulary in which no token comes twice in a batch."""


def half_masked(rows: list[Experience], seed: int) -> list[Experience]:
    """About half of the tokens train, sometimes none of a row."""
    random = np.random.default_rng(seed)

    def mask(row: Experience) -> None:
        if row.experience_type != "dpo":
            row.action_mask = random.random(row.response_length) < 0.5

    return changed(rows, mask)


def disturb(row: Experience) -> None:
    """Other numbers where nothing trains: of masked tokens, behind the last action, in fields that pairs do not use."""
    if row.experience_type == "dpo":
        row.reward, row.logprobs = 77.0, np.full(3, -7.0, np.float32)
        return
    assert row.action_mask is not None
    masked = ~row.action_mask
    for values in (row.logprobs, row.teacher_logprobs):
        if values is not None:
            values[masked] = -77.0
    last = int(np.flatnonzero(row.action_mask)[-1]) if row.action_mask.any() else -1
    row.tokens[row.prompt_length + last + 1 :] = 9


def assert_bit_identical(one: Outcome, other: Outcome) -> None:
    assert one.metrics == other.metrics
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        assert torch.equal(gradient, other.gradients[name]), name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_of_masked_tokens_change_nothing(explore: Explore, name: str) -> None:
    algorithm = ALGORITHMS[name]

    @explore(shapes())
    def holds(shape: Shape) -> None:
        rows = half_masked(batch(algorithm, shape), shape.seed)
        others = changed(rows, disturb)
        one, other = (one_step(table_models(algorithm), algorithm, each, budget=30) for each in (rows, others))
        assert_bit_identical(one, other)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_what_predicts_an_action_has_a_gradient(explore: Explore, name: str) -> None:
    """Each token comes once, so its row of the table is the gradient of its own prediction."""
    algorithm = ALGORITHMS[name]
    limits = dataclasses.replace(LIMITS, vocab_size=IDS)

    @explore(shapes())
    def holds(shape: Shape) -> None:
        numbers = iter(range(IDS))

        def number(row: Experience) -> None:
            for field in ("tokens", "chosen", "rejected"):
                values = getattr(row, field)
                if values is not None:
                    values[:] = [next(numbers) for _ in values]

        rows = changed(half_masked(batch(algorithm, shape), shape.seed), number)
        outcome = one_step(table_models(algorithm, vocab_size=IDS), algorithm, rows, limits=limits)
        predictors = {token for row in rows for token in _predictors(row)}
        if not outcome.gradients:
            assert outcome.num_applied == 0
            return
        moved = outcome.gradients["exp_avg.by_token"].abs().sum(1).nonzero().squeeze(1).tolist()
        assert set(moved) <= predictors
        if name == "sft":
            assert set(moved) == predictors

    assert predictors_by_hand() == [11, 13]


COUNTS_MASKED = {
    "grpo/batch_std": "rewards of masked rows are in the std of the batch",
    "rec/balance": "masked rows are drawn from too",
    "gigpo": "masked steps are compared with others in the same state",
    "gigpo/std": "masked steps are compared with others in the same state",
}
"""By definition: a masked row is compared with the rows that train."""


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in COUNTS_MASKED])
def test_a_masked_group_is_as_if_it_were_not_there(explore: Explore, name: str) -> None:
    """Loss and gradient, denominators included. Pairs have no mask: their group is left out of both."""
    algorithm = ALGORITHMS[name]

    def mask(row: Experience) -> None:
        if row.eid.task == 0 and row.experience_type != "dpo":
            row.action_mask = np.zeros(row.response_length, np.bool_)

    @explore(shapes(min_groups=2))
    def holds(shape: Shape) -> None:
        rows = changed(batch(algorithm, shape), mask)
        others = [row for row in rows if row.eid.task != 0]
        if "pairs" in algorithm.needs:
            rows = others
        one, other = (one_step(table_models(algorithm), algorithm, each) for each in (rows, others))
        assert one.num_applied == other.num_applied
        assert float((one.flat - other.flat).norm()) <= 1e-10 * max(float(one.flat.norm()), 1.0)
        for key, value in other.metrics.items():
            if key.startswith(("loss/", "policy/", "kl/", "rollout/", "critic/", "num_trained")):
                assert one.metrics[key] == pytest.approx(value, rel=1e-10, abs=1e-10), key


def _predictors(row: Experience) -> list[int]:
    """The token before each action token."""
    if row.experience_type == "dpo":
        assert row.chosen is not None
        assert row.rejected is not None
        return [int(token) for r in (row.chosen, row.rejected) for token in np.append(row.tokens[-1:], r[:-1])]
    assert row.action_mask is not None
    return row.tokens[row.prompt_length + np.flatnonzero(row.action_mask) - 1].tolist()


def predictors_by_hand() -> list[int]:
    """Prompt 10, 11; response 12, 13, 14, of which 12 and 14 train."""
    return _predictors(Experience(tokens=[10, 11, 12, 13, 14], prompt_length=2, action_mask=[True, False, True]))  # type: ignore[arg-type]
