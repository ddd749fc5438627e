"""Rewards: (task, response) -> a number, or None for "unscored".

Owns: the functions by name, and loading a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

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


def load_reward(name: str, *, required: bool = False) -> RewardFn:
    """The reward of that name, or a user's `module:function`; its result is checked on every call.

    required: None is refused too, because the algorithm has no use for a sample without a reward.
    Raises ConfigError for a name that is neither. The returned function raises DataError for what is neither a finite
    number nor None, and for any error inside a user's function.
    """
    function = REWARDS.get(name) or _imported(name)

    def checked(task: Task, response: str) -> float | None:
        try:
            given: object = function(task, response)
        except (Exception, SystemExit) as error:  # the user's code: whatever it does, the run says where and why
            raise DataError(
                f"reward {name} failed with {type(error).__name__}: {error} ({plugins.place_of(error)}), scoring "
                f"{_shown(task, response)}; correct it, or let it return None for unscored"
            ) from error
        reward = _number(given)
        unscored = given is None and not required
        if not unscored and (reward is None or not math.isfinite(reward)):
            remedy = "this algorithm needs a number" if required else "give a finite number, or None for unscored"
            raise DataError(f"reward {name} gave {given!r} for {_shown(task, response)}; {remedy}")
        return reward

    return checked


def _shown(task: Task, response: str) -> str:
    return f"task {task.index} ({task.question!r}) and response {response!r}"


def _number(given: Any) -> float | None:
    """None for what is no number; the text of one is none either."""
    try:
        return None if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError):
        return None


def _imported(name: str) -> RewardFn:
    if ":" not in name:
        raise ConfigError(f"reward_fn {name!r} is neither known nor a module:function; {plugins.hint(name, REWARDS)}")
    function = plugins.load("reward_fn", name)
    if not callable(function):
        raise ConfigError(f"reward_fn {name}: it is a {type(function).__name__}, not a function of (task, response)")
    return cast("RewardFn", function)
