"""`Usage`: what became of every generated token, summed over the steps of a job.

Owns: the sums, which are committed with the weights, and their metrics. Does not own: the facts, which are in the
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.config import Frozen
from engines.experience import Experience
from trinity_tasks.buffer.ledger import LedgerEntry


class Usage(Frozen):
    """Response tokens; of pairs, those of both responses."""

    trained: int = 0
    """In rows that trained, each use counted."""
    reused: int = 0
    """Of those: in rows that had trained before."""
    truncated: int = 0
    """Of those that trained: in rows that were cut at a limit."""
    stale: int = 0
    """In rows that were too old to train."""
    evicted: int = 0
    """In rows that a full pool gave up before they trained."""
    filtered: int = 0
    """In rows that operators, or filters that sample anew, dropped before they were written."""

    @property
    def generated(self) -> int:
        """In all rows that the steps so far came to."""
        return self.trained - self.reused + self.stale + self.evicted + self.filtered

    def after(self, entry: LedgerEntry, rows: Sequence[Experience]) -> Usage:
        """The sums with one more step, which has trained these rows."""
        passed = {reason: 0 for reason in ("stale", "evicted", "damaged")}
        for part in entry.passed:
            passed[part.reason] += part.num_tokens
        return Usage(
            trained=self.trained + sum(_num_tokens(row) for row in rows),
            reused=self.reused + entry.reused_tokens,
            truncated=self.truncated + sum(_num_tokens(row) for row in rows if row.truncate_status is not None),
            stale=self.stale + passed["stale"],
            evicted=self.evicted + passed["evicted"],
            filtered=self.filtered + sum(num_tokens for _, num_tokens in entry.dropped.values()),
        )

    def metrics(self) -> dict[str, float]:
        """usage/<name>_tokens, sums since the job began, and the share of the generated ones that trained."""
        sums = {name: float(value) for name, value in self.model_dump().items()} | {"generated": float(self.generated)}
        share = (self.trained - self.reused) / self.generated if self.generated else 0.0
        return {f"usage/{name}_tokens": value for name, value in sums.items()} | {"usage/trained_share": share}


def _num_tokens(row: Experience) -> int:
    return row.response_length + sum(len(each) for each in (row.chosen, row.rejected) if each is not None)
