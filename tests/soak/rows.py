"""Rows that follow from (writer, shard index) alone, so that anybody can say what a shard must hold.

Owns: the rows of a shard, those that an operator drops of it, the digest of a row. Does not own: writing them.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

from engines.experience import Experience
from tests.experience_rows import make_group
from trinity_tasks.operators import Dropped

OPERATOR = "every_tenth"
STALE_SHARE = 0.15
"""Of the groups, those whose weights are far too old."""
MAX_STALENESS = 8
LAG_OF_STALE = 40


@dataclass(frozen=True)
class Made:
    """What a writer makes of one shard."""

    kept: list[Experience]
    dropped: list[Dropped]
    """Of further rows; the shard's notes name them."""


def made(writer: str, index: int) -> Made:
    """The shard of a writer: up to three groups of up to four rows; some are empty, and some lost a group."""
    draw = random.Random(f"{writer}/{index}")
    groups = [_group(draw, writer, index, task) for task in range(0 if index % 13 == 5 else draw.randint(1, 3))]
    num_dropped = 1 if groups and index % 10 == 3 else 0
    dropped = [
        Dropped(row.eid.uid, OPERATOR, "its group is the tenth", row.response_length)
        for group in groups[:num_dropped]
        for row in group
    ]
    return Made([row for group in groups[num_dropped:] for row in group], dropped)


def _group(draw: random.Random, writer: str, index: int, task: int) -> list[Experience]:
    """About one step trains while each writer writes one shard, so the index is the clock of the weights' version."""
    lag = LAG_OF_STALE if draw.random() < STALE_SHARE else draw.randint(0, 2)
    return make_group(f"{writer}.{index}", task, draw.randint(1, 4), version=max(0, index - lag))


def digest(row: Experience) -> str:
    """Of everything that training takes from a row, its identity included."""
    arrays = [None if value is None else value.tolist() for value in (row.tokens, row.logprobs, row.action_mask)]
    facts = [row.eid.uid, row.prompt_length, row.reward, row.info, row.truncate_status, row.experience_type, *arrays]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
