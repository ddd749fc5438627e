"""float32 and float64 agree: the same step differs by 1e-4 of the gradient's norm, equal steps by nothing."""

import pytest
import torch

from tests.properties.batches import Shape, batch, shapes
from tests.properties.conftest import Explore
from tests.properties.small_models import assert_same_metrics, one_step, table_models
from tests.properties.variants import ALGORITHMS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_agrees_with_float64_and_to_the_bit_with_itself(explore: Explore, name: str) -> None:
    algorithm = ALGORITHMS[name]

    @explore(shapes())
    def holds(shape: Shape) -> None:
        double, single, again = (
            one_step(table_models(algorithm, dtype), algorithm, batch(algorithm, shape), budget=30)
            for dtype in (torch.float64, torch.float32, torch.float32)
        )
        assert single.gradients.keys() == double.gradients.keys()
        assert float((single.flat - double.flat).norm()) <= 1e-4 * float(double.flat.norm()) + 1e-6
        assert_same_metrics(double.metrics, single.metrics, 1e-4, 1e-5)
        assert single.metrics == again.metrics
        assert torch.equal(single.flat, again.flat)
        assert single.kl_coefficients == again.kl_coefficients
