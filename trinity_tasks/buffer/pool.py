"""Strategies that choose among everything there is: newest first, and replay by priority.

Owns: the pool of waiting groups, priorities, eviction, cooldown. Does not own: how groups reach the pool
(`strategies.py`). The pool is the strategy's state: references of rows, bounded by `capacity`; rows stay in their
shards.

Source: the priority queue of Trinity-RFT 0.6.0 (linear_decay, decay_limit_randomization). There the priority is fixed
when a group is put back, and a cooldown is a time; here both follow from the train step, so that a resume sees the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, PassedRows, PassReason, Position, RowRange
from trinity_tasks.buffer.reader import ExperienceReader
from trinity_tasks.buffer.strategies import Availability, Claim, Taking, by_reason


@dataclass(frozen=True, slots=True)
class Group:
    """A group that waits in the pool."""

    rows: RowRange
    version: int
    """Train step of the oldest weights that sampled one of its rows."""
    num_tokens: int
    """Response tokens."""
    num_uses: int = 0
    """How often it has trained."""
    last_step: int = 0
    """Train step of the last use."""

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


class Priority(Protocol):
    """What comes first, and how often."""

    @property
    def use_count_limit(self) -> int | None:
        """How often a group may train; None: without end."""
        ...

    @property
    def cooldown_steps(self) -> int:
        """Train steps that a group rests after it has trained."""
        ...

    def values(self, groups: Sequence[Group], step: int) -> list[float]:
        """The priority of each group at a train step; higher comes first, equal ones in the order of arrival."""
        ...


@dataclass(frozen=True, slots=True)
class NewestFirst:
    """By the version of the weights that sampled the group; each group once."""

    use_count_limit: int | None = 1
    cooldown_steps: int = 0

    def values(self, groups: Sequence[Group], step: int) -> list[float]:
        """See `Priority`."""
        del step
        return [float(group.version) for group in groups]


@dataclass(frozen=True, slots=True)
class Decay:
    """version - decay x uses + sigma x N(0, 1)."""

    seed: int
    decay: float = 2.0
    sigma: float = 0.0
    """Standard deviation of the noise; drawn anew at each step, from (seed, step)."""
    use_count_limit: int | None = None
    cooldown_steps: int = 0

    def values(self, groups: Sequence[Group], step: int) -> list[float]:
        """See `Priority`."""
        values = np.array([group.version - self.decay * group.num_uses for group in groups], np.float64)
        if self.sigma:
            values += self.sigma * np.random.default_rng([self.seed, step]).standard_normal(len(groups))
        return values.tolist()


class Pooled:
    """Takes every group that there is into a pool of at most `capacity`, and the best of them into the batch."""

    def __init__(
        self,
        reader: ExperienceReader,
        num_rows: int,
        priority: Priority,
        *,
        capacity: int,
        max_staleness: int | None = None,
    ) -> None:
        """capacity: groups. max_staleness: as in `Fifo`; it is judged again at each step."""
        self._reader = reader
        self.num_rows = num_rows
        self._priority = priority
        self._capacity = capacity
        self._max_staleness = max_staleness

    def _oldest(self, step: int) -> int | None:
        return None if self._max_staleness is None else step - 1 - self._max_staleness

    def _fill(self, position: Position, step: int, *, ends: bool) -> tuple[list[Group], Taking]:
        """The pool with everything that came since, in the order of arrival."""
        taking = Taking(self._reader.walk(position.cursor), None)
        pool, oldest = pool_of(position.state), self._oldest(step)
        while (part := taking.peek(1, ends=ends)) is not None:
            loaded, start, _ = part
            for first, stop in loaded.shard.groups(start):
                version = loaded.shard.oldest_version(first, stop)
                tokens = loaded.shard.response_tokens(first, stop)
                pool.append(Group(loaded.rows(first, stop), version, tokens))
            taking.take(loaded.shard.num_rows)
            pool = self._kept(pool, taking.passed, step, oldest)
        return self._kept(pool, taking.passed, step, oldest), taking

    def _kept(self, pool: list[Group], passed: list[PassedRows], step: int, oldest: int | None) -> list[Group]:
        """The pool within its capacity, without what is too old."""
        if oldest is not None:
            passed += [_left(group, "stale") for group in pool if group.version < oldest]
            pool = [group for group in pool if group.version >= oldest]
        if len(pool) <= self._capacity:
            return pool
        values = self._priority.values(pool, step)
        best = sorted(range(len(pool)), key=lambda index: (values[index], index))[-self._capacity :]
        kept = set(best)
        passed += [_left(group, "evicted") for index, group in enumerate(pool) if index not in kept]
        return [pool[index] for index in sorted(kept)]

    def _chosen(self, pool: Sequence[Group], step: int) -> tuple[list[int], int]:
        """(indices of the groups that train, in order; rows that were eligible)."""
        rested = [
            index
            for index, group in enumerate(pool)
            if not group.num_uses or step - group.last_step > self._priority.cooldown_steps
        ]
        values = self._priority.values(pool, step)
        chosen: list[int] = []
        needed = self.num_rows
        for index in sorted(rested, key=lambda index: (-values[index], index)):
            size = pool[index].num_rows
            if size > self.num_rows:
                raise DataError(
                    f"a group in {pool[index].rows.shard} has {size} rows, a batch has {self.num_rows}, and advantages "
                    "need whole groups: raise buffer.train_batch_size"
                )
            if size > needed:
                break
            chosen.append(index)
            needed -= size
        return chosen, sum(pool[index].num_rows for index in rested)

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        """See `Strategy`."""
        pool, taking = self._fill(position, step, ends=partial)
        chosen, eligible = self._chosen(pool, step)
        if not chosen or (eligible < self.num_rows and not (partial and taking.has_ended())):
            return None
        used = set(chosen)
        limit = self._priority.use_count_limit
        left: list[Group] = []
        for index, group in enumerate(pool):
            if index in used:
                group = replace(group, num_uses=group.num_uses + 1, last_step=step)
                if limit is not None and group.num_uses >= limit:
                    continue
            left.append(group)
        ref = BatchRef(tuple(pool[index].rows for index in chosen), sum(pool[index].num_rows for index in chosen))
        reused = sum(pool[index].num_tokens for index in chosen if pool[index].num_uses)
        after = Position(taking.cursor(), state_of(left))
        return Claim(ref, after, tuple(taking.passed), tuple(taking.entered), reused)

    def availability(self, position: Position, step: int) -> Availability:
        """See `Strategy`."""
        pool, taking = self._fill(position, step, ends=True)
        _, eligible = self._chosen(pool, step)
        filtered = by_reason(taking.passed)
        if resting := sum(group.num_rows for group in pool) - eligible:
            filtered["resting"] = resting
        return Availability(
            available=eligible,
            needed=self.num_rows,
            ended=eligible < self.num_rows and taking.has_ended(),
            writers=self._reader.signs_of_life(taking.cursor()),
            filtered=filtered,
        )

    def read(self, ref: BatchRef) -> list[Experience]:
        """See `Strategy`."""
        return self._reader.read(ref)

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """See `Strategy`."""
        return self._reader.notes(shard)

    def forget(self, ref: BatchRef) -> None:
        """Keep everything: other groups of the same shards wait in the pool."""


def _left(group: Group, reason: PassReason) -> PassedRows:
    """What has trained before is not left behind untrained: it counts no tokens."""
    rows = group.rows
    tokens = 0 if group.num_uses else group.num_tokens
    return PassedRows(rows.shard, rows.start, rows.stop, reason, tokens)


def state_of(pool: Sequence[Group]) -> JsonValue:
    """The pool as JSON: each shard once, a row of numbers for each group."""
    shards = {group.rows.shard: group.rows.sha256 for group in pool}
    numbers = {name: number for number, name in enumerate(shards)}
    return {
        "shards": [[name, digest] for name, digest in shards.items()],
        "groups": [
            [
                numbers[group.rows.shard],
                group.rows.start,
                group.rows.stop,
                group.version,
                group.num_tokens,
                group.num_uses,
                group.last_step,
            ]
            for group in pool
        ],
    }


def pool_of(state: JsonValue) -> list[Group]:
    """The pool of a position's state; None is an empty one. Raises DataError if it is not what `state_of` gives."""
    if state is None:
        return []
    try:
        whole = cast("dict[str, list[list[int]]]", state)
        shards = cast("list[tuple[str, str]]", whole["shards"])
        return [
            Group(RowRange(shards[shard][0], start, stop, shards[shard][1]), version, tokens, uses, last)
            for shard, start, stop, version, tokens, uses, last in whole["groups"]
        ]
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"the state of the buffer in the checkpoint is not a pool ({type(error).__name__}: {error}): was "
            "sample_strategy changed?"
        ) from error
