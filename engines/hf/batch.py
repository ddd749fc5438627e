"""Rows to micro-batches under a token budget. Owns: order, padding, and which hidden state predicts which token.

Rows are sorted by length and never split. A row gives the model only the tokens that it needs: everything up to the
last trained token, that token excluded. Two layouts: `packed` (one stream, attention per block, next to no padding) and
`rows` (one rectangle), for models whose attention cannot be replaced.

Does not own: the loss (`engines.algorithms`), the softmax (`engines.hf.forward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.hf.attention import Block
from engines.rows import PerRow, Row

Layout = Literal["packed", "rows"]

MERGE_TOKENS = 2
"""Padding that is cheaper than one more attention call per layer."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B rows ready for the model: N tokens with padding, A action tokens in row order."""

    rows: tuple[int, ...]
    """[B] which rows of the list given to `micro_batches`, in the order of this micro-batch."""
    input_ids: Tensor
    """[1, N] packed, [B, length] as rows; 0 in padding."""
    position_ids: Tensor
    """Same shape, counted from 0 in each row."""
    blocks: tuple[Block, ...]
    """Attention blocks of the packed layout; empty for rows."""
    predictors: Tensor
    """[A] flat index of the hidden state that predicts each action token."""
    targets: Tensor
    """[A] the action tokens."""
    row_of_token: Tensor
    """[A] index into `rows` of each action token, ascending."""

    @property
    def num_tokens(self) -> int:
        """N, padding included."""
        return self.input_ids.numel()

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        return inputs | {"blocks": self.blocks} if self.blocks else inputs

    @property
    def num_actions(self) -> Tensor:
        """[B] action tokens of each row."""
        return torch.bincount(self.row_of_token, minlength=len(self.rows))

    def gather(self, column: PerRow) -> Tensor:
        """[A] a column's numbers for the action tokens of this micro-batch, on the host."""
        return torch.from_numpy(np.concatenate([column[index] for index in self.rows]))

    def scatter(self, values: Tensor, result: PerRow) -> None:
        """Put [A] values of this micro-batch where its rows are in the list that it was cut from."""
        parts = np.split(values.cpu().numpy(), np.cumsum(self.num_actions.tolist())[:-1])
        for index, part in zip(self.rows, parts, strict=True):
            result[index] = part


def micro_batches(
    rows: Sequence[Row],
    budget: int,
    layout: Layout = "packed",
    device: torch.device | str = "cpu",
    *,
    together: int = 1,
) -> list[MicroBatch]:
    """Rows, longest first, in micro-batches of at most `budget` tokens with padding; a longer row stands alone.

    Rows without an action are left out. together: so many rows in a row, those of a pair, are never separated.
    """
    units = [range(start, start + together) for start in range(0, len(rows), together) if len(rows[start].actions)]
    units.sort(key=lambda unit: -max(rows[index].length for index in unit))
    batches: list[MicroBatch] = []
    taken: list[int] = []
    blocks: list[Block] = []
    for unit in units:
        lengths = [rows[index].length for index in unit]
        grown = _with_rows(blocks, lengths, layout)
        if taken and sum(block.num_rows * block.length for block in grown) > budget:
            batches.append(_assemble(rows, taken, blocks, layout, device))
            taken, grown = [], _with_rows([], lengths, layout)
        taken.extend(unit)
        blocks = grown
    if taken:
        batches.append(_assemble(rows, taken, blocks, layout, device))
    return batches


def _with_rows(blocks: list[Block], lengths: Sequence[int], layout: Layout) -> list[Block]:
    """The blocks after more rows; in the packed layout one that fits a block nearly joins it."""
    for length in lengths:
        last = blocks[-1] if blocks else Block(0, length)
        if layout == "rows":
            blocks = [Block(last.num_rows + 1, max(last.length, length))]
        elif last.num_rows and 0 <= last.length - length <= MERGE_TOKENS / last.num_rows:
            blocks = [*blocks[:-1], Block(last.num_rows + 1, last.length)]
        else:
            blocks = [*blocks, Block(1, length)]
    return blocks


def _assemble(
    rows: Sequence[Row], taken: list[int], blocks: list[Block], layout: Layout, device: torch.device | str
) -> MicroBatch:
    padded = np.repeat([block.length for block in blocks], [block.num_rows for block in blocks])
    starts = np.concatenate([[0], np.cumsum(padded)])
    input_ids = np.zeros(starts[-1], np.int64)
    for start, index in zip(starts, taken, strict=False):
        input_ids[start : start + rows[index].length] = rows[index].tokens[:-1]
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], padded)
    actions = [rows[index].actions for index in taken]
    predictors = np.concatenate([start + action - 1 for start, action in zip(starts, actions, strict=False)])
    targets = np.concatenate([rows[index].tokens[action] for index, action in zip(taken, actions, strict=True)])
    row_of_token = np.repeat(np.arange(len(taken)), [len(action) for action in actions])
    shape = (len(taken), -1) if layout == "rows" else (1, -1)

    def tensor(array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        rows=tuple(taken),
        input_ids=tensor(input_ids).view(shape),
        position_ids=tensor(position_ids).view(shape),
        blocks=tuple(blocks) if layout == "packed" else (),
        predictors=tensor(predictors),
        targets=tensor(targets),
        row_of_token=tensor(row_of_token),
    )
