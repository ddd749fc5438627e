"""Rows that an expert wrote are a part of their own: what is said of the sampled rows does not depend on them."""

import numpy as np
import pytest

from engines.experience import Experience
from tests.properties.batches import Shape, batch, changed, shapes
from tests.properties.conftest import Explore
from tests.properties.small_models import assert_same, one_step, table_models
from tests.properties.variants import ALGORITHMS

MIXED = [name for name, each in ALGORITHMS.items() if "expert_rows" in each.needs]
OF_SAMPLES = ("policy/ratio", "policy/clip", "kl/", "rollout/", "groups/", "filter/")
"""Metrics of the sampled rows."""


@pytest.mark.parametrize("name", MIXED)
def test_metrics_of_samples_do_not_see_the_expert(explore: Explore, name: str) -> None:
    algorithm = ALGORITHMS[name]

    @explore(shapes())
    def holds(shape: Shape) -> None:
        rows = batch(algorithm, shape)
        sampled = [row for row in rows if not row.info.get("is_expert")]
        if not sampled:
            return
        mixed, alone = (one_step(table_models(algorithm), algorithm, each).metrics for each in (rows, sampled))
        of_samples = {key: value for key, value in alone.items() if key.startswith(OF_SAMPLES)}
        assert "kl/policy" in of_samples or alone["num_trained_tokens"] == 0
        for key, value in of_samples.items():
            assert mixed[key] == pytest.approx(value, rel=1e-10, abs=1e-12), key


@pytest.mark.parametrize("name", MIXED)
def test_an_expert_needs_no_reward_and_no_logprobs_and_those_it_has_are_not_read(explore: Explore, name: str) -> None:
    algorithm = ALGORITHMS[name]

    def score(row: Experience) -> None:
        if row.info.get("is_expert"):
            row.reward = 77.0
            row.logprobs = np.full(row.response_length, -3.0, np.float32)

    @explore(shapes())
    def holds(shape: Shape) -> None:
        rows = batch(algorithm, shape)
        one, other = (one_step(table_models(algorithm), algorithm, each) for each in (rows, changed(rows, score)))
        for outcome in (one, other):
            for key in ("data/reward_mean", "data/reward_std"):
                outcome.metrics.pop(key, None)
        assert_same(one, other)
