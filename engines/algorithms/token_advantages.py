"""Advantages that differ from token to token, on the host in float64. Torch-free.

Only action tokens exist here: what a tool or the environment wrote between them is skipped, so it neither carries
values nor discounts. Formulas are cited on the params, in `engines.algorithms.spec.advantages`.
"""

from __future__ import annotations

import math

import numpy as np

from engines.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    Bools,
    Float64s,
    centred,
    group_stats,
    normalised,
)
from engines.algorithms.spec import ClipB, ClipV, Gae, Jsd, OnPolicyDistill, ReinforcePlusPlus, Remax

MAX_EXPONENT = 20.0
"""Largest log ratio of teacher to student that counts in the forward KL."""
WHITEN_EPSILON = 1e-8
"""Added to the variance, as verl and Trinity-RFT do."""
NO_SPREAD = 1e-12
"""Scores with a smaller standard deviation are equal: clipb and clipv drop none."""
ROUNDING = 1e-9
"""Relative spread below which returns are equal: they are sums that were rounded."""


def gae(x: AdvantageInputs, p: Gae) -> Advantages:
    """Generalised advantage estimates, whitened, and returns for the critic; see `Gae`."""
    assert x.values is not None
    bootstrap = np.zeros(len(x.lengths)) if x.bootstrap is None else x.bootstrap
    following = np.append(x.values[1:], 0.0)
    last = x.starts + x.lengths - 1
    trained = x.lengths > 0
    following[last[trained]] = bootstrap[trained]
    deltas = x.token_rewards + p.gamma * following - x.values
    values = _discounted(x, deltas, p.gamma * p.lam)
    returns = values + x.values
    stats = {"critic/returns_mean": _mean(returns), "critic/explained_variance": _explained(returns, x.values)}
    return Advantages(_whitened(values), returns=returns, stats=stats)


def reinforce_plus_plus(x: AdvantageInputs, p: ReinforcePlusPlus) -> Advantages:
    """Discounted returns, whitened; see `ReinforcePlusPlus`."""
    returns = _discounted(x, x.token_rewards, p.gamma)
    return Advantages(_whitened(returns), returns=returns)


def remax(x: AdvantageInputs, p: Remax) -> Advantages:
    """Rewards to go, less the greedy answer's; see `Remax`.

    Raises ValueError if a row has no `info.reward_baseline`.
    """
    del p
    missing = [row for row, info in enumerate(x.infos) if info.get("reward_baseline") is None]
    if missing:
        raise ValueError(
            f"row {missing[0]} has no info.reward_baseline, the reward of the greedy answer to its task; the explorer "
            "of mode both writes it, other writers must"
        )
    baselines = np.array([float(info["reward_baseline"]) for info in x.infos])
    returns = _discounted(x, x.token_rewards, 1.0)
    stats = {"data/reward_baseline_mean": _mean(baselines)}
    return Advantages(returns - x.spread(baselines), returns=returns, stats=stats)


def on_policy_distill(x: AdvantageInputs, p: OnPolicyDistill) -> Advantages:
    """Teacher less student; see `OnPolicyDistill`."""
    assert x.teacher_logprobs is not None
    assert x.old_logprobs is not None
    divergence = x.old_logprobs - x.teacher_logprobs
    return Advantages(-p.kl_coef * divergence, stats={"kl/teacher": _mean(divergence)})


def jsd(x: AdvantageInputs, p: Jsd) -> Advantages:
    """Away from where the student is above the mixture; see `Jsd`."""
    assert x.teacher_logprobs is not None
    assert x.old_logprobs is not None
    student, teacher, share = x.old_logprobs / p.temperature, x.teacher_logprobs / p.temperature, p.lambda_coef
    if p.exact_gradient:
        cost, measured = _exact_cost(student, teacher, share), _divergence_estimate(teacher - student, share)
    else:
        cost = measured = _divergence_at_token(student, teacher, share)
    stats = {"distill/jsd": _mean(measured), "kl/teacher": _mean(x.old_logprobs - x.teacher_logprobs)}
    return Advantages(-p.kl_coef * cost, stats=stats)


def _mixture(student: Float64s, teacher: Float64s, share: float) -> Float64s:
    """[N] logprobs under the mixture, 0 < share < 1."""
    return np.logaddexp(student + np.log1p(-share), teacher + np.log(share))


def _exact_cost(student: Float64s, teacher: Float64s, share: float) -> Float64s:
    """[N] whose policy gradient is that of the divergence."""
    if share == 0:
        return student - teacher
    if share == 1:
        return 1 - np.exp(np.minimum(teacher - student, MAX_EXPONENT))
    return (1 - share) * (student - _mixture(student, teacher, share))


def _divergence_at_token(student: Float64s, teacher: Float64s, share: float) -> Float64s:
    """[N] J of the reference system; see `Jsd.exact_gradient`."""
    if share in (0, 1):
        return student - teacher if share == 0 else teacher - student
    mixture = _mixture(student, teacher, share)
    return share * (teacher - mixture) + (1 - share) * (student - mixture)


def _divergence_estimate(log_ratio: Float64s, share: float) -> Float64s:
    """[N] f(r), r = exp(teacher - student): its mean over samples of the student estimates the divergence.

    The generator f of the f-divergence, convex with f(1) = f'(1) = 0: never negative, and 0 only where the two agree.
    """
    log_r = np.minimum(log_ratio, MAX_EXPONENT)
    r = np.exp(log_r)
    if share == 0:
        return r - 1 - log_r
    if share == 1:
        return r * log_r - (r - 1)
    mixture = 1 + share * (r - 1)
    return share * r * log_r - mixture * np.log(mixture)


def clip_b(x: AdvantageInputs, p: ClipB) -> Advantages:
    """GRPO without the tokens of a score far below the batch's; see `ClipB`."""
    assert x.rollout_logprobs is not None
    values = x.spread(normalised(x.rewards, x.groups, p.epsilon)[0])
    scores = _scores(x, x.rollout_logprobs)
    centred, spread = scores - _mean(scores), _std(scores)
    dropped = (values < 0) & (centred < -p.mu * spread) & (spread >= NO_SPREAD)
    stats = group_stats(x) | {"clip/score_mean": _mean(scores), "clip/score_std": spread}
    return Advantages(values, kept_tokens=~dropped, stats=stats | _dropped_share(dropped))


def clip_v(x: AdvantageInputs, p: ClipV) -> Advantages:
    """GRPO without the tokens of a score far below what was to be expected; see `ClipV`."""
    assert x.old_logprobs is not None
    assert x.expected_scores is not None
    values = x.spread(normalised(x.rewards, x.groups, p.epsilon)[0])
    shortfall = x.expected_scores - _scores(x, x.old_logprobs)
    spread = _std(shortfall)
    far = (shortfall > p.mu * spread) & (spread >= NO_SPREAD)
    dropped, candidates = far & (values == 0), np.flatnonzero(far & (values < 0))
    most = max(int(p.max_frac * len(values)), 1)
    dropped[candidates[np.argsort(-shortfall[candidates], kind="stable")[:most]]] = True
    stats = group_stats(x) | {"clip/shortfall_std": spread}
    return Advantages(values, kept_tokens=~dropped, stats=stats | _dropped_share(dropped))


def _scores(x: AdvantageInputs, logprobs: Float64s) -> Float64s:
    """[N] p (H + log p): how much entropy an update of the token takes away."""
    assert x.entropies is not None
    return np.exp(logprobs) * (x.entropies + logprobs)


def _dropped_share(dropped: Bools) -> dict[str, float]:
    return {"clip/dropped_share": _mean(dropped.astype(np.float64))}


def _discounted(x: AdvantageInputs, values: Float64s, factor: float) -> Float64s:
    """[N] sum of what follows in the row, each token discounted by `factor`."""
    sums = values.copy()
    for start, length in zip(x.starts, x.lengths, strict=True):
        following = 0.0
        for index in range(start + length - 1, start - 1, -1):
            following = values[index] + factor * following
            sums[index] = following
    return sums


def _whitened(values: Float64s) -> Float64s:
    """Mean 0 and sample variance 1 over all action tokens; a single token has nothing to be compared with."""
    variance = float(values.var(ddof=1)) if len(values) > 1 else 0.0
    return centred(values, math.sqrt(variance + WHITEN_EPSILON))


def _mean(values: Float64s) -> float:
    return float(values.mean()) if len(values) else 0.0


def _std(values: Float64s) -> float:
    """Population standard deviation."""
    return float(values.std()) if len(values) else 0.0


def _explained(returns: Float64s, values: Float64s) -> float:
    """1 - var(returns - values) / var(returns); 0 where the returns vary by no more than roundings."""
    if not len(returns) or returns.std() <= ROUNDING * np.abs(returns).max():
        return 0.0
    return 1 - float((returns - values).var() / returns.var())
