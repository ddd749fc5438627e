"""Reward functions as users get them wrong. Named in configs as tests.bad_rewards:NAME."""

from __future__ import annotations

import math
from typing import Any

not_a_function = 3


def nan(task: Any, response: str) -> float:
    return math.nan


def infinite(task: Any, response: str) -> float:
    return math.inf


def forgotten(task: Any, response: str) -> None:
    """The `return` is missing."""


def sometimes_forgotten(task: Any, response: str) -> float | None:
    return 1.0 if len(response) % 2 else None


def text(task: Any, response: str) -> str:
    return "0.5"


def pair(task: Any, response: str) -> tuple[float, str]:
    return 1.0, "why"


def raises(task: Any, response: str) -> float:
    return task.entry["gold"]


def leaves(task: Any, response: str) -> float:
    raise SystemExit(0)
