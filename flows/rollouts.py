"""`Rollouts`: the newest sampled rows that a run has trained on, as a table for the Prefect UI.

Owns: which rows are shown and how short. Does not own: when it is published (`live_artifacts.py`). `update` copies a
few fields of two rows; the table is made in the publisher's thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from engines.experience import Experience
from flows.live_artifacts import Content

MAX_ROWS = 50
MAX_TEXT = 400
"""Characters of a prompt or a response."""


class Rollouts:
    """Of each step the rows with the lowest and the highest reward, of the newest steps. `update` is the observer.

    Example:
        >>> rollouts = Rollouts("rft")
        >>> rollouts.update(1, [Experience(tokens=[1, 2, 3], reward=0.5, response_text="tac")])
        >>> rollouts.rows()[0]["response"]
        'tac'
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: tuple[dict[str, Any], ...] = ()

    def update(self, step: int, rows: Sequence[Experience]) -> None:
        """Note the rows that `step` has trained on."""
        new = tuple(_row(step, row) for row in extremes(rows))
        self._rows = (*new, *self._rows)[:MAX_ROWS]  # a new tuple: the publisher may be reading the old one

    def rows(self) -> list[dict[str, Any]]:
        """The table, newest step first; lower reward before higher."""
        return list(self._rows)

    def content(self) -> Content | None:
        """The artifact; None before the first step."""
        rows = self.rows()
        if not rows:
            return None
        description = f"{self.name}: lowest and highest reward of each step, up to step {rows[0]['step']}"
        return Content(json.dumps(rows), description)


def extremes(rows: Sequence[Experience]) -> list[Experience]:
    """The rows with the lowest and the highest reward, the first ones of equals; only one if there is no difference.

    Without any reward: the first row.
    """
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return list(rows[:1])
    lowest, highest = min(scored, key=_reward), max(scored, key=_reward)
    return [lowest] if lowest.reward == highest.reward else [lowest, highest]


def _reward(row: Experience) -> float:
    assert row.reward is not None
    return row.reward


def _row(step: int, row: Experience) -> dict[str, Any]:
    is_number = row.reward is not None and math.isfinite(row.reward)
    return {
        "step": step,
        "task": row.eid.tid,
        "prompt": _cut(row.prompt_text),
        "response": _cut(row.response_text),
        "reward": row.reward if is_number else None,
        "response_length": row.response_length,
        "policy_version": row.info.get("model_version"),
    }


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
