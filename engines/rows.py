"""The rows of one train step, and all that is known of them before the first update. Plain numpy, no torch.

A row is what the model reads and the tokens of it that train. Per token there are columns: each a list with one array
for each row, of its action tokens. Owns: how rows and tokens are left out, of all columns at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engines.experience import EID

Column = Literal[
    "token_rewards",
    "rollout_logprobs",
    "teacher_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "entropies",
    "expected_scores",
    "values",
    "advantages",
    "returns",
    "selected",
]
PerRow = list[npt.NDArray[Any]]
"""One array [A] for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The trained part of one sequence: A action tokens out of L."""

    tokens: npt.NDArray[np.int64]
    """[L] prompt and response, cut after the last trained token."""
    actions: npt.NDArray[np.int64]
    """[A] positions in `tokens` of the trained tokens, ascending, each at least 1."""

    @classmethod
    def of(cls, tokens: npt.NDArray[Any], actions: npt.NDArray[Any]) -> Row:
        """Cut after the last action."""
        end = int(actions[-1]) + 1 if len(actions) else 0
        return cls(tokens[:end].astype(np.int64), actions.astype(np.int64))

    @property
    def length(self) -> int:
        """Tokens that the model must read: the last trained token is predicted, never read."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """R rows. With pairs, rows 2k and 2k + 1 are preferred and refused."""

    rows: list[Row]
    eids: list[EID]
    infos: list[Mapping[str, Any]]
    groups: list[int]
    """Number of the group of each row; one group is never spread over two updates."""
    response_lengths: list[int]
    """Tokens, trained or not."""
    is_expert: list[bool]
    is_truncated: list[bool]
    """The response was cut at the limit: it would have gone on."""
    rewards: npt.NDArray[np.float64] | None = None
    """[R] of the sequences; NaN for an expert's. None: the algorithm has none."""
    bootstrap: npt.NDArray[np.float64] | None = None
    """[R] the critic's value after the last token, 0 where the response ended by itself."""
    columns: dict[Column, PerRow] = field(default_factory=dict[Column, PerRow])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[R] action tokens of each row."""
        return np.array([len(row.actions) for row in self.rows], np.int64)

    def flat(self, column: Column) -> npt.NDArray[np.float64] | None:
        """[N] the column, row after row, in float64; None if it is not there."""
        if column not in self.columns:
            return None
        return np.concatenate([*self.columns[column], np.empty(0)]).astype(np.float64)

    def split(self, values: npt.NDArray[Any]) -> PerRow:
        """[N] -> one array for each row."""
        return np.split(values, np.cumsum(self.lengths)[:-1]) if self.rows else []

    def with_columns(self, columns: Mapping[Column, PerRow]) -> StepRows:
        """These rows with more columns."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def without_column(self, name: Column) -> StepRows:
        """These rows with one column less, if it is there."""
        return dataclasses.replace(self, columns={key: value for key, value in self.columns.items() if key != name})

    def chosen(self, indices: Sequence[int]) -> StepRows:
        """These rows alone, in this order."""

        def pick(values: list[Any]) -> list[Any]:
            return [values[index] for index in indices]

        return StepRows(
            rows=pick(self.rows),
            eids=pick(self.eids),
            infos=pick(self.infos),
            groups=pick(self.groups),
            response_lengths=pick(self.response_lengths),
            is_expert=pick(self.is_expert),
            is_truncated=pick(self.is_truncated),
            rewards=None if self.rewards is None else self.rewards[list(indices)],
            bootstrap=None if self.bootstrap is None else self.bootstrap[list(indices)],
            columns={name: pick(values) for name, values in self.columns.items()},
        )

    def without_tokens(self, kept: npt.NDArray[np.bool_]) -> StepRows:
        """[N] Only the tokens that are kept train."""
        masks = self.split(kept)
        rows = [Row.of(row.tokens, row.actions[mask]) for row, mask in zip(self.rows, masks, strict=True)]
        columns = {
            name: [value[mask] for value, mask in zip(values, masks, strict=True)]
            for name, values in self.columns.items()
        }
        return dataclasses.replace(self, rows=rows, columns=columns)

    def trained(self) -> StepRows:
        """Without the rows that have no action token."""
        return self.chosen([index for index, row in enumerate(self.rows) if len(row.actions)])
