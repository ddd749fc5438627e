"""Rewards: (task, response) -> a number, or None for "unscored".

Owns: the functions by name, and loading a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from engines import plugins
from engines.errors import ConfigError, DataError
from trinity_tasks.tasksets import Task

RewardFn = Callable[[Task, str], float | None]


def verifier(task: Task, response: str) -> float | None:
    """The verifier's score, partial credit included; None if the task has no verifier."""
    return None if task.verifier is None else task.verifier(response, task.entry)


def verifier_exact(task: Task, response: str) -> float | None:
    """1 if the verifier gives full marks, else 0: partial credit would reward junk."""
    score = verifier(task, response)
    return None if score is None else float(score >= 1.0)


REWARDS: dict[str, RewardFn] = {"verifier": verifier, "verifier_exact": verifier_exact}


def load_reward(name: str) -> RewardFn:
    """The reward of that name, or a user's `module:function`; its result is checked on every call.

    Raises ConfigError for a name that is neither. The returned function raises DataError for NaN and infinity.
    """
    function = REWARDS.get(name) or _imported(name)

    def checked(task: Task, response: str) -> float | None:
        reward = function(task, response)
        if reward is not None and not math.isfinite(reward):
            raise DataError(
                f"reward {name} gave {reward} for task {task.index} ({task.question!r}) and response {response!r}; "
                "give a finite number, or None for unscored"
            )
        return reward

    return checked


def _imported(name: str) -> RewardFn:
    if ":" not in name:
        raise ConfigError(f"reward_fn {name!r} is neither known nor a module:function; {plugins.hint(name, REWARDS)}")
    function = plugins.load("reward_fn", name)
    if not callable(function):
        raise ConfigError(f"reward_fn {name}: it is a {type(function).__name__}, not a function of (task, response)")
    return cast("RewardFn", function)
