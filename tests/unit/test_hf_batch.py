"""Micro-batches: every action token is predicted from the token before it, in both layouts, within the budget."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.hf.batch import MicroBatch, micro_batches
from engines.rows import Row

Layout = Literal["packed", "rows"]


def make_rows(lengths: Sequence[int]) -> list[Row]:
    """Row i has tokens 1000 * i, 1000 * i + 1, ...; every second token from the first on trains, and the last."""
    rows = []
    for index, length in enumerate(lengths):
        actions = sorted({*range(1, length, 2), length - 1})
        rows.append(Row(np.arange(1000 * index, 1000 * index + length), np.array(actions)))
    return rows


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    budget=st.integers(1, 120),
    layout=st.sampled_from(["packed", "rows"]),
)
def test_every_row_once_and_every_action_after_its_predictor(lengths: list[int], budget: int, layout: Layout) -> None:
    rows = make_rows(lengths)
    batches = micro_batches(rows, budget, layout)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(rows)))
    for batch in batches:
        assert batch.num_tokens <= budget or len(batch.rows) == 1
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        # ids count up by one within a row, so a predictor must be the target minus one, at the position before it
        assert torch.equal(ids[batch.predictors], batch.targets - 1)
        assert torch.equal(positions[batch.predictors], (batch.targets - 1) % 1000)
        assert torch.equal(torch.tensor(batch.rows)[batch.row_of_token], batch.targets // 1000)
        counts = torch.bincount(batch.row_of_token, minlength=len(batch.rows)).tolist()
        assert counts == [len(rows[index].actions) for index in batch.rows]
        assert_tiled(batch, rows, layout)


def assert_tiled(batch: MicroBatch, rows: list[Row], layout: Layout) -> None:
    """Blocks (or the rectangle) hold each row at its place, padded on the right with 0."""
    if layout == "rows":
        assert batch.blocks == ()
        lines = list(batch.input_ids)
    else:
        sizes = [block.num_rows * block.length for block in batch.blocks]
        parts = zip(batch.input_ids[0].split(sizes), batch.blocks, strict=True)
        lines = [line for part, block in parts for line in part.view(block)]
    for index, line in zip(batch.rows, lines, strict=True):
        needed = rows[index].tokens[:-1]
        assert line[: len(needed)].tolist() == needed.tolist()
        assert not line[len(needed) :].any()


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_equal_lengths_share_one_block(layout: Layout) -> None:
    (batch,) = micro_batches(make_rows([9] * 5), 100, layout)
    assert batch.num_tokens == 5 * 8
    assert batch.blocks == (((5, 8),) if layout == "packed" else ())


def test_packed_pads_heavy_tails_by_next_to_nothing() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 64).astype(int) + 2
    rows = make_rows(lengths.tolist())
    used = sum(batch.num_tokens for batch in micro_batches(rows, 2048))
    assert used <= 1.02 * sum(row.length for row in rows)


def test_a_row_ends_with_the_last_trained_token() -> None:
    row = Row.of(np.array([7, 8, 1, 2, 3, 4, 5]), np.array([2, 4]))
    assert row.tokens.tolist() == [7, 8, 1, 2, 3]
    assert row.actions.tolist() == [2, 4]
    assert row.length == 4


def test_a_row_without_actions_is_in_no_micro_batch() -> None:
    nothing = Row.of(np.array([1, 2, 3]), np.array([], np.int64))
    (batch,) = micro_batches([nothing, *make_rows([4])], 100)
    assert batch.rows == (1,)


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_pairs_stay_together_and_in_order(layout: Layout) -> None:
    batches = micro_batches(make_rows([3, 9, 8, 2, 5, 5]), 12, layout, together=2)
    assert [batch.rows for batch in batches] == [(0, 1), (2, 3), (4, 5)]
