"""Advantages: what they must not depend on, and how they answer to shifted, scaled and repeated rewards.

Each answer that is not "unchanged" is by definition, and the test asserts what it is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from engines.algorithms.advantages import AdvantageInputs, Advantages, group_indices
from engines.algorithms.spec import (
    AdvantageParams,
    Asymre,
    Gae,
    Gigpo,
    Grpo,
    Jsd,
    OnPolicyDistill,
    Opmd,
    Rec,
    Reinforce,
    ReinforcePlusPlus,
    Remax,
    Rloo,
    StepWiseGrpo,
    function_of,
)
from engines.experience import EID
from tests.properties.batches import Shape, shapes
from tests.properties.conftest import Explore
from tests.properties.variants import ALGORITHMS, why_batch_wide

PARAMS: dict[str, AdvantageParams] = {}
for each in ALGORITHMS.values():
    if each.advantage is not None:
        PARAMS.setdefault(each.advantage.model_dump_json(), each.advantage)
BATCH_WIDE = {
    each.advantage.model_dump_json()
    for each in ALGORITHMS.values()
    if each.advantage is not None and each.loss.select is None and why_batch_wide(each)
}
BY_TOKEN = ("token_rewards", "rollout_logprobs", "old_logprobs", "teacher_logprobs", "values", "entropies")


def drawn(shape: Shape, stepwise: bool = False) -> AdvantageInputs:
    """Rows of this shape, some without action tokens, with everything that an advantage may read."""
    random = np.random.default_rng(shape.seed)
    rows = [(task, run, length) for task, group in enumerate(shape.groups) for run, length in enumerate(group)]
    lengths = np.array([length if random.random() < 0.8 else 0 for _, _, length in rows], np.int64)
    num_tokens = int(lengths.sum())
    eids = [EID(0, task, run // 2 if stepwise else run, run % 2 if stepwise else 0) for task, run, _ in rows]
    baselines = random.normal(size=len(shape.groups))
    infos = [
        {"reward_baseline": baselines[task], "env_state_hash": f"{task} {random.integers(2)}"} for task, _, _ in rows
    ]
    x = AdvantageInputs(
        token_rewards=np.empty(0),
        rewards=np.empty(0),
        lengths=lengths,
        groups=group_indices([eid.tid for eid in eids]),
        eids=eids,
        infos=infos,
        rollout_logprobs=random.uniform(-4, -0.1, num_tokens),
        old_logprobs=random.uniform(-4, -0.1, num_tokens),
        teacher_logprobs=random.uniform(-4, -0.1, num_tokens),
        values=random.normal(size=num_tokens),
        bootstrap=random.normal(size=len(rows)) * (random.random(len(rows)) < 0.3),
        entropies=random.uniform(0, 2, num_tokens),
        expected_scores=random.normal(size=num_tokens),
        seed=5,
    )
    return rewarded(x, random.choice([-1.0, 0.0, 0.35, 1.0], len(rows)) + 0.01 * random.random(len(rows)))


def rewarded(
    x: AdvantageInputs, rewards: Any, baseline_shift: float = 0.0, baseline_scale: float = 1.0
) -> AdvantageInputs:
    """With these rewards, on the last action tokens; the greedy answer's changes alike."""
    token_rewards = np.zeros(int(x.lengths.sum()))
    trained = x.lengths > 0
    token_rewards[(x.starts + x.lengths - 1)[trained]] = rewards[trained]
    infos = [{**info, "reward_baseline": info["reward_baseline"] * baseline_scale + baseline_shift} for info in x.infos]
    return dataclasses.replace(x, rewards=np.asarray(rewards, np.float64), token_rewards=token_rewards, infos=infos)


def taken(x: AdvantageInputs, rows: Sequence[int]) -> AdvantageInputs:
    """These rows, in this order."""
    tokens = tokens_of(x, rows)
    columns = {name: getattr(x, name)[tokens] for name in (*BY_TOKEN, "expected_scores")}
    eids = [x.eids[row] for row in rows]
    assert x.bootstrap is not None
    return dataclasses.replace(
        x,
        rewards=x.rewards[list(rows)],
        lengths=x.lengths[list(rows)],
        bootstrap=x.bootstrap[list(rows)],
        eids=eids,
        infos=[x.infos[row] for row in rows],
        groups=group_indices([eid.tid for eid in eids]),
        **columns,
    )


def tokens_of(x: AdvantageInputs, rows: Sequence[int]) -> np.ndarray:
    """Indices of the tokens of these rows."""
    parts = [np.arange(x.starts[row], x.starts[row] + x.lengths[row]) for row in rows]
    return np.concatenate([*parts, np.empty(0, np.int64)])


def result(params: AdvantageParams, x: AdvantageInputs) -> Advantages:
    return function_of(params)(x, params)


def inputs_for(params: AdvantageParams, shape: Shape) -> AdvantageInputs:
    return drawn(shape, stepwise=isinstance(params, StepWiseGrpo | Gigpo))


def close(one: Any, other: Any, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-9)


def assert_part(whole: Advantages, part: Advantages, tokens: np.ndarray, rows: Sequence[int]) -> None:
    """`part` says of these rows what `whole` says of them."""
    close(part.values, whole.values[tokens])
    for name, indices in (("kept", list(rows)), ("kept_tokens", tokens), ("returns", tokens)):
        one, other = getattr(whole, name), getattr(part, name)
        assert (one is None) == (other is None)
        if one is not None:
            close(other.astype(float), one[indices].astype(float))


@pytest.mark.parametrize("key", [key for key, p in PARAMS.items() if p != Rec(drop="balance")])
def test_order_of_rows(explore: Explore, key: str) -> None:
    """rec with drop: balance draws rows by position; its test is in `test_partition`. The rank penalty
    ranks equal rows, such as those that train nothing, by position: here there is at most one.
    """
    params = PARAMS[key]
    ranked = isinstance(params, Grpo) and params.rank_penalty is not None

    @explore(shapes(), st.randoms(use_true_random=False))
    def holds(shape: Shape, random: Any) -> None:
        x = inputs_for(params, shape)
        if ranked and (x.lengths == 0).sum() > 1:
            return
        order = random.sample(range(len(x.lengths)), len(x.lengths))
        assert_part(result(params, x), result(params, taken(x, order)), tokens_of(x, order), order)


@pytest.mark.parametrize("key", [key for key in PARAMS if key not in BATCH_WIDE])
def test_a_group_alone_is_worth_what_it_is_in_a_batch(explore: Explore, key: str) -> None:
    params = PARAMS[key]

    @explore(shapes(min_groups=2))
    def holds(shape: Shape) -> None:
        x = inputs_for(params, shape)
        whole = result(params, x)
        for members in x.groups:
            rows = members.tolist()
            assert_part(whole, result(params, taken(x, rows)), tokens_of(x, rows), rows)


@pytest.mark.parametrize("key", sorted(BATCH_WIDE))
def test_a_group_alone_is_worth_something_else_where_the_definition_says_so(key: str) -> None:
    """In some batch; else it would belong to the test above. gigpo: tasks that share a state."""
    params, differs = PARAMS[key], 0
    for seed in range(40):
        x = inputs_for(params, Shape(((3,) * 8, (4,) * 8), seed))
        x = dataclasses.replace(x, infos=[{**info, "env_state_hash": "s"} for info in x.infos])
        whole, rows = result(params, x), x.groups[1].tolist()
        alone, tokens = result(params, taken(x, rows)), tokens_of(x, rows)
        masks = [np.ones(len(tokens), np.bool_) if r.kept_tokens is None else r.kept_tokens for r in (whole, alone)]
        kept = masks[0] if whole.kept_tokens is None else masks[0][tokens]
        differs += not np.allclose(alone.values * masks[1], whole.values[tokens] * kept)
    assert differs > 0


BY_GROUP: list[AdvantageParams] = [
    *(Grpo(), Grpo(normalize=False), Grpo(std_threshold=0.1), Rloo(), Remax(), Opmd(), Asymre(), Rec()),
    *(Opmd(opmd_baseline="logavgexp", tau=0.5), Rec(std_normalize=True), Rec(drop="balance")),
    *(StepWiseGrpo(), StepWiseGrpo(enable_step_norm=True, std_threshold=0.0), Gigpo(), Gigpo(fnorm="std")),
    *(OnPolicyDistill(), Jsd()),
]
BY_BATCH: list[AdvantageParams] = [Grpo(std_cal_level="batch"), Gae(), ReinforcePlusPlus()]


@pytest.mark.parametrize("params", [*BY_GROUP, *BY_BATCH], ids=str)
def test_a_constant_added_to_the_rewards_changes_nothing(explore: Explore, params: AdvantageParams) -> None:
    """One for each group; where a batch is whitened or its std divides, one for all. remax: to the baseline too."""
    alike = params in BY_BATCH or isinstance(params, Remax)

    @explore(shapes(), st.floats(-10, 10))
    def holds(shape: Shape, constant: float) -> None:
        x = inputs_for(params, shape)
        task = np.array([int(eid.task) for eid in x.eids])
        shifted = rewarded(x, x.rewards + constant * (1 if alike else 1 + task), baseline_shift=constant)
        close(result(params, shifted).values, result(params, x).values, rtol=1e-6)


@pytest.mark.parametrize("constant", [-3.0, 0.5])
def test_a_constant_added_to_the_rewards_adds_to_what_has_no_baseline(constant: float) -> None:
    """reinforce: itself. Discounted returns: what is left of it at each token. The rank penalty multiplies it."""
    x = drawn(Shape(((3, 2, 4), (1, 5)), 0))
    shifted = rewarded(x, x.rewards + constant)
    close(result(Reinforce(), shifted).values, result(Reinforce(), x).values + constant)
    discounted = ReinforcePlusPlus(gamma=0.5)
    left = np.concatenate([0.5 ** np.arange(length - 1, -1, -1.0) for length in x.lengths])
    one, other = (result(discounted, each).returns for each in (x, shifted))
    assert one is not None
    close(other, one + constant * left)
    penalised = Grpo(rank_penalty=0.5)
    assert not np.allclose(result(penalised, shifted).values, result(penalised, x).values)


DEGREES: list[tuple[AdvantageParams, int]] = [
    *((p, 0) for p in (Grpo(epsilon=0), Grpo(epsilon=0, std_cal_level="batch"), StepWiseGrpo(epsilon=0))),
    *((p, 0) for p in (Rec(std_normalize=True, epsilon=0), Gigpo(fnorm="std", epsilon=0), OnPolicyDistill(), Jsd())),
    *((p, 1) for p in (Grpo(normalize=False), Rloo(), Remax(), Opmd(), Rec(), Reinforce(), Gigpo(), Gigpo(gamma=0.9))),
    (Asymre(baseline_shift=0.0), 1),
]


@pytest.mark.parametrize(("params", "degree"), DEGREES, ids=str)
def test_rewards_times_a_factor(explore: Explore, params: AdvantageParams, degree: int) -> None:
    """Nothing changes where a std divides; else advantages have the factor too."""

    @explore(shapes(), st.floats(0.01, 1e4))
    def holds(shape: Shape, factor: float) -> None:
        x = inputs_for(params, shape)
        scaled = rewarded(x, x.rewards * factor, baseline_scale=factor)
        close(result(params, scaled).values, result(params, x).values * factor**degree, rtol=1e-6)


COMPARED: list[AdvantageParams] = [
    *(Grpo(epsilon=0), Grpo(normalize=False), Grpo(epsilon=0, std_cal_level="batch"), Rloo(), Opmd()),
    *(Opmd(opmd_baseline="logavgexp"), Asymre(baseline_shift=0.0), Rec(), Rec(std_normalize=True, epsilon=0)),
    *(StepWiseGrpo(epsilon=0), Gigpo(epsilon=0), Gigpo(epsilon=0, fnorm="std"), ReinforcePlusPlus()),
]


@pytest.mark.parametrize("params", COMPARED, ids=str)
@pytest.mark.parametrize("reward", [0.35, 0.1, -7.3, 1e6 / 3, 1e9 / 7])
def test_equal_rewards_are_worth_exactly_nothing(params: AdvantageParams, reward: float) -> None:
    """Not a residue of rounding, which an optimizer that normalises would follow at full speed."""
    for size in range(1, 12):
        x = inputs_for(params, Shape(((2,) * size, (3, 1)), size))
        assert not result(params, rewarded(x, np.full(len(x.lengths), reward))).values.any()


@pytest.mark.parametrize("params", [p for p in BY_GROUP if not isinstance(p, Remax | OnPolicyDistill | Jsd)], ids=str)
def test_a_group_of_one_is_worth_nothing(explore: Explore, params: AdvantageParams) -> None:
    @explore(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
    def holds(lengths: list[int], seed: int) -> None:
        x = inputs_for(params, Shape(tuple((length,) for length in lengths), seed))
        assert not result(params, x).values.any()


@pytest.mark.parametrize(
    "params", [Grpo(), Grpo(normalize=False), Rloo(), Opmd(), Rec(), Rec(std_normalize=True)], ids=str
)
def test_advantages_of_a_group_add_up_to_nothing(explore: Explore, params: AdvantageParams) -> None:
    """Over rows, not tokens."""

    @explore(shapes())
    def holds(shape: Shape) -> None:
        x = dataclasses.replace(drawn(shape), lengths=np.ones(shape.num_rows, np.int64))
        x = rewarded(x, x.rewards)
        values = result(params, x).values
        for members in x.groups:
            assert abs(values[members].sum()) < 1e-9


def test_gae_with_lambda_1_learns_the_rewards_to_come_whatever_the_critic_says(explore: Explore) -> None:
    """And where a response was cut, what the critic thought of the rest."""

    @explore(shapes())
    def holds(shape: Shape) -> None:
        x = drawn(shape)
        assert x.bootstrap is not None
        returns = result(Gae(), x).returns
        close(returns, x.spread(x.rewards + x.bootstrap))
        equal = dataclasses.replace(rewarded(x, np.full(len(x.lengths), 0.35)), bootstrap=None)
        assert result(Gae(), equal).stats["critic/explained_variance"] == 0  # not 1 over the variance of roundings


@pytest.mark.parametrize("params", [Gae(), ReinforcePlusPlus()], ids=str)
def test_whitening_has_mean_0_and_variance_1_and_a_doubled_batch_only_its_degrees_of_freedom(
    explore: Explore, params: AdvantageParams
) -> None:
    """n - 1 of n tokens are free, 2n - 1 of 2n; the epsilon on the variance is 1e-8."""

    @explore(shapes(min_groups=2))
    def holds(shape: Shape) -> None:
        x = drawn(shape)
        x = rewarded(x, x.rewards * 1e3)
        values = result(params, x).values
        size = len(values)
        if size < 2 or not values.any():
            return
        close(values.mean(), 0)
        close(values.var(ddof=1), 1, rtol=1e-4)
        order = [*range(len(x.lengths))] * 2
        doubled = result(params, taken(x, order)).values
        close(doubled, np.tile(values, 2) * np.sqrt((2 * size - 1) / (2 * size - 2)), rtol=1e-4)
