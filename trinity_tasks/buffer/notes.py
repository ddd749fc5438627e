"""What a shard keeps of the rows that did not get into it: which operator dropped which row, and what it measured.

Owns: the JSON in a shard's metadata, and its sums over shards. Does not own: operators (`trinity_tasks.operators`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pydantic import Field, JsonValue, ValidationError

from engines.config import Frozen
from engines.errors import DataError


class DroppedRow(Protocol):
    """A row that was taken out before the shard was written."""

    @property
    def uid(self) -> str: ...
    @property
    def operator(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


class Notes(Frozen):
    """The notes of one shard."""

    operators: tuple[str, ...] = ()
    """Everything that could have dropped a row."""
    dropped: tuple[tuple[str, str, str, int], ...] = ()
    """(eid.uid, operator, reason, response tokens) of each row."""
    measured: dict[str, float] = Field(default_factory=dict[str, float])
    """<operator>/<name> -> what it measured."""

    @classmethod
    def of(
        cls, operators: Sequence[str], dropped: Iterable[DroppedRow], measured: Mapping[str, float]
    ) -> dict[str, JsonValue]:
        """As JSON, for `ExperienceWriter.write`; nothing if there is nothing to note."""
        rows = tuple((row.uid, row.operator, row.reason, row.num_tokens) for row in dropped)
        notes = cls(operators=tuple(operators), dropped=rows, measured=dict(measured))
        return notes.model_dump(mode="json", exclude_defaults=True)


def parse_notes(notes: Mapping[str, JsonValue], shard: str) -> Notes:
    """The notes that were read with a shard. Raises DataError if this version does not understand them."""
    try:
        return Notes.model_validate(notes)
    except ValidationError as error:
        raise DataError(f"{shard}: its notes cannot be understood: {error}; upgrade trinity-flows") from error


def dropped_rows(notes: Sequence[Notes]) -> dict[str, tuple[int, int]]:
    """Operator -> (rows, response tokens) over several shards."""
    counts = {name: (0, 0) for each in notes for name in each.operators}
    for each in notes:
        for _, name, _, num_tokens in each.dropped:
            rows, tokens = counts.get(name, (0, 0))
            counts[name] = (rows + 1, tokens + num_tokens)
    return counts


def measured(notes: Sequence[Notes]) -> dict[str, float]:
    """The mean over several shards of what operators measured."""
    values: dict[str, list[float]] = {}
    for each in notes:
        for name, value in each.measured.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
