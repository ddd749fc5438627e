"""Evaluates advantage_*: lists of rows, and padded batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from engines.algorithms.advantages import AdvantageInputs, group_indices
from engines.algorithms.presets import KINDS
from engines.algorithms.spec import AdvantageParams, Grpo, Params, function_of
from engines.experience import EID
from tests.golden import derived_advantages as derived
from tests.golden import derived_tokens as tokens
from tests.golden.checks import LOOSE, Verdict
from tests.golden.derived_advantages import Derived, Sample
from tests.golden.format import Bools, Case, Floats, Unreadable, floats, mask_of, padded

SINGLE, DOUBLE = 2.0**-22, 2.0**-48
"""What rounding may leave, as a share of the numbers that cancel."""
EXACT = {"grpo", "step_wise_grpo", "gigpo", "rec"}
"""Advantages that are divided by a std, which may be tiny: our loops in float32 give the very same numbers."""
FEW_ROWS = 8
"""From here on, sums in float32 depend on their order."""
GROUPS = {"grpo", "opmd", "asymre", "rloo", "step_wise_grpo", "gigpo", "clipb", "clipv"}
"""Advantages that compare: a group of one differs (6)."""
CONSTRUCTOR: dict[str, dict[str, Any]] = {"clipv": {"mu": 2.0}}
"""Defaults there if init_args name others alone (difference 8): its default_args, and ours, have a mu of 8.5."""
ONLY_THERE = {"jsd": {"chunk_size"}}
"""init_args that change no number."""

AS_THERE: dict[str, dict[str, Any]] = {"jsd": {"exact_gradient": False}}
"""Ours alone, at what that system does."""


def advantage(name: str, case: Case) -> Verdict:
    """One case of advantage_<name>."""
    base = name.removesuffix("_verl")
    args = {key: value for key, value in case.init_args.items() if key not in ONLY_THERE.get(base, set())}
    try:
        params = KINDS["advantage_fn"][1][base].model_validate({"name": base} | AS_THERE.get(base, {}) | args)
    except KeyError as error:
        raise Unreadable(f"{name!r} is an advantage that we do not know") from error
    except ValidationError as error:
        raise Unreadable(f"init_args of {name}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    assert isinstance(params, AdvantageParams)
    return _of_list(base, params, case) if isinstance(case.inputs, list) else _of_batch(base, params, case)


def _of_list(name: str, params: Params, case: Case) -> Verdict:
    verdict, samples = Verdict(), [_sample(row) for row in case.inputs]
    x = _list_inputs(samples, int(case.extra.get("seed", 0)))
    result = function_of(params)(x, params)
    ours = {
        row.index: float(result.values[start]) for row, start in zip(samples, x.starts, strict=True) if any(row.mask)
    }
    verdict.differences = _list_differences(name, samples, case)
    if name == "rec":
        own = derived.rec(samples, case.init_args, ours)
        there = own if case.error else derived.rec(_in_float32(samples), case.init_args, _given(case, samples))
        if any(len(group) == 1 for group in derived.by_task(samples)):
            verdict.differences.add(7)
    else:
        own = derived.ROWS[name](samples, case.init_args, derived.NONE)
        there = derived.ROWS[name](_in_float32(samples), case.init_args, frozenset(verdict.differences))
    kept = [row for row in own.order if any(samples[row].mask)]
    atol = [1e-13 + DOUBLE * own.sizes[row] for row in kept]
    verdict.compare("advantages, derived", [ours[row] for row in kept], [own.values[row] for row in kept], atol=atol)
    own_kept = range(len(samples)) if result.kept is None else np.flatnonzero(result.kept).tolist()
    verdict.compare("kept rows, derived", sorted(own_kept), sorted(own.order))
    if (dropped := result.stats.get("groups/num_dropped_rows")) is not None:
        verdict.compare("dropped rows, derived", dropped, len(samples) - len(own.order))
    if isinstance(params, Grpo) and result.repeated is not None:
        _compare_repeated(verdict, "ours", result.repeated.tolist(), own, samples)
    if case.error is not None:
        verdict.require(f"a listed difference covers {case.error[:60]!r}", 7 in verdict.differences)
        return verdict
    order = list(case.outputs["order"])
    first = order[: len(there.order)]
    verdict.compare("order", there.order, first)
    if getattr(params, "duplicate_experiences", False) and getattr(params, "std_threshold", None) is not None:
        _compare_repeated(verdict, "that system's", order[len(first) :], there, samples)
    else:
        verdict.require("no row more than once", len(order) == len(first))
    if first == there.order and set(order) <= set(there.values):
        exact = name in EXACT and len(samples) < FEW_ROWS and 11 not in verdict.differences
        _compare_rows(verdict, case, samples, order, there, ours, exact)
    _compare_list_metrics(verdict, name, case, there, samples)
    return verdict


def _sample(row: dict[str, Any]) -> Sample:
    """Raises Unreadable for a row without a reward or a length."""
    if unknown := row.keys() - {"i", "task", "run", "step", "reward", "rlen", "mask", "logprobs", "info"}:
        raise Unreadable(f"row {row.get('i')} has {sorted(unknown)}, which we do not know")
    if not isinstance(row.get("reward"), int | float) or ("rlen" not in row and "mask" not in row):
        raise Unreadable(f"row {row.get('i')} has no reward, or no length")
    mask = [bool(on) for on in row.get("mask", [True] * row.get("rlen", 0))]
    return Sample(
        index=row["i"],
        task=str(row["task"]),
        reward=float(row["reward"]),
        mask=mask,
        run=row.get("run", 0),
        step=row.get("step", 0),
        logprobs=[float(lp) for lp in row.get("logprobs", [0.0] * len(mask))],
        info=row.get("info") or {},
    )


def _in_float32(samples: Sequence[Sample]) -> list[Sample]:
    """The rows as that system reads them."""
    return [dataclasses.replace(row, reward=np.float32(row.reward)) for row in samples]


def _list_inputs(samples: Sequence[Sample], seed: int) -> AdvantageInputs:
    if [row.index for row in samples] != list(range(len(samples))):
        raise Unreadable("rows are not numbered from 0")
    masks = [np.array(row.mask, np.bool_) for row in samples]
    lengths = np.array([int(mask.sum()) for mask in masks], np.int64)
    flat = [np.array(row.logprobs, np.float64)[mask] for row, mask in zip(samples, masks, strict=True)]
    return AdvantageInputs(
        token_rewards=np.zeros(int(lengths.sum())),
        rewards=np.array([row.reward for row in samples], np.float64),
        lengths=lengths,
        groups=group_indices([row.task for row in samples]),
        eids=[EID(task=row.task, run=row.run, step=row.step) for row in samples],
        infos=[row.info for row in samples],
        rollout_logprobs=np.concatenate([*flat, np.empty(0)]),
        seed=seed,
    )


def _list_differences(name: str, samples: Sequence[Sample], case: Case) -> set[int]:
    """Which of the listed differences apply to these rows."""
    differences = set[int]()
    groups = derived.by_task(samples)
    multi_step = name in ("step_wise_grpo", "gigpo")
    sizes = [len(derived.runs(group)) if multi_step else len(group) for group in groups]
    if name in GROUPS and 1 in sizes and case.init_args.get("std_threshold") is None:
        differences.add(6)
    if name == "step_wise_grpo":
        finals = [(run[-1], derived.last_step(run, derived.NONE)) for run in derived.runs(samples)]
        differences |= {10} if any(listed.reward != last.reward for listed, last in finals) else set()
    if case.init_args.get("rank_penalty") and any(len(group) > 1 for group in groups):
        differences.add(11)
    return differences


def _given(case: Case, samples: Sequence[Sample]) -> dict[int, float]:
    """Row -> its advantage in the file, of rows that have an action token."""
    values = zip(case.outputs["order"], case.outputs["advantages"], strict=True)
    return {row: float(v[samples[row].mask.index(True)]) for row, v in values if any(samples[row].mask)}


def _compare_repeated(
    verdict: Verdict, whose: str, rows: list[int], expected: Derived, samples: Sequence[Sample]
) -> None:
    """As many whole groups as were dropped, each one of those that were kept: any random choice is right."""
    groups = [[row.index for row in group] for group in derived.by_task([samples[row] for row in expected.order])]
    num_repeated, rest = 0, rows
    while rest and (match := next((group for group in groups if rest[: len(group)] == group), None)) is not None:
        num_repeated, rest = num_repeated + 1, rest[len(match) :]
    verdict.require(f"{whose} repeated rows are kept groups", not rest, str(rows))
    wanted = expected.dropped_groups if groups else 0
    verdict.compare(f"number of groups that are {whose} repeated ones", num_repeated, wanted)


def _compare_rows(
    verdict: Verdict,
    case: Case,
    samples: Sequence[Sample],
    order: list[int],
    there: Derived,
    ours: dict[int, float],
    exact: bool,
) -> None:
    """Advantages and returns of all rows in the file, masked positions included."""
    masks = [np.array(samples[row].mask, np.float64) for row in order]
    wanted, size = (
        np.concatenate([*(of[row] * mask for row, mask in zip(order, masks, strict=True)), np.empty(0)])
        for of in (there.values, there.sizes)
    )
    for key in ("advantages", "returns"):
        given = [floats(values) for values in case.outputs[key]]
        if [len(values) for values in given] != [len(mask) for mask in masks]:
            verdict.require(f"{key} have the lengths of the rows", False)
            return
        flat = np.concatenate([*given, np.empty(0)])
        rounded = np.minimum(size, 1.0) if exact else size
        verdict.compare(f"{key} of that system", wanted, flat, LOOSE, atol=1e-9 + SINGLE * rounded)
        if not verdict.differences and not any(there.per_group.get("drop_balance", ())):  # there, chance decides
            own = [np.full(len(mask), ours.get(row, 0.0)) * mask for row, mask in zip(order, masks, strict=True)]
            verdict.compare(key, np.concatenate([*own, np.empty(0)]), flat, LOOSE, atol=1e-9 + SINGLE * size)


def _compare_list_metrics(verdict: Verdict, name: str, case: Case, there: Derived, samples: Sequence[Sample]) -> None:
    size = SINGLE * derived.largest([row.reward for row in samples])
    prefix = "gigpo" if name == "gigpo" else "group_advantages"
    expected: dict[str, float] = {}
    for key, values in there.per_group.items():
        of_groups = {"mean": derived.mean(values), "max": max(values), "min": min(values)}
        expected |= {f"{prefix}/{key}/{how}": number for how, number in of_groups.items()}
        expected[f"{prefix}/{key}"] = of_groups["mean"]
    num_dropped = len(samples) - len(there.order)
    num_tasks = len(derived.by_task(samples))
    expected |= {"filtered_count": num_dropped, "experience_count": len(there.order)}
    expected["skipped_group_ratio"] = there.dropped_groups / max(num_tasks, 1)
    if total := expected.get("gigpo/anchor_groups_total"):
        expected["gigpo/anchor_group_hit_ratio"] = expected["gigpo/anchor_groups_size_gt1"] / total
    expected.setdefault("gigpo/anchor_group_hit_ratio", 0.0)
    for key, value in case.outputs["metrics"].items():
        verdict.require(f"metric {key} is known", key in expected)
        rounded = size if "reward" in key or "baseline" in key else 0.0
        verdict.compare(f"metric {key}", expected.get(key, np.nan), value, LOOSE, atol=1e-9 + rounded)


def _of_batch(name: str, params: Params, case: Case) -> Verdict:
    verdict, inputs, mask = Verdict(), case.inputs, mask_of(case.inputs)
    known = {"token_level_rewards", "response_mask", "uid", "reward_baselines"} | set(TOKEN_COLUMNS)
    if unknown := inputs.keys() - known:
        raise Unreadable(f"inputs have {sorted(unknown)}, which we do not know")
    rewards = padded(inputs, "token_level_rewards") if "token_level_rewards" in inputs else np.zeros(mask.shape)
    x = _batch_inputs(inputs, mask, rewards)
    result = function_of(params)(x, params)
    ours, own_returns = np.zeros(mask.shape), np.zeros(mask.shape)
    ours[mask] = result.values
    own_returns[mask] = result.values if result.returns is None else result.returns
    own_mask = mask.copy()
    own_mask[mask] = True if result.kept_tokens is None else result.kept_tokens
    verdict.differences = _batch_differences(name, inputs, mask, rewards, case)
    right = _derived_batch(name, inputs, mask, rewards, case, derived.NONE)
    atol = 1e-13 + DOUBLE * right.size
    verdict.compare("advantages, derived", ours, right.advantages, atol=atol)
    verdict.compare("returns, derived", own_returns, right.returns, atol=atol)
    verdict.compare("mask, derived", own_mask, right.mask)
    for key, number in right.metrics.items():
        if (own := CLIP_STATS.get(key)) is not None and mask.any():
            power = 2 if key == "varS" else 1
            verdict.compare(f"metric {own}, derived", result.stats[own] ** power, number, atol=1e-12)
    if case.error is not None:
        crashes = name in ("ppo", "reinforceplusplus") and mask.sum() < 2
        verdict.require(f"a listed difference covers {case.error[:60]!r}", bool(crashes))
        verdict.differences |= {4} if crashes else set()
        return verdict
    as_there = dataclasses.replace(case, init_args=CONSTRUCTOR.get(name, {}) | case.init_args)
    there = _derived_batch(name, inputs, mask, rewards, as_there, frozenset(verdict.differences), dense=True)
    atol = 1e-9 + (DOUBLE if name in ("clipb", "clipv") else SINGLE) * there.size
    given = {key: floats(case.outputs[key]).reshape(mask.shape) for key in ("advantages", "returns")}
    verdict.compare("advantages of that system", there.advantages, given["advantages"], LOOSE, atol)
    verdict.compare("returns of that system", there.returns, given["returns"], LOOSE, atol)
    verdict.compare("mask of that system", there.mask, case.outputs["response_mask_after"])
    if not verdict.differences:
        atol = (1e-9 + SINGLE * right.size * np.ones(mask.shape))[mask]
        verdict.compare("advantages", ours[mask], given["advantages"][mask], LOOSE, atol)
        verdict.compare("returns", own_returns[mask], given["returns"][mask], LOOSE, atol)
        verdict.compare("mask", own_mask, case.outputs["response_mask_after"])
    for key, value in case.outputs["metrics"].items():
        verdict.require(f"metric {key} is known", key in there.metrics)
        verdict.compare(f"metric {key}", there.metrics.get(key, np.nan), value, LOOSE, atol=1e-6)
    return verdict


TOKEN_COLUMNS = {
    "values": "values",
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "entropys": "entropies",
    "necs": "expected_scores",
}
"""Key of the file -> field of `AdvantageInputs`."""
CLIP_STATS = {
    "frac_clipped": "clip/dropped_share",
    "ES": "clip/score_mean",
    "varS": "clip/score_std",
    "stdD": "clip/shortfall_std",
}


def _batch_inputs(inputs: dict[str, Any], mask: Bools, rewards: Floats) -> AdvantageInputs:
    baselines = inputs.get("reward_baselines")
    given: dict[str, Any] = {own: padded(inputs, key)[mask] for key, own in TOKEN_COLUMNS.items() if key in inputs}
    return AdvantageInputs(
        token_rewards=rewards[mask],
        rewards=rewards.sum(1),
        lengths=mask.sum(1),
        groups=group_indices([str(uid) for uid in inputs["uid"]]),
        infos=[{}] * len(mask) if baselines is None else [{"reward_baseline": float(b)} for b in baselines],
        **given,
    )


def _batch_samples(inputs: dict[str, Any], mask: Bools, rewards: Floats) -> list[Sample]:
    rows = zip(inputs["uid"], rewards.sum(1).tolist(), mask.tolist(), strict=True)
    return [Sample(index, str(uid), reward, on) for index, (uid, reward, on) in enumerate(rows)]


def _batch_differences(name: str, inputs: dict[str, Any], mask: Bools, rewards: Floats, case: Case) -> set[int]:
    """Which of the listed differences apply to this batch."""
    differences = set[int]()
    if name in GROUPS and any(len(group) == 1 for group in derived.by_task(_batch_samples(inputs, mask, rewards))):
        differences.add(6)
    if CONSTRUCTOR.get(name, {}).keys() - case.init_args.keys():
        differences.add(8)
    if name in ("ppo", "reinforceplusplus"):
        # a masked position is run through if it is between action tokens, or if it carries a reward or a value
        carries = (rewards != 0) | (padded(inputs, "values") != 0 if name == "ppo" else np.zeros(mask.shape, np.bool_))
        followed = np.flip(np.logical_or.accumulate(np.flip(mask, 1), 1), 1)
        discounts = name == "ppo" or case.init_args.get("gamma", 1.0) != 1
        through = ~mask & mask.any(1, keepdims=True) & ((followed & discounts) | carries)
        differences |= {5} if through.any() else set()
    return differences


@dataclasses.dataclass(slots=True)
class DerivedBatch:
    """What a function of padded batches gives, [B, T]."""

    advantages: Floats
    returns: Floats
    mask: Bools
    size: Any = 0.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


def _derived_batch(
    name: str,
    inputs: dict[str, Any],
    mask: Bools,
    rewards: Floats,
    case: Case,
    faults: derived.Faults,
    dense: bool = False,
) -> DerivedBatch:
    """`dense`: masked positions as that system leaves them."""
    a = case.init_args
    if name in ("ppo", "reinforceplusplus", "remax"):
        if name == "ppo":
            values, returns = tokens.gae(rewards, padded(inputs, "values"), mask, a, dense)
        elif name == "remax":
            values, returns = tokens.remax(rewards, floats(inputs["reward_baselines"]), mask, dense)
        else:
            values, returns = tokens.reinforce_plus_plus(rewards, mask, a, dense)
        return DerivedBatch(values, returns, mask)
    if name in ("on_policy_distill", "jsd"):
        of = tokens.jsd if name == "jsd" else tokens.on_policy_distill
        values = of(padded(inputs, "old_log_probs"), padded(inputs, "teacher_logprobs"), mask, a)
        label, coefficient = "jsd" if name == "jsd" else "kl", a.get("kl_coef", 1.0)
        sums = (-values.sum(1) / coefficient).tolist() if coefficient else [0.0]
        metrics = {"advantages/mean": float(values.sum(1).mean())}
        metrics |= {f"{label}/mean": derived.mean(sums), f"{label}/std": derived.std(sums)}
        return DerivedBatch(values, values, mask, metrics=metrics if dense else {})
    of_rows = "grpo" if name in ("clipb", "clipv") else name
    samples = _batch_samples(inputs, mask, rewards)
    rows = derived.ROWS[of_rows](samples, a, faults)
    size = floats([rows.sizes[b] for b in range(len(mask))])[:, None] * np.ones(mask.shape)
    if dense and name == "grpo":
        rows, size = _grpo_there(samples, a, faults), np.minimum(size, 1.0)
    values = floats([rows.values[b] for b in range(len(mask))])[:, None] * mask
    kept, metrics = mask, dict[str, float]()
    if name == "clipb":
        score = tokens.scores(padded(inputs, "rollout_log_probs"), padded(inputs, "entropys"))
        kept, metrics = tokens.clip_b(values, score, mask, a)
    elif name == "clipv":
        score = tokens.scores(padded(inputs, "old_log_probs"), padded(inputs, "entropys"))
        kept, metrics = tokens.clip_v(values, padded(inputs, "necs") - score, mask, a)
    return DerivedBatch(values, values, kept, size, metrics)


def _grpo_there(samples: Sequence[Sample], a: dict[str, Any], faults: derived.Faults) -> Derived:
    """That system takes the mean and std in float32 from the rewards in float64."""
    rows = derived.grpo(_in_float32(samples), a, faults)
    for group in derived.by_task(samples):
        top = derived.largest([row.reward for row in group])
        for row in group:
            lost = row.reward - float(np.float32(row.reward))
            rows.values[row.index] += lost * rows.sizes[row.index] / top if top else 0.0
    return rows
