"""The ledger: which rows each train step took, written before it trains. Step N has one entry, for ever.

Owns: ledger/step_<00000013>.json. Does not own: choosing the rows (`trinity_tasks.buffer`), whether the step was
committed (`trinity_tasks.checkpoint`). After a crash a step is replayed with the rows of its entry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from engines.config import Frozen
from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.storage import DamagedObject, Storage

_ENTRY: Final = re.compile(r"step_(\d{8,})\.json")

StoredCursor = Annotated[
    Cursor,
    BeforeValidator(lambda value: value if isinstance(value, Cursor) else Cursor.from_json(value)),
    PlainSerializer(Cursor.to_json),
]
"""A Cursor that is {writer: [shard index, row]} in JSON."""


class PolicyVersions(Frozen):
    """Train steps of the weights that sampled the rows of a batch."""

    min: int
    max: int
    mean: float


class LedgerEntry(Frozen):
    """The rows of one train step."""

    step: int
    """Train step, from 1."""
    attempt: int
    """Which life of the job recorded it."""
    ranges: tuple[RowRange, ...]
    """Rows in the order in which they train."""
    num_rows: int
    num_groups: int
    policy_versions: PolicyVersions
    cursor_before: StoredCursor
    cursor_after: StoredCursor
    """Committed with the weights that this step makes."""
    created_at: datetime
    """UTC."""

    @classmethod
    def of(
        cls, step: int, ref: BatchRef, rows: Sequence[Experience], *, before: Cursor, after: Cursor, attempt: int
    ) -> Self:
        """The entry for a batch that `ExperienceReader.claim` gave and `read` turned into rows."""
        versions = policy_versions(rows)
        return cls(
            step=step,
            attempt=attempt,
            ranges=ref.ranges,
            num_rows=ref.num_rows,
            num_groups=len({row.eid.tid for row in rows}),
            policy_versions=PolicyVersions(min=min(versions), max=max(versions), mean=sum(versions) / len(versions)),
            cursor_before=before,
            cursor_after=after,
            created_at=datetime.now(UTC),
        )

    @property
    def ref(self) -> BatchRef:
        """What `ExperienceReader.read` takes."""
        return BatchRef(self.ranges, self.num_rows)


def policy_versions(rows: Sequence[Experience]) -> list[int]:
    """Train steps of the weights that sampled the rows; an expert's rows were not sampled, and count only alone."""
    sampled = [row.model_version for row in rows if not row.info.get("is_expert")]
    return sampled or [row.model_version for row in rows]


class Ledger:
    """The entries of one job, by step."""

    def __init__(self, store: Storage, *, durable: bool = True) -> None:
        """`store` is the job's folder; `durable` as in `Storage.create`."""
        self._store = store
        self._durable = durable

    def record(self, entry: LedgerEntry) -> LedgerEntry:
        """Store the entry, or return the one that an earlier attempt recorded for this step: its rows train again.

        Raises DataError if that one begins at another cursor: then the job's folder mixes two histories.
        """
        try:
            self._store.create_json(_name(entry.step), entry.model_dump(mode="json"), durable=self._durable)
        except FileExistsError:
            recorded = self.read(entry.step)
            if recorded.cursor_before != entry.cursor_before:
                raise DataError(
                    f"{self._store.where(_name(entry.step))} begins at {recorded.cursor_before.to_json()}, the "
                    f"checkpoint says {entry.cursor_before.to_json()}: rows would train twice or never. Checkpoints "
                    "and ledger are not of one run; restore both, or start under another name"
                ) from None
            return recorded
        return entry

    def read(self, step: int) -> LedgerEntry:
        """Raises FileNotFoundError if the step has no entry, DataError if the entry cannot be understood."""
        try:
            return LedgerEntry.model_validate(self._store.read_json(_name(step)))
        except (ValidationError, DamagedObject) as error:
            raise DataError(
                f"{self._store.where(_name(step))} is not a ledger entry: {error}; restore it from a copy, or remove "
                "it to let the step take its rows anew"
            ) from error

    def steps(self) -> list[int]:
        """Steps that have an entry, ascending."""
        names = (info.name.rsplit("/", 1)[-1] for info in self._store.list("ledger"))
        return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))


def _name(step: int) -> str:
    return f"ledger/step_{step:08d}.json"
