"""A condition finds the rows that it says, and can do nothing but compare."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from engines.errors import ConfigError
from trinity_tasks.browse.names import COLUMNS
from trinity_tasks.browse.where import MAX_LENGTH, Where

FRAME = pd.DataFrame(
    {
        "reward": [0.0, 1.0, np.nan, 0.5],
        "prompt": ["sun", "a`b", None, "x # @y"],
        "response": ["sun", "b", None, "y"],
        "batch": [0, 1, 2, 3],
        "task": pd.Series([1, "e", 2, "f"], dtype=object),
        "truncated": [True, False, False, True],
        "model_version": [1.0, 2.0, np.nan, 3.0],
        "response_length": [1, 2, 3, 4],
        "info_x": pd.Series([True, None, False, None], dtype=object),
        "info_none": [np.nan] * 4,
        "info_mixed": pd.Series([1, 2, "a", None], dtype=object),
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("reward > 0.5 and model_version >= 1 and response_length < 20", [1]),
        ("0 < reward <= 1 < response_length", [1, 3]),
        ("reward * 2 - 1 == 0", [3]),
        ("response_length % 2 == 0 and response_length // 2 / 2 == 1", [3]),
        ("-reward < 0 or batch == 2", [1, 2, 3]),
        ("(reward > 0) & (batch < 3) | ~(response_length <= 3)", [1, 3]),
        ("not (reward > 0 or truncated)", [2]),
        ("truncated == False", [1, 2]),
        ("prompt == response", [0]),
        ("reward in [0, .5, -1]", [0, 3]),
        ("batch in (1, 'a')", [1]),
        ("task in ['e', 2]", [1, 2]),
        ("task not in {1}", [1, 2, 3]),
        ("reward in []", []),
        ("prompt == 'x # @y'", [3]),
        ("'sun' != prompt", [1, 2, 3]),
        ("'`' in prompt or '@' in prompt", [1, 3]),
        ("'s' not in prompt", [1, 2, 3]),
        ("reward is None", [2]),
        ("reward != None and prompt is not None", [0, 1, 3]),
        ("reward != 1", [0, 2, 3]),
        ("info_x == True", [0]),
        ("info_x != True", [1, 2, 3]),
        ("info_none > 3 or info_none == 'a'", []),
        ("info_mixed == 'a' or info_mixed == 1", [0, 2]),
        ("  reward > 0  # a remark", [1, 3]),
        (" and ".join(["reward >= 0"] * 200), [0, 1, 3]),
    ],
)
def test_rows_that_meet_it(text: str, rows: list[int]) -> None:
    assert Where.parse(text).rows(FRAME, "shard").tolist() == rows


def test_no_rows_meet_anything() -> None:
    where = Where.parse("reward > 0 and 'a' in prompt and truncated and batch in [1]")
    assert where.rows(FRAME.iloc[:0], "shard").tolist() == []


def test_the_query_of_pandas_gives_the_same_rows() -> None:
    for text in ("reward > 0.2 or not truncated", "1 < reward + 1 <= 2", "response_length * reward > 1", "truncated"):
        assert Where.parse(text).rows(FRAME, "shard").tolist() == FRAME.query(text, engine="python").index.tolist()


EXECUTED: list[str] = []
"""What a condition has executed. Must stay empty."""


def trap(*arguments: str) -> int:
    """A name that a condition could reach behind @, or call."""
    EXECUTED.append(f"called with {arguments}")
    return 0


def test_pandas_itself_would_execute_it() -> None:
    """What the grammar is there for."""
    FRAME.query("@trap('rm') == 0 and @trap.__class__ != reward", engine="python")
    assert EXECUTED == ["called with ('rm',)"]
    EXECUTED.clear()


@pytest.mark.parametrize(
    "text",
    [
        "@trap() == 0",
        "@trap.__class__ != reward",
        "reward == @trap",
        "trap() == 0",
        "trap == 0",
        "`trap` > 0",
        "__import__('os').system('true') == 0",
        "reward.__class__ == 1",
        "reward.map(print) == 0",
        "prompt.str.len() > 0",
        "reward[0] > 0",
        "(lambda: 1)() == reward",
        "[x for x in reward] == 1",
        "reward in [x for x in [1]]",
        "reward in [trap()]",
        "reward if truncated else reward",
        "(x := reward) > 1",
        "f'{trap()}' == prompt",
        "await reward",
        "*reward > 1",
        "{1: trap()} == reward",
        "reward @ reward > 0",
        "x = reward > 0",
        "reward > 0\nreward < 1",
        "reward > 0; trap()",
        "index > 0",
        "inf > reward",
        "_0 > 1",
        "__pd_eval_local_trap > 1",
        "list == 1",
        "reward > 9 ** 9 ** 9",
        "reward > 1 << 60",
        "prompt * 1000000000 == 'a'",
        "'a' * 1000000000 == prompt",
        "prompt + response == 'a'",
        "reward",
        "1 < 2",
        "reward > 0 and True",
        "reward > 0 & batch < 1",
        "reward is 1",
        "reward in prompt",
        "'a' in reward",
        "reward in [[1]]",
        "reward in [-True]",
        "reward in ['a']",
        "prompt > 'a'",
        "reward < prompt",
        "reward == 'a'",
        "truncated == 1",
        "-truncated == 1",
        "reward > 1e999",
        f"reward > 1{'0' * 400}",
        "reward > 1j",
        "prompt == b'a'",
        "reward > ...",
        "reward >",
        "",
        "\0",
        "\ud800 > 1",
        f"{'(' * 300}truncated{')' * 300}",
        f"{'not ' * 900}truncated",
        f"{'-' * 3000}reward > 0",
        f"reward > {'1' * MAX_LENGTH}",
    ],
)
def test_everything_else_is_refused_before_it_is_evaluated(text: str) -> None:
    with warnings.catch_warnings(action="error"), pytest.raises(ConfigError, match=r"^--where"):
        Where.parse(text).rows(FRAME, "shard")
    assert EXECUTED == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rewrd > 1", "there is no column rewrd; did you mean reward? Columns: uid, batch, task,"),
        ("Reward > 1", "did you mean reward?"),
        ("version > 1", "did you mean model_version?"),
        ("reward == 'a'", "compares a number with a text; allowed are columns"),
        ("reward > 9 ** 9", "9 ** 9 is not allowed"),
        ("reward.max() > 0", "reward.max() is not allowed"),
        ("reward in prompt", "prompt cannot stand after `in`; give a list of values"),
        ("reward", "reward is no condition; compare it with something"),
        ("reward > 1 / 0", "cannot be evaluated in shard 7: division by zero"),
        ("info_x > 0", "takes info_x for a number; in shard 7 it has other values: True, False"),
        ("task >= 1", "takes task for a number; in shard 7 it has other values: 1, 'e', 2"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_is_right(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Where.parse(text).rows(FRAME, "shard 7")
    assert words in str(raised.value)


def test_it_says_which_columns_it_needs() -> None:
    assert Where.parse("reward > 0 and 'a' in info_x or task in [1]").columns == {"reward", "info_x", "task"}
    for name, column in COLUMNS.items():
        assert Where.parse(f"{name} is None").columns == {name}
        assert column.meaning
