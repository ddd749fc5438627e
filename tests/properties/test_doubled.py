"""A batch that is there twice, as other tasks, has the same mean loss, the same gradient and the same metrics."""

import pytest

from tests.properties.batches import Shape, batch, doubled, shapes
from tests.properties.conftest import Explore
from tests.properties.small_models import assert_same_metrics, one_step, table_models
from tests.properties.variants import ALGORITHMS, why_batch_wide

PER_GROUP = {name: each for name, each in ALGORITHMS.items() if why_batch_wide(each) is None or "gigpo" in name}
"""What is made over the whole batch is tested in `test_advantages`; the states of gigpo get other names here."""
EXTENSIVE = ("data/num_tokens", "num_trained_tokens", "groups/num_", "filter/", "gigpo/num_", "kl/kl_coef")
"""Metrics that count."""


@pytest.mark.parametrize("name", PER_GROUP)
def test_a_doubled_batch(explore: Explore, name: str) -> None:
    """seq-mean-token-sum-norm divides the sum over all rows by the longest one: by definition, twice the loss."""
    algorithm = PER_GROUP[name]
    factor = 2.0 if algorithm.aggregation == "seq-mean-token-sum-norm" else 1.0

    @explore(shapes())
    def holds(shape: Shape) -> None:
        rows = batch(algorithm, shape)
        one, two = (one_step(table_models(algorithm), algorithm, each) for each in (rows, doubled(rows)))
        assert one.num_applied == two.num_applied
        assert float((two.flat - factor * one.flat).norm()) <= 1e-10 * max(float(two.flat.norm()), 1.0)
        once, twice = (
            {key: value for key, value in each.metrics.items() if not key.startswith(EXTENSIVE)} for each in (one, two)
        )
        for key in once:
            if key.startswith("loss/") or key == "grad/norm":
                once[key] *= factor
        assert_same_metrics(once, twice, 1e-10, 1e-10)
