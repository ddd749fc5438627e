"""Selectors: the reference's numbers, whole epochs, the difficulty worked out by hand, and going on from a state."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engines.errors import CheckpointError, ConfigError, DataError
from trinity_tasks.selectors import DifficultyArgs, DifficultySelector, Selector, SelectorConfig, build_selector

GOLDEN = Path(__file__).parents[1] / "golden" / "vectors" / "selectors.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
DIFFERENT = {
    "sequential/N=2/bs=5": "names task 2 of two",
    "shuffle/N=2/bs=5": "gives 4 and then 3 of 5",
    "random/N=2/bs=5": "is refused",
}
"""Cases in which the reference cannot be meant, and what it does: batches that are larger than the set."""
TYPES = ("sequential", "shuffle", "random", "easy_to_hard", "difficulty_based")
QUICK = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def selector(name: str, num_items: int, seed: int = 42, **kwargs: Any) -> Selector:
    """easy_to_hard gets features that follow from the index, with equal ones among them."""
    if name != "easy_to_hard":
        return build_selector(SelectorConfig.model_validate({"selector_type": name, "kwargs": kwargs}), num_items, seed)
    config = SelectorConfig(selector_type="easy_to_hard", feature_keys=("a", "b"))
    return build_selector(config, num_items, seed, [[index * 7 % 3, index % 2] for index in range(num_items)])


def difficulty(num_items: int, features: list[list[float]] | None = None, **kwargs: Any) -> DifficultySelector:
    keys = ("weak", "strong") if features else ()
    config = SelectorConfig(
        selector_type="difficulty_based", feature_keys=keys, kwargs=DifficultyArgs.model_validate(kwargs)
    )
    built = build_selector(config, num_items, 7, features)
    assert isinstance(built, DifficultySelector)
    return built


def derived(case: dict[str, Any]) -> list[list[int]]:
    """What the batches of a case must be, worked out without selectors."""
    name, num_items, size = parts(case)
    if name == "random":
        rngs = [np.random.default_rng(42 + size * batch) for batch in range(6)]
        return [sum((rng.choice(2, k, replace=False).tolist() for k in (2, 2, 1)), list[int]()) for rng in rngs]
    orders = [
        np.random.default_rng(42 + epoch).permutation(num_items).tolist() if name == "shuffle" else range(num_items)
        for epoch in range(100)
    ]
    walk = [index for order in orders for index in order]
    return [walk[start : start + size] for start in range(0, 6 * size, size)]


def parts(case: dict[str, Any]) -> tuple[str, int, int]:
    name, num_items, size = case["name"].split("/")
    return name, int(num_items.removeprefix("N=")), int(size.removeprefix("bs="))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_reference_gives_the_same_unless_it_cannot_be_meant(case: dict[str, Any]) -> None:
    name, num_items, size = parts(case)
    ours = selector(name, num_items, case["seed"])
    batches = [ours.select(size) for _ in range(6)]
    if case["name"] in DIFFERENT:
        assert batches == derived(case)
        assert case["outputs"].get("batches") != batches
        return
    assert batches == case["outputs"]["batches"]
    state = ours.state()
    assert state == {"selector": name, "num_items": num_items, **case["outputs"]["state"]}
    assert ours.select(size) == case["outputs"]["next"]
    resumed = selector(name, num_items, case["seed"])
    resumed.restore(state)
    assert resumed.select(size) == case["outputs"]["next_after_resume"]


def rates(num_items: int) -> st.SearchStrategy[dict[int, float]]:
    return st.dictionaries(st.integers(0, num_items - 1), st.floats(0, 1), max_size=num_items)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, dict[int, float]]]]:
    """How many tasks; then sizes of batches, each with the pass rates that are told after it."""
    num_items = draw(st.integers(1, 12))
    return num_items, draw(st.lists(st.tuples(st.integers(0, 15), rates(num_items)), min_size=2, max_size=8))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TYPES),
    ("difficulty_based", {"tau": 0, "target_reward": 0.5}),
    ("difficulty_based", {"tau": 0.05, "do_sample": True, "lamb": 0.7, "m": 3}),
]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=[f"{name}{len(kwargs) or ''}" for name, kwargs in VARIANTS])
@QUICK
@given(history=histories(), data=st.data())
def test_a_restored_state_gives_exactly_the_following_selections(
    name: str, kwargs: dict[str, Any], history: tuple[int, list[tuple[int, dict[int, float]]]], data: st.DataObject
) -> None:
    num_items, steps = history
    stop = data.draw(st.integers(0, len(steps)))
    whole = selector(name, num_items, **kwargs)

    def run(chooser: Selector, some: list[tuple[int, dict[int, float]]]) -> list[list[int]]:
        chosen: list[list[int]] = []
        for size, pass_rates in some:
            chosen.append(chooser.select(size))
            chooser.feedback(pass_rates)
        return chosen

    before = run(whole, steps[:stop])
    state = json.loads(json.dumps(whole.state(), allow_nan=False))
    resumed = selector(name, num_items, **kwargs)
    resumed.select(3)
    resumed.feedback({0: 0.5})
    resumed.restore(state)
    after = run(whole, steps[stop:])
    assert run(resumed, steps[stop:]) == after
    assert resumed.state() == whole.state()
    for (size, _), chosen in zip(steps, before + after, strict=True):
        counts = Counter(chosen)
        assert len(chosen) == size
        assert set(counts) <= set(range(num_items))
        if name in ("random", "difficulty_based"):
            even = {size // num_items, -(-size // num_items)}
            assert {counts[index] for index in range(num_items)} <= even


@pytest.mark.parametrize("name", ["sequential", "shuffle", "easy_to_hard"])
@QUICK
@given(num_items=st.integers(1, 12), sizes=st.lists(st.integers(0, 15), min_size=1, max_size=12))
def test_each_epoch_has_every_task_once_however_it_is_cut(name: str, num_items: int, sizes: list[int]) -> None:
    ours = selector(name, num_items)
    walk = [index for size in sizes for index in ours.select(size)]
    assert walk == selector(name, num_items).select(len(walk))
    for start in range(0, len(walk) - num_items + 1, num_items):
        assert sorted(walk[start : start + num_items]) == list(range(num_items))


def test_epochs_of_shuffle_differ_and_follow_from_the_seed() -> None:
    ours = selector("shuffle", 50)
    first, second = ours.select(50), ours.select(50)
    assert first != second
    assert selector("shuffle", 50).select(50) == first
    assert selector("shuffle", 50, seed=43).select(50) == second
    assert build_selector(SelectorConfig(selector_type="shuffle", seed=42), 50, seed=1).select(50) == first


def test_easy_to_hard_is_by_the_greatest_feature_the_next_one_and_the_index() -> None:
    config = SelectorConfig(selector_type="easy_to_hard", feature_keys=("rate", "length"))
    features = [[0.5, 2], [0.9, -1], [0.5, 3], [0.9, -1], [-2, 9], [0.5, 2]]
    ours = build_selector(config, 6, 0, features)
    assert ours.select(8) == [1, 3, 2, 0, 5, 4, 1, 3]


def test_pass_rates_are_estimated_from_what_was_measured() -> None:
    """m = 4, lamb = 0.5. Task 0: 3 of 4, then forgotten by half, then 1 of 4. Task 2: 0 of 4, forgotten by half."""
    ours = difficulty(3, m=4, lamb=0.5)
    assert ours.pass_rates().tolist() == [0.5, 0.5, 0.5]
    ours.feedback({0: 0.75, 2: 0.0})
    np.testing.assert_allclose(ours.pass_rates(), [(1 + 3) / 6, 1 / 2, 1 / 6], rtol=1e-15)
    ours.feedback({0: 0.25})
    np.testing.assert_allclose(ours.pass_rates(), [(1 + 1.5 + 1) / 8, 1 / 2, 1 / 4], rtol=1e-15)
    ours.feedback({})
    np.testing.assert_allclose(ours.pass_rates(), [3.5 / 8, 1 / 2, 1 / 4], rtol=1e-15)


def test_pass_rates_of_other_tasks_are_inferred_from_the_weak_and_the_strong_model() -> None:
    """Measured: 0.5 where the models have 0.2 and 0.7, so that cap is 0.6; then 0.25 on 0.0 and 0.5: 0.5."""
    features = [[0.2, 0.7], [0.0, 0.5], [0.1, 0.1], [0.9, 1.0]]
    ours = difficulty(4, features, m=10, lamb=0.2, rho=0.3)
    ours.feedback({0: 0.5})
    inferred = [0.5, 0.3, 0.1, 0.96]
    counts = np.array([10.0, 3.0, 3.0, 3.0])
    alphas, betas = 1 + counts * inferred, 1 + counts * (1 - np.array(inferred))
    np.testing.assert_allclose(ours.pass_rates(), alphas / (alphas + betas), rtol=1e-14)
    ours.feedback({1: 0.25})
    cap = 0.9 * 0.6 + 0.1 * 0.5
    inferred = np.array([0.2 + 0.5 * cap, 0.25, 0.1, 0.9 + 0.1 * cap])
    counts = np.array([3.0, 10.0, 3.0, 3.0])
    alphas = 1 + 0.8 * (alphas - 1) + counts * inferred
    betas = 1 + 0.8 * (betas - 1) + counts * (1 - inferred)
    np.testing.assert_allclose(ours.pass_rates(), alphas / (alphas + betas), rtol=1e-14)
    state = ours.state()
    assert isinstance(state, dict)
    assert state["cap"] == pytest.approx(cap)
    other = difficulty(4, features, m=10, lamb=0.2, rho=0.3)
    other.restore(json.loads(json.dumps(state)))
    assert other.pass_rates().tolist() == ours.pass_rates().tolist()
    ours.feedback({3: 0.5})
    other.feedback({3: 0.5})
    assert other.state() == ours.state()


def test_tasks_that_both_models_do_alike_infer_nothing_and_what_is_inferred_is_a_rate() -> None:
    features = [[0.1, 0.3], [0.2, 0.2], [0.3, 0.1], [0.0, 1.0]]
    ours = difficulty(4, features, m=1, rho=1.0, lamb=0.0)
    ours.feedback({0: 1.0, 1: 0.5, 2: 1.0})  # their means are equal, but for rounding
    assert np.mean([0.1, 0.2, 0.3]) != np.mean([0.3, 0.2, 0.1]), "these numbers show the fault"
    assert ours.pass_rates().tolist() == [2 / 3, 0.5, 2 / 3, 0.5]
    ours.feedback({0: 1.0})  # cap is 4.5, and the strong model's rate is as good as it gets
    assert ours.pass_rates().tolist()[3] == 2 / 3


def test_without_a_temperature_the_nearest_are_chosen_and_the_first_among_equals() -> None:
    ours = difficulty(5, tau=0, target_reward=0.5, m=1000, lamb=0.0)
    assert ours.select(5) == [0, 1, 2, 3, 4]
    ours.feedback({0: 1.0, 1: 0.1, 2: 0.45, 4: 0.9})
    assert ours.select(4) == [3, 2, 1, 4], "0.1 and 0.9 are equally far, but for Beta(1, 1)"
    assert ours.select(7) == [3, 2, 1, 4, 0, 3, 2]


def shares_of_first(num_draws: int, ours: DifficultySelector, num_items: int) -> Any:
    counts = Counter(ours.select(1)[0] for _ in range(num_draws))
    return np.array([counts[index] / num_draws for index in range(num_items)])


def test_with_a_temperature_the_draws_have_the_weights_of_a_softmax() -> None:
    ours = difficulty(3, tau=0.25, m=98, lamb=0.0)
    ours.feedback({0: 1.0, 1: 0.5, 2: 0.75})
    weights = np.exp(-np.abs(1.0 - np.array([99, 50, 74.5]) / 100) / 0.25)
    drawn = shares_of_first(4000, ours, 3)
    np.testing.assert_allclose(drawn, weights / weights.sum(), atol=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize("tau", [1e-5, 5e-324])
def test_draws_are_without_replacement_even_where_weights_are_too_small_for_a_number(tau: float) -> None:
    ours = difficulty(4, tau=tau, m=98, lamb=0.0)
    ours.feedback({0: 0.0, 1: 1.0, 2: 0.5})
    assert all(sorted(ours.select(4)) == [0, 1, 2, 3] for _ in range(5))
    assert {tuple(ours.select(1)) for _ in range(20)} == {(1,)}


def test_estimates_that_are_drawn_try_uncertain_tasks() -> None:
    """By their means, task 0 always wins; what is known of task 1 leaves it a good chance, of task 2 none."""
    known = {0: 0.6, 2: 0.1}
    by_mean, drawn = (difficulty(3, tau=0, m=1000, do_sample=flag) for flag in (False, True))
    by_mean.feedback(known)
    drawn.feedback(known)
    assert shares_of_first(50, by_mean, 3).tolist() == [1, 0, 0]
    first, second, third = shares_of_first(2000, drawn, 3)
    assert third == 0
    assert second == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / 2000)), "P(uniform > 0.6)"
    assert first == 1 - second


def test_state_has_only_tasks_of_which_anything_is_known() -> None:
    ours = difficulty(100_000, lamb=0.3)
    ours.select(4)
    ours.feedback({99_999: 0.25})
    ours.feedback({5: 1.0})
    assert ours.state() == {
        "selector": "difficulty_based",
        "num_items": 100_000,
        "current_index": 4,
        "counts": {"5": [16.0, 0.0], "99999": [0.7 * 4.0, 0.7 * 12.0]},
    }


@pytest.mark.parametrize("name", TYPES)
def test_pass_rates_of_tasks_that_there_are_not_are_refused(name: str) -> None:
    ours = selector(name, 3)
    before = ours.state()
    for index in (-1, 3):
        with pytest.raises(DataError, match=rf"a pass rate of task {index} was measured, and there are tasks 0 to 2"):
            ours.feedback({0: 0.5, index: 0.5})
    assert ours.state() == before


@pytest.mark.parametrize("rate", [-0.5, 1.5, math.nan])
def test_mean_rewards_that_are_no_pass_rates_are_refused(rate: float) -> None:
    ours = difficulty(3)
    with pytest.raises(
        DataError, match=rf"the mean reward of task 1 is {rate}; difficulty_based needs rewards of 0 to 1"
    ):
        ours.feedback({0: 0.5, 1: rate})
    assert ours.pass_rates().tolist() == [0.5] * 3


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_items": 4}, "has the state of selector {name} over 4 tasks, and this job has {name} over 3"),
        ({"selector": "other"}, "has the state of selector other over 3 tasks"),
        ({"current_index": -1}, "the state of selector {name} cannot be read: current_index: .*greater than or equal"),
        ({"counts": {"3": [1, 1]}}, "the state of selector {name} names tasks beyond its 3"),
        ({"counts": {"2": [1, -1]}}, "cannot be read: counts.2.1: .*greater than or equal to 0"),
        ({"order": [2, 1, 0]}, "cannot be read: order: Extra inputs"),
    ],
)
def test_a_state_of_something_else_is_refused(name: str, changes: Mapping[str, Any], message: str) -> None:
    ours = selector(name, 3)
    state = cast("dict[str, Any]", ours.state())
    with pytest.raises(CheckpointError, match=message.format(name=name)):
        ours.restore({**state, **changes})
    assert ours.state() == state


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the state of selector shuffle cannot be read"):
        selector("shuffle", 3).restore(None)


def test_less_than_no_tasks_cannot_be_asked_for() -> None:
    with pytest.raises(DataError, match="-1 tasks were asked of selector shuffle"):
        selector("shuffle", 3).select(-1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"selector_type": "shuffled"}, "'sequential', 'shuffle', 'random', 'easy_to_hard' or 'difficulty_based'"),
        ({"selector_type": "easy_to_hard"}, "easy_to_hard needs feature_keys"),
        ({"selector_type": "shuffle", "feature_keys": ["a"]}, "shuffle reads no features"),
        ({"selector_type": "difficulty_based", "feature_keys": ["a"]}, "difficulty_based has 1 feature_keys"),
        ({"selector_type": "random", "kwargs": {"tau": 0.5}}, "random takes no kwargs"),
        ({"selector_type": "difficulty_based", "kwargs": {"tua": 0.5}}, "kwargs.tua"),
        ({"selector_type": "difficulty_based", "kwargs": {"tau": -1}}, "greater than or equal to 0"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_a_config_that_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SelectorConfig.model_validate(config)


@pytest.mark.parametrize(
    ("name", "keys", "features", "message"),
    [
        ("easy_to_hard", ["a"], None, "feature_keys a: .* shape"),
        ("easy_to_hard", ["a"], [[1.0], [2.0]], r"have shape \[2, 1\], and 3 tasks with 1 keys need \[3, 1\]"),
        ("easy_to_hard", ["a"], [[1.0], ["high"], [2.0]], "not a number for every key of every task"),
        ("easy_to_hard", ["a", "b"], [[1.0], [2.0, 1.0], [2.0]], "not a number for every key of every task"),
        ("easy_to_hard", ["a", "b"], [[1, 2], [1, math.nan], [1, 2]], "b of task 1 is nan; it must be finite"),
        ("difficulty_based", ["w", "s"], [[0, 1], [0, 1], [0, 70]], "s of task 2 is 70.0; it must be a pass rate"),
    ],
)
def test_features_that_do_not_fit_are_refused(name: str, keys: list[str], features: Any, message: str) -> None:
    config = SelectorConfig.model_validate({"selector_type": name, "feature_keys": keys})
    with pytest.raises(ConfigError, match=message):
        build_selector(config, 3, 0, features)


@pytest.mark.parametrize("name", ["sequential", "random"])
def test_there_must_be_tasks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"selector {name} has no tasks to choose from"):
        selector(name, 0)
