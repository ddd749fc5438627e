"""`MixedReader`: batches of sampled rows followed by an expert's, out of two buffers, with one cursor for both.

Owns: how many rows of a batch come from which buffer. Does not own: either buffer (`trinity_tasks.buffer`). In the
cursor the experts' writers are named <buffer>/<writer>; a name of a writer has no slash.
"""

from __future__ import annotations

import dataclasses
from itertools import groupby

from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.buffer.reader import Availability, ExperienceReader


class MixedReader:
    """Takes whole groups of sampled rows, and a fixed number of expert rows after them.

    Example:
        >>> reader = MixedReader(ExperienceReader(store, "main"), ExperienceReader(store, "experts"), "experts", 128)
        ... # doctest: +SKIP
        >>> ref, cursor = reader.claim(Cursor.start(), 512)  # doctest: +SKIP
    """

    def __init__(
        self, sampled: ExperienceReader, experts: ExperienceReader, expert_buffer: str, num_experts: int
    ) -> None:
        self._sampled, self._experts = sampled, experts
        self._prefix = f"{expert_buffer}/"
        self._num_experts = num_experts

    def claim(self, cursor: Cursor, num_rows: int) -> tuple[BatchRef, Cursor] | None:
        """As `ExperienceReader.claim`: num_rows in all, or None while either buffer has too few."""
        experts = cursor.part(self._prefix)
        one = self._sampled.claim(cursor.without(self._prefix), num_rows - self._num_experts)
        two = self._experts.claim(experts, self._num_experts)
        if one is None or two is None:
            return None
        return BatchRef(one[0].ranges + two[0].ranges, num_rows), one[1].with_part(self._prefix, two[1])

    def availability(self, cursor: Cursor, needed: int) -> Availability:
        """As `ExperienceReader.availability`, of the buffer that has too few."""
        sampled = self._sampled.availability(cursor.without(self._prefix), needed - self._num_experts)
        if sampled.available < sampled.needed:
            return sampled
        experts = self._experts.availability(cursor.part(self._prefix), self._num_experts)
        return dataclasses.replace(experts, writers=tuple(f"{self._prefix}{writer}" for writer in experts.writers))

    def read(self, ref: BatchRef) -> list[Experience]:
        """As `ExperienceReader.read`."""
        rows: list[Experience] = []
        for of_expert, parts in groupby(ref.ranges, self._is_experts):
            reader = self._experts if of_expert else self._sampled
            ranges = tuple(parts)
            rows += reader.read(BatchRef(ranges, sum(part.stop - part.start for part in ranges)))
        return rows

    def _is_experts(self, part: RowRange) -> bool:
        return part.shard.startswith(f"experiences/{self._prefix}")
