"""Operators as a user writes them, good and bad, named in tests as tests.own_operators:<function>."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

from engines.experience import EID, Experience

CALLS: list[int] = []
"""Rows of each call of `counted`."""
NOT_A_FUNCTION = 3


def short_ones(rows: list[Experience], max_tokens: int = 3) -> list[Experience]:
    return [row for row in rows if row.response_length <= max_tokens]


def halved(rows: list[Experience]) -> list[Experience]:
    """Other objects in the place of the rows, in another order, the first row left out."""
    return [replace(row, reward=row.reward / 2) for row in reversed(rows[1:]) if row.reward is not None]


def emptied(rows: list[Experience]) -> list[Experience]:
    rows.clear()
    return rows


def counted(rows: list[Experience], notes: list[str]) -> list[Experience]:
    """Changes what it was given."""
    CALLS.append(len(rows))
    notes.append("seen")
    assert len(notes) == 2, notes
    return rows


def any_args(rows: list[Experience], **args: Any) -> list[Experience]:
    return rows[: args["count"]]


def nothing(rows: list[Experience]) -> None:
    return None


def uids_of(rows: list[Experience]) -> list[str]:
    return [row.eid.uid for row in rows]


def invented(rows: list[Experience]) -> list[Experience]:
    return [*rows, Experience(tokens=[1, 2], eid=EID(9, 9, suffix="000009"))]  # type: ignore[arg-type]


def renamed(rows: list[Experience]) -> list[Experience]:
    rows[0].eid = EID(0, 0, suffix="renamed")
    return rows


def twice(rows: list[Experience]) -> list[Experience]:
    return [*rows, rows[0]]


def failing(rows: list[Experience]) -> list[Experience]:
    if rows[0].info["length"] > 0:
        rows.pop()
    return rows


def leaving(rows: list[Experience]) -> list[Experience]:
    sys.exit(0)


async def awaited(rows: list[Experience]) -> list[Experience]:
    await asyncio.sleep(0)
    return rows
