"""Operators: the reference's numbers, rows without a reward, the account of what is dropped, a user's own."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.errors import ConfigError, DataError
from engines.experience import EID, Experience
from tests import own_operators
from trinity_tasks.operator_functions import OPERATORS
from trinity_tasks.operator_params import BUILT_IN, OperatorConfig
from trinity_tasks.operators import Dropped, Pipeline, Processed

GOLDEN = Path(__file__).parents[1] / "golden" / "vectors" / "operators.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
METRICS = {
    "reward_filter": {"filtered_count": "num_dropped"},
    "invalid_reward_filter": {"filtered_count": "num_dropped"},
    "reward_std_filter": {
        "operator_filtered_count": "num_dropped",
        **{
            f"origin_group_advantages/reward_{value}/{each}": f"group_reward_{value}_{each}"
            for value in ("mean", "std")
            for each in ("mean", "min", "max")
        },
    },
    "dapo_dynamic_sampling": {
        "filtered_count": "num_dropped",
        "dropped_all_correct": "num_all_right",
        "dropped_all_wrong": "num_all_wrong",
    },
    "mask_response_truncated": {"masked_truncated_count": "num_masked"},
    "reward_shaping_mapper": {f"reward_diff/{each}": f"reward_diff_{each}" for each in ("mean", "min", "max")},
    "pass_rate_calculator": {
        "selection/valid_ratio": "valid_share",
        "selection/strict_valid_ratio": "strictly_valid_share",
        "selection/<1_ratio": "below_1_share",
        "selection/>0_ratio": "above_0_share",
        "selection/<15_16_ratio": "below_15_16_share",
        "selection/>1_16_ratio": "above_1_16_share",
    },
}
"""Operator -> its metrics there, and here."""


def golden_rows(case: dict[str, Any]) -> list[Experience]:
    """There, a task is named by set and number; here by its number."""
    rows = [
        row(
            each["i"],
            reward=each["reward"],
            task=each["tid"].split("/")[1],
            metrics=each["metrics"],
            truncate_status=each["truncate_status"],
            info={"q": each["info"]["q"], "task_index": each["info"]["task_index"]["index"]},
        )
        for each in case["inputs"]
    ]
    if case["name"] == "invalid_reward_filter{}":  # its inputs were written down before these two were made invalid
        rows[1].reward, rows[2].reward = None, math.nan
    return rows


def row(run: int, reward: float | None = 1.0, task: int | str = 0, **given: Any) -> Experience:
    """Two response tokens unless others are given; tokens differ from run to run."""
    fields: dict[str, Any] = {"tokens": np.array([7, 10 + run, 5]), "prompt_length": 1}
    return Experience(**fields | given, eid=EID(0, task, run, suffix=f"{run:06x}"), reward=reward)


def processed(rows: list[Experience], *operators: str | tuple[str, dict[str, Any]]) -> Processed:
    """The rows after these operators. Each row that came in is there once."""
    came = sorted(each.eid.uid for each in rows)
    done = pipeline(*operators).process(rows)
    assert sorted([*(each.eid.uid for each in done.rows), *(each.uid for each in done.dropped)]) == came
    assert sum(value for key, value in done.metrics.items() if key.endswith("/num_dropped")) == len(done.dropped)
    return done


def pipeline(*operators: str | tuple[str, dict[str, Any]]) -> Pipeline:
    pairs = [(each, {}) if isinstance(each, str) else each for each in operators]
    return Pipeline([OperatorConfig(name=name, args=args) for name, args in pairs])


def runs(done: Processed) -> list[int]:
    return [each.eid.run for each in done.rows]


def reasons(done: Processed) -> dict[int, str]:
    """Run of each row that was dropped -> why."""
    return {int(each.uid.split("/")[2]): each.reason for each in done.dropped}


def own(name: str, **args: Any) -> tuple[str, dict[str, Any]]:
    return f"tests.own_operators:{name}", args


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_reference_gives_the_same(case: dict[str, Any]) -> None:
    name, wanted = case["name"].partition("{")[0], case["outputs"]
    done = processed(golden_rows(case), (name, case["init_args"]))
    assert runs(done) == wanted["kept"]
    assert [each.reward for each in done.rows] == pytest.approx(wanted["rewards"], rel=1e-12)
    assert [each.action_mask.tolist() for each in done.rows if each.action_mask is not None] == wanted["masks"]
    there = {key: value for key, value in wanted["metrics"].items() if key != "selector_metric"}
    ours = {key: done.metrics[f"operator/{name}/{METRICS[name][key]}"] for key in there}
    assert ours == pytest.approx(there, rel=1e-12)
    if (feedback := wanted["metrics"].get("selector_metric")) is not None:
        assert done.pass_rates == dict(zip(feedback["0"]["indices"], feedback["0"]["values"], strict=True))
    else:
        assert done.pass_rates == {}


def test_every_name_has_parameters_and_every_parameters_a_function() -> None:
    assert set(BUILT_IN.values()) == set(OPERATORS)
    assert len(set(BUILT_IN.values())) == len(BUILT_IN)
    assert {case["name"].partition("{")[0] for case in CASES} == set(BUILT_IN) - {"deduplicate"}


UNJUDGED = {1: "unscored", 2: "score is not finite", 3: "score is not finite"}


@pytest.mark.parametrize(
    ("operator", "gone"),
    [
        (("reward_filter", {"threshold": -1.0}), UNJUDGED | {5: "reward is below -1"}),
        ("invalid_reward_filter", UNJUDGED),
        ("reward_std_filter", UNJUDGED),
        (("dapo_dynamic_sampling", {"metric_key": "right"}), UNJUDGED),
    ],
)
def test_a_row_without_a_finite_reward_is_never_taken_for_a_zero(operator: Any, gone: dict[int, str]) -> None:
    rewards = [1.0, None, math.nan, math.inf, 0.0, -2.0]
    done = processed([row(run, reward) for run, reward in enumerate(rewards)], operator)
    assert reasons(done) == gone
    assert runs(done) == [run for run in range(6) if run not in gone]


def test_what_is_left_of_a_group_without_its_unscored_rows_decides() -> None:
    """With None as 0, each of these groups would vary, and stay."""
    rows = [row(0, 1.0, 0), row(1, 1.0, 0), row(2, None, 0), row(3, 1.0, 1), row(4, None, 1)]
    gone = {2: "unscored", 4: "unscored", 3: "group of one"}
    done = processed(list(rows), "reward_std_filter")
    assert reasons(done) == gone | dict.fromkeys((0, 1), "std of the group's rewards is not above 0")
    done = processed(list(rows), "dapo_dynamic_sampling")
    assert reasons(done) == gone | dict.fromkeys((0, 1), "all right")
    assert done.metrics == {
        "operator/dapo_dynamic_sampling/num_dropped": 5.0,
        "operator/dapo_dynamic_sampling/num_all_right": 2.0,
        "operator/dapo_dynamic_sampling/num_all_wrong": 0.0,
        "operator/dapo_dynamic_sampling/num_group_of_one": 1.0,
    }


def test_equal_rewards_have_no_std_whatever_their_rounded_mean() -> None:
    rows = [row(run, 0.35) for run in range(7)]
    assert float(np.std([0.35] * 7)) > 0, "these numbers show the fault"
    assert len(processed(rows, "reward_std_filter").dropped) == 7


def test_a_metric_judges_a_row_that_has_no_reward() -> None:
    rows = [row(0, None, metrics={"accuracy": 1.0}), row(1, 1.0, metrics={"accuracy": 0.0}), row(2, None)]
    done = processed(rows, "dapo_dynamic_sampling")
    assert runs(done) == [0, 1]
    assert reasons(done) == {2: "unscored"}


def test_rewards_of_tokens_win_over_the_reward_of_the_row() -> None:
    rows = [row(0, 0.0, token_level_reward=[0.5, 0.5]), row(1, 1.0, token_level_reward=[0.25, 0.0]), row(2, 0.6)]
    assert runs(processed(rows, ("reward_filter", {"threshold": 0.5}))) == [0, 2]


def test_masks_are_of_their_own_and_other_rows_keep_theirs() -> None:
    mask = np.array([True, False])
    rows = [row(0, action_mask=mask), *(row(run, truncate_status="response_truncated") for run in (1, 2))]
    pair = row(3, chosen=[1], rejected=[2, 3], truncate_status="response_truncated")
    done = processed([*rows, pair], "mask_response_truncated")
    assert done.metrics == {
        "operator/mask_response_truncated/num_dropped": 0.0,
        "operator/mask_response_truncated/num_masked": 2.0,
    }
    assert rows[0].action_mask is mask
    assert rows[1].action_mask is not None
    assert rows[2].action_mask is not None
    assert pair.action_mask is None
    rows[1].action_mask[0] = True
    assert rows[2].action_mask.tolist() == [False, False]
    assert rows[1].experience_type == "single_turn"


def shaping(*changes: tuple[str, str, float]) -> tuple[str, dict[str, Any]]:
    keys = ("stats_key", "op_type", "weight")
    configs = [dict(zip(keys, change, strict=True)) for change in changes]
    return "reward_shaping_mapper", {"reward_shaping_configs": configs}


def test_changes_of_a_reward_follow_one_another() -> None:
    rows = [
        row(0, 2.0, info={"a": 3, "b": 0.5}),
        row(1, None, info={"a": 3, "b": 0.5}),
        row(2, 5.0, info={"b": 0}),
        row(3, math.nan, info={"a": 1}),
    ]
    done = processed(rows, shaping(("a", "SUB", 1.0), ("b", "MUL", 4.0), ("b", "DIV", 0.5)))
    assert [each.reward for each in rows[:3]] == [(2.0 - 3) * 2 / 0.25, None, 0.0]
    name = "operator/reward_shaping_mapper"
    assert done.metrics == {
        f"{name}/num_dropped": 0.0,
        f"{name}/num_unscored": 2.0,
        f"{name}/num_skipped": 2.0,
        f"{name}/reward_diff_mean": (-10.0 - 5.0) / 2,
        f"{name}/reward_diff_min": -10.0,
        f"{name}/reward_diff_max": -5.0,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"info": {"a": "long"}}, r"0/0/4/0/000004: info\['a'\] is 'long'; it must be a finite number, or missing"),
        ({"info": {"a": math.inf}}, r"info\['a'\] is inf"),
        ({"info": {"a": 1e308}}, "its reward of 1.0 would become inf; lower the weight"),
        ({"info": {}, "token_level_reward": [1, 0]}, "it has token_level_reward, which wins over reward"),
    ],
)
def test_a_reward_that_cannot_be_shaped_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        processed([row(4, 1.0, **given)], shaping(("a", "ADD", 100.0)))


def test_pass_rates_are_means_over_the_scored_rows_of_a_task_wherever_they_are() -> None:
    """Task 5 was drawn twice; task 8 has no scored row, so that nothing is known of it."""
    tasks, rewards = [5, 5, 6, 5, 8, 6], [1.0, 0.0, 1.0, 0.5, None, None]
    rows = [
        row(run, reward, run // 3, info={"task_index": task})
        for run, (task, reward) in enumerate(zip(tasks, rewards, strict=True))
    ]
    done = processed(rows, "pass_rate_calculator")
    assert done.pass_rates == {5: 0.5, 6: 1.0}
    name = "operator/pass_rate_calculator"
    assert (done.metrics[f"{name}/num_unscored"], done.metrics[f"{name}/valid_share"]) == (2.0, 0.5)
    assert len(done.rows) == 6


@pytest.mark.parametrize("info", [{}, {"task_index": "5"}, {"task_index": True}])
def test_a_row_without_the_number_of_its_task_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"pass_rate_calculator, experience 0/0/3/0/000003: info\['task_index'\] is"):
        processed([row(3, info=info)], "pass_rate_calculator")


@pytest.mark.parametrize(("within", "kept"), [("batch", [0, 2, 4, 5]), ("group", [0, 2, 3, 4, 5])])
def test_the_first_of_equal_rows_stays(within: str, kept: list[int]) -> None:
    same: dict[str, Any] = {"tokens": np.array([7, 8, 9])}
    rows = [
        row(0, 0.0, **same),
        row(1, 1.0, **same),
        row(2, 1.0, tokens=np.array([7, 8])),
        row(3, 1.0, task=1, **same),
        row(4, 1.0, prompt_length=2, **same),
        row(5, None, chosen=[1], rejected=[2], **same),
        row(6, None, chosen=[1], rejected=[2], **same),
    ]
    done = processed(rows, ("deduplicate", {"within": within}))
    assert runs(done) == kept
    assert set(reasons(done).values()) == {"same tokens as an earlier row"}


def test_their_order_matters() -> None:
    def rows() -> list[Experience]:
        return [row(run, reward, info={"bonus": 1}) for run, reward in enumerate([0.0, 0.5, 1.0])]

    shape, keep = shaping(("bonus", "ADD", 1.0)), ("reward_filter", {"threshold": 1.0})
    assert runs(processed(rows(), shape, keep)) == [0, 1, 2]
    done = processed(rows(), keep, shape)
    assert runs(done) == [2]
    assert [each.reward for each in done.rows] == [2.0]


def test_each_dropped_row_is_accounted_for_by_the_operator_that_dropped_it() -> None:
    rows = [row(0, None), row(1, 0.0, tokens=np.arange(7)), row(2), row(3, 0.0, chosen=[1], rejected=[2, 3])]
    done = processed(rows, "invalid_reward_filter", ("reward_filter", {"threshold": 0.5}))
    assert done.dropped == [
        Dropped("0/0/0/0/000000", "invalid_reward_filter", "unscored", 2),
        Dropped("0/0/1/0/000001", "reward_filter", "reward is below 0.5", 6),
        Dropped("0/0/3/0/000003", "reward_filter", "reward is below 0.5", 3),
    ]
    assert done.metrics == {
        "operator/invalid_reward_filter/num_dropped": 1.0,
        "operator/reward_filter/num_dropped": 2.0,
    }


def test_operators_of_one_name_have_metrics_of_their_own() -> None:
    low, high = ("reward_filter", {"threshold": 0.5}), ("reward_filter", {"threshold": 1.0})
    assert pipeline(low, high, low, own("short_ones")).names == (
        "reward_filter",
        "reward_filter_2",
        "reward_filter_3",
        "short_ones",
    )
    done = processed([row(run, reward) for run, reward in enumerate([0.0, 0.25, 0.5, 1.0])], low, high)
    assert done.metrics == {"operator/reward_filter/num_dropped": 2.0, "operator/reward_filter_2/num_dropped": 1.0}
    assert [each.operator for each in done.dropped] == ["reward_filter", "reward_filter", "reward_filter_2"]


@pytest.mark.parametrize("name", [*sorted(set(BUILT_IN) - {"reward_shaping_mapper"}), "tests.own_operators:failing"])
def test_no_rows_are_no_fault(name: str) -> None:
    """A user's function is not called: means of nothing are not to be thought of."""
    done = processed([], name)
    assert done.rows == []
    assert done.metrics[f"operator/{name.rpartition(':')[2]}/num_dropped"] == 0.0
    assert all(math.isfinite(value) for value in done.metrics.values())


def test_without_operators_nothing_is_done() -> None:
    rows = [row(0, None), row(1)]
    done = processed(rows)
    assert (done.rows, done.metrics, done.dropped, pipeline().names) == (rows, {}, [], ())


def test_two_rows_of_one_identity_are_refused() -> None:
    with pytest.raises(DataError, match="two experiences are 0/0/1/0/000001"):
        pipeline("reward_filter").process([row(1), row(1)])


def test_a_function_of_the_users_own_drops_what_it_does_not_return() -> None:
    rows = [row(run, tokens=np.arange(2 + run)) for run in range(5)]
    done = processed(rows, own("short_ones", max_tokens=2))
    assert runs(done) == [0, 1]
    assert done.dropped[0] == Dropped(
        "0/0/2/0/000002", "short_ones", "left out by tests.own_operators:short_ones", rows[2].response_length
    )
    assert runs(processed([row(0), row(1)], own("any_args", count=1))) == [0]
    assert runs(processed([row(0), row(1)], own("emptied"))) == []


def test_a_function_of_the_users_own_may_replace_rows_but_not_their_order() -> None:
    done = processed([row(run, float(run)) for run in range(4)], own("halved"))
    assert [(each.eid.run, each.reward) for each in done.rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_function_of_the_users_own_cannot_change_the_config() -> None:
    own_operators.CALLS.clear()
    config = OperatorConfig(name="tests.own_operators:counted", args={"notes": ["first"]})
    both = Pipeline([config])
    for _ in range(2):
        both.process([row(0), row(1)])
    assert own_operators.CALLS == [2, 2]
    assert config.args == {"notes": ["first"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "returned a NoneType; it must return a list of those of its rows that stay"),
        ("uids_of", "returned a list with a str; it must return a list"),
        ("invented", "returned experience 9/9/0/0/000009, which it was not given"),
        ("renamed", "returned experience 0/0/0/0/renamed, which it was not given; .* eids unchanged"),
        ("twice", "returned experience 0/0/1/0/000001 twice; .* each once"),
        ("failing", r"failed with KeyError: 'length' \(own_operators.py, line \d+, in failing\), given 2 rows"),
        ("leaving", r"failed with SystemExit: 0 \(own_operators.py, line \d+, in leaving\)"),
    ],
)
def test_a_function_of_the_users_own_that_does_not_keep_to_the_rules_is_named(name: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^operator tests.own_operators:{name} {message}"):
        pipeline(own(name)).process([row(1), row(2)])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("reward_fliter", {}, r"^operators\[1\].name = 'reward_fliter' is not known; did you mean reward_filter\?"),
        ("zzz", {}, r"operators\[1\].name = 'zzz' is not known; known: dapo_dynamic_sampling, "),
        (
            "reward_filter",
            {"thresh": 1},
            r"^operators\[1\]: operator reward_filter, args.thresh: .* mean threshold",
        ),
        ("reward_filter", {"threshold": "high"}, "args.threshold: .*number.*, got 'high'"),
        ("reward_filter", {"threshold": math.nan}, "args.threshold: .*finite.*, got nan"),
        ("reward_std_filter", {"threshold": -1}, "args.threshold: .*greater than or equal to 0, got -1"),
        ("deduplicate", {"within": "task"}, "args.within: .*'group' or 'batch', got 'task'"),
        ("mask_response_truncated", {"x": 1}, "args.x: there is no such parameter; it takes none"),
        ("reward_shaping_mapper", {}, "args.reward_shaping_configs: Field required"),
        ("reward_shaping_mapper", {"reward_shaping_configs": []}, "args.reward_shaping_configs: .*at least 1"),
        (*shaping(("q", "POW", 1.0)), "args.reward_shaping_configs.0.op_type: .*'ADD', .*, got 'POW'"),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "q", "weights": 2}]},
            r"args.reward_shaping_configs.0.weights: there is no such parameter; did you mean weight\?",
        ),
        ("tests.own_operators:short_one", {}, r"operators\[1\]: operator .* did you mean short_ones\?"),
        ("tests.no_such_module:f", {}, "No module named 'tests.no_such_module'; is it installed, or on PYTHONPATH"),
        ("tests.own_operators:NOT_A_FUNCTION", {}, r"is a int, not a function of \(rows, \*\*args\)"),
        ("tests.own_operators:Experience", {}, "is a type, not a function"),
        ("tests.own_operators:awaited", {}, "is an async function, not a function"),
        (*own("short_ones", max_token=3), "args.max_token: there is no such parameter; did you mean max_tokens"),
        (*own("nothing", x=3), "args.x: there is no such parameter; it takes none"),
        (*own("counted"), "args do not fit, missing a required argument: 'notes'; it is called with"),
        (*own("short_ones", rows=[]), "args do not fit, multiple values for argument 'rows'"),
        ("builtins:max", {}, r"no signature found.*; wrap it in a function of \(rows, \*\*args\)"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_starts(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline("invalid_reward_filter", (name, args))


def test_the_message_begins_with_the_place_in_the_config() -> None:
    with pytest.raises(ConfigError, match=r"^buffer.operators\[0\].name = 'x' is not known"):
        Pipeline([OperatorConfig(name="x")], key="buffer.operators")
