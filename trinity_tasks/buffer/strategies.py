"""Which rows make the next batch: the `Strategy` of a buffer, and the plain one, oldest first.

Owns: `Claim`, `Availability`, `Fifo`. Does not own: shards and their order (`reader.py`), pools (`pool.py`), epochs
over finished data (`epochs.py`), mixing (`mixed.py`). A strategy is a function of (position, step, what producers have
written) and keeps nothing: its state is in the position, which is committed with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, PassedRows, PassReason, Position, RowRange, joined
from trinity_tasks.buffer.quarantine import Damage
from trinity_tasks.buffer.reader import ExperienceReader, Head, Loaded, Walk


@dataclass(frozen=True, slots=True)
class Claim:
    """The rows of one step."""

    ref: BatchRef
    after: Position
    """Where the next step begins."""
    passed: tuple[PassedRows, ...] = ()
    """Rows that the step leaves behind untrained."""
    entered: tuple[str, ...] = ()
    """Shards whose first row this step took or passed, and those without rows: their notes are accounted for now."""
    reused_tokens: int = 0
    """Response tokens of the batch that have trained before."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What lies beyond a position, for whoever waits."""

    available: int
    """Rows that may train; counted no further than `needed`, by whole shards."""
    needed: int
    """Rows."""
    ended: bool
    """Nothing more will come, and fewer than `needed` rows are left: waiting is useless."""
    writers: tuple[str, ...]
    """One phrase for each known writer: its name, what it is expected to write next, whether it seems dead."""
    filtered: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows that are there but may not be trained, by reason."""


class Strategy(Protocol):
    """Takes batches of whole groups from a buffer."""

    num_rows: int
    """Rows of a batch."""

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        """The rows that step `step` trains, or None if there are not enough yet.

        Groups of unequal sizes may leave a batch smaller than `num_rows`: none is ever cut. partial: at the end of
        data, take what is left. Raises DataError if a shard was lost, or a group is larger than a batch.
        """
        ...

    def availability(self, position: Position, step: int) -> Availability:
        """How much lies beyond the position, and whether more may come. Raises DataError as `claim` does."""
        ...

    def read(self, ref: BatchRef) -> list[Experience]:
        """The rows of a batch, in its order. Raises DataError if they are not there, or are not those claimed."""
        ...

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """What the writer of a shard noted of its rows together."""
        ...

    def forget(self, ref: BatchRef) -> None:
        """Drop from memory what only this batch needed."""
        ...


class Taking:
    """A walk from group to group, past those that may not train, which it notes."""

    def __init__(self, walk: Walk, oldest_version: int | None) -> None:
        """oldest_version: groups with an older row are stale."""
        self._walk = walk
        self._oldest = oldest_version
        self._head: Head | None = None
        self._row = 0
        self.passed: list[PassedRows] = []
        self.entered: list[str] = []

    def peek(self, max_rows: int, *, ends: bool) -> tuple[Loaded, int, int] | None:
        """(shard, start, stop): at most `max_rows` that come next, whole groups side by side; None if there is nothing.

        start and stop are equal if the next group is larger.
        """
        while (loaded := self._current(ends=ends)) is not None:
            if self._oldest is None:
                return loaded, self._row, loaded.shard.last_boundary(self._row + max_rows)
            stop = loaded.shard.group_end(self._row)
            if loaded.shard.oldest_version(self._row, stop) >= self._oldest:
                return loaded, self._row, stop if stop - self._row <= max_rows else self._row
            self.passed.append(passed_rows(loaded, self._row, stop, "stale"))
            self.take(stop)
        return None

    def take(self, stop: int) -> None:
        """Go on behind the rows that `peek` showed."""
        assert self._head is not None, "peek first"
        if self._row == 0:
            assert isinstance(self._head.found, Loaded)
            self.entered.append(self._head.found.shard.name)
        self._row = stop

    def cursor(self) -> Cursor:
        """Behind everything that was taken or passed."""
        self._settle()
        return self._walk.cursor

    def has_ended(self) -> bool:
        """Whether nothing is left and nothing will come. Ask after `peek` with `ends` gave None."""
        return self._walk.has_ended()

    def _settle(self) -> None:
        if self._head is not None:
            self._walk.move(self._head, self._row)
            self._head = None

    def _current(self, *, ends: bool) -> Loaded | None:
        while True:
            if self._head is not None:
                assert isinstance(self._head.found, Loaded)
                if self._row < self._head.found.shard.num_rows:
                    return self._head.found
                self._settle()
            head = self._walk.head(ends=ends)
            self.entered += self._walk.passed_empty()
            if head is None:
                return None
            if isinstance(head.found, Damage):
                self.passed.append(PassedRows(head.found.shard, head.start, head.start, "damaged"))
                self._walk.move(head)
            else:
                self._head, self._row = head, head.start


def passed_rows(loaded: Loaded, start: int, stop: int, reason: PassReason) -> PassedRows:
    """The note that these rows are left behind."""
    return PassedRows(loaded.shard.name, start, stop, reason, loaded.shard.response_tokens(start, stop))


def too_large(loaded: Loaded, row: int, num_rows: int) -> DataError:
    """The error for a group that no batch can hold."""
    size = loaded.shard.group_end(row) - row
    return DataError(
        f"group {loaded.shard.group_id(row)} in {loaded.shard.name} has {size} rows, a batch has {num_rows}, and "
        "advantages need whole groups: raise buffer.train_batch_size"
    )


def by_reason(passed: Sequence[PassedRows]) -> dict[str, int]:
    """Rows that were passed, for each reason; of damaged shards, whose rows nobody can count, the shards."""
    counts: dict[str, int] = {}
    for part in passed:
        name = "damaged_shards" if part.reason == "damaged" else part.reason
        counts[name] = counts.get(name, 0) + (1 if part.reason == "damaged" else part.num_rows)
    return counts


class Fifo:
    """Oldest first: the order of shards, each row once.

    Example:
        >>> strategy = Fifo(ExperienceReader(store, "main"), 512)  # doctest: +SKIP
        >>> claim = strategy.claim(Position(), step=1)             # doctest: +SKIP
        >>> experiences = strategy.read(claim.ref)                 # doctest: +SKIP
    """

    def __init__(self, reader: ExperienceReader, num_rows: int, *, max_staleness: int | None = None) -> None:
        """max_staleness: train steps between the weights that sampled a row and those that it would train."""
        self._reader = reader
        self.num_rows = num_rows
        self._max_staleness = max_staleness

    def _taking(self, position: Position, step: int) -> Taking:
        oldest = None if self._max_staleness is None else step - 1 - self._max_staleness
        return Taking(self._reader.walk(position.cursor), oldest)

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        """See `Strategy`."""
        taking, ranges, needed = self._taking(position, step), list[RowRange](), self.num_rows
        while needed:
            part = taking.peek(needed, ends=partial)
            if part is None:
                if partial and ranges and taking.has_ended():
                    break
                return None
            loaded, start, stop = part
            if start == stop:
                if not ranges:
                    raise too_large(loaded, start, self.num_rows)
                break
            ranges.append(loaded.rows(start, stop))
            needed -= stop - start
            taking.take(stop)
        after = Position(taking.cursor())
        ref = BatchRef(joined(ranges), self.num_rows - needed)
        return Claim(ref, after, tuple(taking.passed), tuple(taking.entered))

    def availability(self, position: Position, step: int) -> Availability:
        """See `Strategy`."""
        taking, available = self._taking(position, step), 0
        while available < self.num_rows and (part := taking.peek(2**31, ends=True)) is not None:
            available += part[2] - part[1]
            taking.take(part[2])
        cursor = taking.cursor()
        return Availability(
            available=available,
            needed=self.num_rows,
            ended=available < self.num_rows and taking.has_ended(),
            writers=self._reader.signs_of_life(cursor),
            filtered=by_reason(taking.passed),
        )

    def read(self, ref: BatchRef) -> list[Experience]:
        """See `Strategy`."""
        return self._reader.read(ref)

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """See `Strategy`."""
        return self._reader.notes(shard)

    def forget(self, ref: BatchRef) -> None:
        """See `Strategy`."""
        self._reader.forget(ref)
