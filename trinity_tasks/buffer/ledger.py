"""The ledger: which rows each train step took, written before it trains. Step N has one entry, for ever.

Owns: ledger/step_<00000013>.json. Does not own: choosing the rows (`strategies.py`), whether the step was committed
 (`trinity_tasks.checkpoint`). After a crash a step is replayed with the rows of its entry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self, cast

from pydantic import BeforeValidator, Field, JsonValue, PlainSerializer, ValidationError

from engines.config import Frozen
from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, PassedRows, Position, RowRange
from trinity_tasks.buffer.notes import Notes, dropped_rows, measured
from trinity_tasks.buffer.strategies import Claim
from trinity_tasks.storage import DamagedObject, Storage

_ENTRY: Final = re.compile(r"step_(\d{8,})\.json")

StoredCursor = Annotated[
    Cursor,
    BeforeValidator(lambda value: value if isinstance(value, Cursor) else Cursor.from_json(value)),
    PlainSerializer(Cursor.to_json),
]
"""A Cursor that is {writer: [shard index, row]} in JSON."""


def _compact(ranges: Sequence[RowRange]) -> dict[str, JsonValue]:
    shards = {part.shard: part.sha256 for part in ranges}
    numbers = {name: number for number, name in enumerate(shards)}
    return {
        "shards": [[name, digest] for name, digest in shards.items()],
        "rows": [[numbers[part.shard], part.start, part.stop] for part in ranges],
    }


def _ranges(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        stored = cast("dict[str, list[list[Any]]]", value)
        return tuple(RowRange(stored["shards"][n][0], a, b, stored["shards"][n][1]) for n, a, b in stored["rows"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"ranges are {{shards: [[path, sha256]], rows: [[shard, start, stop]]}}: {error!r}") from error


StoredRanges = Annotated[tuple[RowRange, ...], BeforeValidator(_ranges), PlainSerializer(_compact)]
"""In JSON each shard is named once: a shuffled batch has as many ranges as rows."""


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
    ranges: StoredRanges
    """Rows in the order in which they train."""
    num_rows: int
    num_groups: int
    policy_versions: PolicyVersions
    cursor_before: StoredCursor
    cursor_after: StoredCursor
    """Committed with the weights that this step makes."""
    state_before_sha256: str
    """Digest of the sample strategy's state before the step."""
    state_after: JsonValue = None
    """State of the sample strategy after the step; None if it has none."""
    passed: tuple[PassedRows, ...] = ()
    """Rows that the step left behind untrained, and why."""
    dropped: dict[str, tuple[int, int]] = Field(default_factory=dict[str, tuple[int, int]])
    """Operator -> (rows, response tokens) that it dropped from the shards that this step came to."""
    measured: dict[str, float] = Field(default_factory=dict[str, float])
    """<operator>/<name> -> what it measured on those shards, their mean."""
    reused_tokens: int = 0
    """Response tokens of the batch that have trained before."""
    created_at: datetime
    """UTC."""

    @classmethod
    def of(
        cls,
        step: int,
        claim: Claim,
        rows: Sequence[Experience],
        *,
        before: Position,
        attempt: int,
        notes: Sequence[Notes] = (),
    ) -> Self:
        """The entry for a claim whose rows have been read; notes: of the shards that it entered."""
        versions, ref = policy_versions(rows), claim.ref
        return cls(
            step=step,
            attempt=attempt,
            ranges=ref.ranges,
            num_rows=ref.num_rows,
            num_groups=len({row.eid.tid for row in rows}),
            policy_versions=PolicyVersions(min=min(versions), max=max(versions), mean=sum(versions) / len(versions)),
            cursor_before=before.cursor,
            cursor_after=claim.after.cursor,
            state_before_sha256=before.state_sha256,
            state_after=claim.after.state,
            passed=claim.passed,
            dropped=dropped_rows(notes),
            measured=measured(notes),
            reused_tokens=claim.reused_tokens,
            created_at=datetime.now(UTC),
        )

    @property
    def ref(self) -> BatchRef:
        """What `Strategy.read` takes."""
        return BatchRef(self.ranges, self.num_rows)

    @property
    def after(self) -> Position:
        """Where the next step begins."""
        return Position(self.cursor_after, self.state_after)


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

    def record(self, entry: LedgerEntry) -> None:
        """Store the entry. Raises FileExistsError if the step has one: ask `recorded` first."""
        self._store.create_json(_name(entry.step), entry.model_dump(mode="json"), durable=self._durable)

    def recorded(self, step: int, position: Position) -> LedgerEntry | None:
        """What an earlier attempt recorded for this step: its rows train again. None if the step is new.

        Raises DataError if the entry begins at another position: then the job's folder mixes two histories.
        """
        try:
            entry = self.read(step)
        except FileNotFoundError:
            return None
        if (entry.cursor_before, entry.state_before_sha256) != (position.cursor, position.state_sha256):
            raise DataError(
                f"{self._store.where(_name(step))} begins at {entry.cursor_before.to_json()} with a state of sha256 "
                f"{entry.state_before_sha256}, the checkpoint says {position.cursor.to_json()} and "
                f"{position.state_sha256}: rows would train twice or never. Checkpoints and ledger are not of one run; "
                "restore both, or start under another name"
            )
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
