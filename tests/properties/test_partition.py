"""Loss, gradient and metrics of an update do not depend on how its rows are cut, padded, ordered or spread over ranks.

By definition, and so tested as such: which of several updates a group goes to follows the order of groups; some choices
among equals follow the order of rows (`tests.properties.variants.BY_POSITION`).
"""

import pytest
import torch
from hypothesis import strategies as st

from engines.algorithms.objective import Objective
from engines.algorithms.reduce import StatTotals
from engines.algorithms.spec import Algorithm
from engines.hf.batch import Layout, micro_batches
from engines.intake import take_in
from tests.properties.batches import LIMITS, Shape, batch, shapes, shuffled
from tests.properties.conftest import Explore
from tests.properties.flat_inputs import counts_of, cut, flat_inputs, gradients_of
from tests.properties.small_models import assert_same, one_step, table_models
from tests.properties.variants import ALGORITHMS, BY_POSITION, REC, algorithm

LAYOUTS = st.sampled_from(["packed", "rows"])
BUDGETS = st.sampled_from([20, 30, 5, 1])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", ALGORITHMS | REC)
def test_shares_of_any_cut_add_up(explore: Explore, name: str) -> None:
    """Of any rows in any micro-batches of any number of ranks, a rank without rows among them."""
    algorithm = (ALGORITHMS | REC)[name]
    together = 2 if "pairs" in algorithm.needs else 1
    objective = Objective(algorithm)

    @explore(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(2, 5), SEEDS)
    def holds(lengths: list[int], num_shares: int, seed: int) -> None:
        lengths = [length for length in lengths for _ in range(together)]
        x = flat_inputs(algorithm, lengths, seed)
        counts = counts_of(x)
        whole, whole_stats = objective.loss(x, counts)
        expected = gradients_of(whole, x)
        generator = torch.Generator().manual_seed(seed)
        shares: list[list[int]] = [[] for _ in range(num_shares)]
        for unit in torch.randperm(len(lengths) // together, generator=generator).tolist():
            number = int(torch.randint(num_shares, (), generator=generator))
            shares[number] += range(unit * together, (unit + 1) * together)
        loss, totals, whole_totals = 0.0, StatTotals(), StatTotals()
        gradients = [torch.zeros_like(gradient) for gradient in expected]
        for rows in shares:
            inputs, tokens = cut(x, rows)
            share, stats = objective.loss(inputs, counts)
            parts = gradients_of(share, inputs)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[torch.from_numpy(tokens)] = part
            loss += float(share.detach())
            totals.add(stats)
        assert loss == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
        for gradient, whole_gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-14)
        whole_totals.add(whole_stats)
        found = totals.numbers(counts)
        for key, number in whole_totals.numbers(counts).items():
            assert found[key].value == pytest.approx(number.value, rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_does_not_depend_on_budget_padding_or_order(explore: Explore, name: str) -> None:
    """Through the engine's step: scores, advantages, selection, critic, one update or two, metrics."""
    algorithm = ALGORITHMS[name]

    @explore(shapes(), BUDGETS, LAYOUTS, st.integers(1, 2), SEEDS)
    def holds(shape: Shape, budget: int, layout: Layout, num_updates: int, seed: int) -> None:
        rows = batch(algorithm, shape)
        ordered = num_updates > 1 or name in BY_POSITION
        one = one_step(table_models(algorithm), algorithm, rows, num_updates=num_updates)
        other = one_step(
            table_models(algorithm, layout=layout),
            algorithm,
            rows if ordered else shuffled(rows, seed),
            num_updates=num_updates,
            budget=budget,
        )
        assert_same(one, other)


@pytest.mark.parametrize("name", BY_POSITION)
def test_what_is_chosen_by_position_is_as_much_in_any_order(explore: Explore, name: str) -> None:
    """The number of tokens or rows that are chosen does not depend on the order, only which they are."""
    algorithm = ALGORITHMS[name]

    @explore(shapes(), SEEDS)
    def holds(shape: Shape, seed: int) -> None:
        rows = batch(algorithm, shape)
        one, other = (one_step(table_models(algorithm), algorithm, each) for each in (rows, shuffled(rows, seed)))
        for key in ("policy/selected_fraction", "groups/num_set_aside", "num_trained_tokens"):
            assert other.metrics.get(key) == pytest.approx(one.metrics.get(key)), key


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_pairs_are_never_split(explore: Explore, layout: Layout) -> None:
    dpo: Algorithm = algorithm("dpo")

    @explore(shapes(), st.integers(1, 40))
    def holds(shape: Shape, budget: int) -> None:
        rows = take_in(batch(dpo, shape), dpo, LIMITS).rows
        cut_into = micro_batches(rows.rows, budget, layout, together=2)
        for micro_batch in cut_into:
            assert list(micro_batch.rows[1::2]) == [row + 1 for row in micro_batch.rows[::2]]
            assert all(row % 2 == 0 for row in micro_batch.rows[::2])
        assert sorted(row for micro_batch in cut_into for row in micro_batch.rows) == list(range(len(rows)))
