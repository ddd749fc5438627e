"""Rewards: names, partial credit, unscored answers, a user's own function, and numbers that are refused."""

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from engines.errors import ConfigError, DataError
from trinity_tasks.rewards import load_reward
from trinity_tasks.tasksets import Task


def half_for_anything(answer: str, entry: Mapping[str, Any]) -> float:
    """1 for the right answer, 0.5 for any other that is not empty."""
    return 1.0 if answer == entry["answer"] else 0.5 * bool(answer)


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "index": 7,
        "question": "Spell backward: sun",
        "answer": "nus",
        "messages": ({"role": "user", "content": "Spell backward: sun"},),
        "entry": {"answer": "nus"},
        "verifier": half_for_anything,
    }
    return Task(**fields | changes)


# What a user may name as module:function.


def length(task: Task, response: str) -> float:
    return len(response) / 10 + task.index


def unsure(task: Task, response: str) -> float | None:
    return None if response == "?" else 1.0


def ratio_of_letters(task: Task, response: str) -> float:
    return math.nan if not response else math.inf if response == "inf" else -math.inf


NOT_A_FUNCTION = 3


def test_exact_gives_no_partial_credit() -> None:
    exact, partial = load_reward("verifier_exact"), load_reward("verifier")
    assert [exact(task(), answer) for answer in ("nus", "sun", "")] == [1.0, 0.0, 0.0]
    assert [partial(task(), answer) for answer in ("nus", "sun", "")] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", ["verifier", "verifier_exact"])
def test_without_a_verifier_an_answer_is_unscored_not_zero(name: str) -> None:
    assert load_reward(name)(task(verifier=None), "nus") is None


def test_a_function_of_the_user_gets_task_and_response() -> None:
    assert load_reward(f"{__name__}:length")(task(), "abc") == pytest.approx(7.3)


def test_none_stays_unscored() -> None:
    reward = load_reward(f"{__name__}:unsure")
    assert (reward(task(), "?"), reward(task(), "nus")) == (None, 1.0)


@pytest.mark.parametrize(("response", "shown"), [("", "nan"), ("inf", "inf"), ("-inf", "-inf")])
def test_a_reward_that_is_no_finite_number_names_task_and_response(response: str, shown: str) -> None:
    with pytest.raises(DataError) as caught:
        load_reward(f"{__name__}:ratio_of_letters")(task(), response)
    message = str(caught.value)
    assert "ratio_of_letters" in message
    assert f"gave {shown} for task 7 ('Spell backward: sun')" in message
    assert repr(response) in message
    assert "give a finite number, or None for unscored" in message


def test_unknown_name_did_you_mean() -> None:
    with pytest.raises(ConfigError, match=r"reward_fn 'verifier_exakt' .*did you mean verifier_exact\?"):
        load_reward("verifier_exakt")


def test_a_name_like_no_other_says_how_to_give_your_own() -> None:
    with pytest.raises(ConfigError, match=r"reward_fn 'qqqq' .*module:function; known: verifier, verifier_exact"):
        load_reward("qqqq")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:reward", "No module named 'no_such_module'"),
        (f"{__name__}:no_such_function", "no_such_function"),
        (f"{__name__}:NOT_A_FUNCTION", "is a int, not a function of (task, response)"),
    ],
    ids=["module", "function", "not callable"],
)
def test_a_function_that_cannot_be_had(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        load_reward(name)
    assert "reward_fn" in str(caught.value)
    assert name in str(caught.value)
