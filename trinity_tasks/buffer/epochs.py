"""`Epochs`: finished data, every group once in each epoch, in the order of a selector.

Owns: the index of all groups, where an epoch ends. Does not own: the order (`trinity_tasks.selectors`). The index is
made once in the life of a process, by reading every shard; the data must have ended, or there would be no order of all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, PassedRows, Position, RowRange, joined
from trinity_tasks.buffer.reader import ExperienceReader
from trinity_tasks.buffer.strategies import Availability, Claim, Taking, by_reason
from trinity_tasks.selectors import Selector

MakeSelector = Callable[[int, list[list[float]] | None], Selector]
"""(number of groups, [N, F] features of their first rows) -> the selector."""


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """Every group of the data."""

    shards: list[tuple[str, str]]
    """(path, sha256)."""
    places: npt.NDArray[np.int64]
    """[N, 3] shard, first row, row behind the last."""
    passed: tuple[PassedRows, ...]
    entered: tuple[str, ...]
    selector: Selector


class Epochs:
    """Takes so many groups as `num_rows` holds; the last batch of an epoch is smaller, or is left out."""

    def __init__(
        self,
        reader: ExperienceReader,
        num_rows: int,
        group_size: int,
        make_selector: MakeSelector,
        *,
        feature_keys: Sequence[str] = (),
        total_epochs: int | None = None,
        last_batch: Literal["train", "drop"] = "drop",
    ) -> None:
        """group_size: rows of a group, at most. feature_keys: numbers in the rows' `metrics` or `info`."""
        self._reader = reader
        self.num_rows = num_rows
        self._num_groups = num_rows // group_size
        self._make_selector = make_selector
        self._feature_keys = tuple(feature_keys)
        self._total_epochs = total_epochs
        self._last_batch = last_batch
        self._built: _Index | None = None

    def _index(self) -> _Index | Availability:
        """The index, or what there is as long as the data has not ended."""
        if self._built is not None:
            return self._built
        taking = Taking(self._reader.walk(Cursor.start()), None)
        shards: list[tuple[str, str]] = []
        places: list[tuple[int, int, int]] = []
        features: list[list[float]] = []
        while (part := taking.peek(2**31, ends=True)) is not None:
            loaded = part[0]
            groups = list(loaded.shard.groups())
            places += [(len(shards), start, stop) for start, stop in groups]
            shards.append((loaded.shard.name, loaded.sha256))
            if self._feature_keys:
                rows = loaded.shard.rows(0, loaded.shard.num_rows)
                features += [self._features(rows[start]) for start, _ in groups]
            taking.take(part[2])
        if not taking.has_ended():
            num_rows = sum(stop - start for _, start, stop in places)
            writers = self._reader.signs_of_life(taking.cursor())
            return Availability(0, self.num_rows, False, writers, {"waiting for the end of data": num_rows})
        if not places:
            return Availability(0, self.num_rows, True, self._reader.signs_of_life(taking.cursor()))
        selector = self._make_selector(len(places), features or None)
        self._built = _Index(shards, np.array(places, np.int64), tuple(taking.passed), tuple(taking.entered), selector)
        return self._built

    def _features(self, row: Experience) -> list[float]:
        values = {**row.info, **row.metrics}
        for key in self._feature_keys:
            if not isinstance(values.get(key), int | float):
                raise DataError(
                    f"experience {row.eid.uid}: {key} is {values.get(key)!r} in its metrics and info; the selector "
                    "orders the data by this number (data_selector.feature_keys)"
                )
        return [float(values[key]) for key in self._feature_keys]

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        """See `Strategy`. Batches do not reach over the end of an epoch, so none holds a group twice."""
        del step, partial
        index = self._index()
        if isinstance(index, Availability):
            return None
        state = cast("dict[str, JsonValue]", position.state or {})
        taken, total = cast(int, state.get("num_taken", 0)), len(index.places)
        if state:
            index.selector.restore(state["selector"])
        left = total - taken % total
        if self._last_batch == "drop" and left < self._num_groups:
            if left == total:
                return None
            index.selector.select(left)
            taken, left = taken + left, total
        if self._total_epochs is not None and taken >= total * self._total_epochs:
            return None
        chosen = index.selector.select(min(self._num_groups, left))
        ranges = joined(self._range(index, group) for group in chosen)
        num_rows = sum(part.stop - part.start for part in ranges)
        if num_rows > self.num_rows:
            raise DataError(
                f"{len(chosen)} groups have {num_rows} rows, a batch has {self.num_rows}: some are larger than "
                "algorithm.repeat_times says; raise it with buffer.train_batch_size"
            )
        after = {"selector": index.selector.state(), "num_taken": taken + len(chosen)}
        is_first = not state
        return Claim(
            BatchRef(ranges, num_rows),
            Position(position.cursor, after),
            index.passed if is_first else (),
            index.entered if is_first else (),
            0 if taken < total else self._num_tokens(ranges),
        )

    def _range(self, index: _Index, group: int) -> RowRange:
        shard, start, stop = (int(number) for number in index.places[group])
        name, digest = index.shards[shard]
        return RowRange(name, start, stop, digest)

    def _num_tokens(self, ranges: Sequence[RowRange]) -> int:
        return sum(self._reader.claimed(part).shard.response_tokens(part.start, part.stop) for part in ranges)

    def availability(self, position: Position, step: int) -> Availability:
        """See `Strategy`. Asked after `claim` has found nothing: the epochs are over, or the data has not ended."""
        index = self._index()
        if isinstance(index, Availability):
            return index
        available = 0 if self.claim(position, step) is None else self.num_rows
        writers = self._reader.signs_of_life(Cursor.start())
        return Availability(available, self.num_rows, not available, writers, by_reason(index.passed))

    def read(self, ref: BatchRef) -> list[Experience]:
        """See `Strategy`."""
        return self._reader.read(ref)

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """See `Strategy`."""
        return self._reader.notes(shard)

    def forget(self, ref: BatchRef) -> None:
        """Keep everything: other groups of the same shards follow."""
