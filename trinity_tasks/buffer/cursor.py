"""Where a trainer is and what it took: `Position`, `RowRange`, `BatchRef`. Values that go into commits and the ledger.

Owns: their JSON. Does not own: moving a cursor (`reader.py`), the meaning of a strategy's state (`strategies.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from pydantic import JsonValue

from engines.errors import DataError


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows start to stop - 1 of one shard."""

    shard: str
    """Path below the job's folder."""
    start: int
    stop: int
    sha256: str | None = None
    """Hex digest of the shard when it was claimed; `read` refuses another content."""


@dataclass(frozen=True, slots=True)
class BatchRef:
    """The rows of one batch, in order."""

    ranges: tuple[RowRange, ...]
    num_rows: int


PassReason = Literal["stale", "evicted", "damaged"]
"""Why rows were left behind untrained: too old, pushed out of a full pool, or in a shard that cannot be read."""


@dataclass(frozen=True, slots=True)
class PassedRows:
    """Rows that a step left behind for ever: start to stop - 1 of one shard."""

    shard: str
    start: int
    stop: int
    """Equal to `start` if the shard cannot be read, so that nobody knows."""
    reason: PassReason
    num_tokens: int = 0
    """Response tokens."""

    @property
    def num_rows(self) -> int:
        """How many rows, as far as is known."""
        return self.stop - self.start


def joined(ranges: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """The same rows in the same order, neighbours in one range."""
    result: list[RowRange] = []
    for part in ranges:
        last = result[-1] if result else None
        if last is not None and (last.shard, last.stop) == (part.shard, part.start):
            result[-1] = replace(last, stop=part.stop)
        else:
            result.append(part)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins, for each writer. A row is consumed if and only if it lies before.

    Example:
        >>> Cursor.start().moved("explorer", 3, 0).to_json()
        {'explorer': [3, 0]}
    """

    positions: tuple[tuple[str, int, int], ...] = ()
    """(writer, shard index, row in it), sorted; a writer that is not named is at (0, 0)."""

    @classmethod
    def start(cls) -> Cursor:
        """Before every row."""
        return cls()

    def at(self, writer: str) -> tuple[int, int]:
        """(shard index, row) of one writer."""
        return next(((shard, row) for name, shard, row in self.positions if name == writer), (0, 0))

    def moved(self, writer: str, shard: int, row: int) -> Cursor:
        """This cursor with one writer at (shard, row)."""
        others = [position for position in self.positions if position[0] != writer]
        return Cursor(tuple(sorted([*others, (writer, shard, row)])))

    def part(self, prefix: str) -> Cursor:
        """The positions of writers whose names begin so, without the prefix."""
        named = (position for position in self.positions if position[0].startswith(prefix))
        return Cursor(tuple((name.removeprefix(prefix), shard, row) for name, shard, row in named))

    def without(self, prefix: str) -> Cursor:
        """The positions of all other writers."""
        return Cursor(tuple(position for position in self.positions if not position[0].startswith(prefix)))

    def with_part(self, prefix: str, part: Cursor) -> Cursor:
        """This cursor with the positions of `part` under the prefix."""
        named = ((prefix + name, shard, row) for name, shard, row in part.positions)
        return Cursor(tuple(sorted([*self.without(prefix).positions, *named])))

    def to_json(self) -> dict[str, JsonValue]:
        """writer -> [shard index, row]."""
        return {writer: [shard, row] for writer, shard, row in self.positions}

    @classmethod
    def from_json(cls, value: JsonValue) -> Cursor:
        """Raises DataError if the value is not what `to_json` gives."""
        cursor = cls()
        for writer, position in (value if isinstance(value, dict) else {"": value}).items():
            if not isinstance(position, list) or [type(part) for part in position] != [int, int] or not writer:
                raise DataError(f"a cursor is {{writer: [shard index, row]}}, not {value!r}")
            shard, row = cast("list[int]", position)
            cursor = cursor.moved(writer, shard, row)
        return cursor


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that decides which rows come next, but for what producers write."""

    cursor: Cursor = field(default_factory=Cursor)
    state: JsonValue = None
    """Of the sample strategy; None if it needs none."""

    @property
    def state_sha256(self) -> str:
        """Hex digest of the state."""
        return hashlib.sha256(json.dumps(self.state, sort_keys=True).encode()).hexdigest()
