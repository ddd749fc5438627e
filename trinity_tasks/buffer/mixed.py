"""`Mixed`: batches of sampled rows followed by an expert's, out of two buffers, with one position for both.

Owns: how many rows of a batch come from which buffer. Does not own: either buffer. In the cursor the experts' writers
are named <buffer>/<writer>; a name of a writer has no slash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import cast

from pydantic import JsonValue

from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Position
from trinity_tasks.buffer.strategies import Availability, Claim, Strategy


class Mixed:
    """Takes whole groups of sampled rows, and expert rows after them, each by its own strategy."""

    def __init__(self, sampled: Strategy, experts: Strategy, expert_buffer: str) -> None:
        self._sampled, self._experts = sampled, experts
        self._prefix = f"{expert_buffer}/"
        self.num_rows = sampled.num_rows + experts.num_rows

    def _split(self, position: Position) -> tuple[Position, Position]:
        state = cast("dict[str, JsonValue]", position.state or {})
        return (
            Position(position.cursor.without(self._prefix), state.get("sampled")),
            Position(position.cursor.part(self._prefix), state.get("experts")),
        )

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        """See `Strategy`. None while either buffer has too few; there is no partial batch."""
        del partial
        before = self._split(position)
        one, two = self._sampled.claim(before[0], step), self._experts.claim(before[1], step)
        if one is None or two is None:
            return None
        states: dict[str, JsonValue] = {"sampled": one.after.state, "experts": two.after.state}
        cursor = one.after.cursor.with_part(self._prefix, two.after.cursor)
        return Claim(
            BatchRef(one.ref.ranges + two.ref.ranges, one.ref.num_rows + two.ref.num_rows),
            Position(cursor, states if any(state is not None for state in states.values()) else None),
            one.passed + two.passed,
            one.entered + two.entered,
            one.reused_tokens + two.reused_tokens,
        )

    def availability(self, position: Position, step: int) -> Availability:
        """See `Strategy`; of the buffer that has too few."""
        sampled, experts = self._split(position)
        found = self._sampled.availability(sampled, step)
        if found.available < found.needed:
            return found
        found = self._experts.availability(experts, step)
        return dataclasses.replace(found, writers=tuple(f"{self._prefix}{writer}" for writer in found.writers))

    def read(self, ref: BatchRef) -> list[Experience]:
        """See `Strategy`."""
        return [row for strategy, part in self._parts(ref) for row in strategy.read(part)]

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """See `Strategy`."""
        of_expert = shard.startswith(f"experiences/{self._prefix}")
        return (self._experts if of_expert else self._sampled).notes(shard)

    def forget(self, ref: BatchRef) -> None:
        """See `Strategy`."""
        for strategy, part in self._parts(ref):
            strategy.forget(part)

    def _parts(self, ref: BatchRef) -> list[tuple[Strategy, BatchRef]]:
        prefix = f"experiences/{self._prefix}"
        parts: list[tuple[Strategy, BatchRef]] = []
        for of_expert, found in groupby(ref.ranges, lambda part: part.shard.startswith(prefix)):
            ranges = tuple(found)
            num_rows = sum(part.stop - part.start for part in ranges)
            parts.append((self._experts if of_expert else self._sampled, BatchRef(ranges, num_rows)))
        return parts
