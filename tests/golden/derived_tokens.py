"""Advantages that differ from token to token, derived once more: plain loops in float64 over padded [B, T] arrays.

Nothing of `engines` is used here. `dense` is how the reference computes: through masked positions (difference 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.golden.derived_advantages import Args, mean, std
from tests.golden.format import Bools, Floats

WHITEN_EPSILON = 1e-8
NO_SPREAD = 1e-12


def columns(mask: Sequence[bool], dense: bool) -> list[int]:
    """The positions that count: action tokens, or all."""
    return [t for t, on in enumerate(mask) if on or dense]


def whitened(values: Floats, mask: Bools) -> Floats:
    """(x - mean) / sqrt(variance + 1e-8) of every position; mean and variance over the action tokens."""
    chosen = [float(value) for value in values[mask]]
    if len(chosen) < 2:
        return np.zeros(values.shape)
    return (values - mean(chosen)) / math.sqrt(std(chosen) ** 2 + WHITEN_EPSILON)


def gae(rewards: Floats, values: Floats, mask: Bools, a: Args, dense: bool = False) -> tuple[Floats, Floats]:
    """(advantages, returns). Schulman et al. 2015, arXiv:1506.02438, eq. 16; 0 outside the mask unless `dense`."""
    gamma, lam = a.get("gamma", 1.0), a.get("lam", 1.0)
    sums, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, row in enumerate(mask):
        following_value, following = 0.0, 0.0
        for t in reversed(columns(row.tolist(), dense)):
            delta = rewards[b, t] + gamma * following_value - values[b, t]
            following = delta + gamma * lam * following
            following_value = values[b, t]
            sums[b, t], returns[b, t] = following, following + values[b, t]
    advantages = whitened(sums, mask)
    return (advantages, returns) if dense else (advantages * mask, returns)


def reinforce_plus_plus(rewards: Floats, mask: Bools, a: Args, dense: bool = False) -> tuple[Floats, Floats]:
    """(advantages, returns). Hu 2025, arXiv:2501.03262: discounted rewards to go, whitened."""
    returns = np.zeros(mask.shape)
    for b, row in enumerate(mask):
        following = 0.0
        for t in reversed(columns(row.tolist(), dense)):
            following = rewards[b, t] + a.get("gamma", 1.0) * following
            returns[b, t] = following
    return whitened(returns, mask) * mask, returns


def remax(rewards: Floats, baselines: Floats, mask: Bools, dense: bool = False) -> tuple[Floats, Floats]:
    """(advantages, returns). Li et al. 2023, arXiv:2310.10505: rewards to go, less that of the greedy answer."""
    returns, advantages = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, row in enumerate(mask):
        following = 0.0
        for t in reversed(columns(row.tolist(), dense)):
            following += rewards[b, t] * row[t]
            returns[b, t], advantages[b, t] = following, following - baselines[b] * row[t]
    return advantages, returns


def on_policy_distill(old: Floats, teacher: Floats, mask: Bools, a: Args) -> Floats:
    """Agarwal et al. 2023, arXiv:2306.13649: less the reverse KL at the sampled token."""
    return a.get("kl_coef", 1.0) * (teacher - old) * mask


def jsd(old: Floats, teacher: Floats, mask: Bools, a: Args) -> Floats:
    """Agarwal et al. 2023, arXiv:2306.13649, eq. 1, at the sampled token: less b log(T / m) + (1 - b) log(s / m)."""
    share, temperature = a.get("lambda_coef", 0.5), a.get("temperature", 1.0)
    advantages = np.zeros(mask.shape)
    for b, t in zip(*np.nonzero(mask), strict=True):
        s, teach = float(old[b, t]) / temperature, float(teacher[b, t]) / temperature
        if share == 0:
            divergence = s - teach
        elif share == 1:
            divergence = teach - s
        else:
            top = max(s, teach)
            mixture = top + math.log((1 - share) * math.exp(s - top) + share * math.exp(teach - top))
            divergence = share * (teach - mixture) + (1 - share) * (s - mixture)
        advantages[b, t] = -a.get("kl_coef", 1.0) * divergence
    return advantages


def scores(logprobs: Floats, entropies: Floats) -> Floats:
    """p (H + log p). arXiv:2602.03392."""
    return np.exp(logprobs) * (entropies + logprobs)


def clip_b(values: Floats, score: Floats, mask: Bools, a: Args) -> tuple[Bools, dict[str, float]]:
    """(tokens that are kept, numbers): not those with A < 0 far below the batch's mean score."""
    chosen = [float(value) for value in score[mask]]
    centre, spread = mean(chosen), std(chosen, ddof=0)
    far = score - centre < -a.get("mu", 2.5) * spread
    kept = mask & ~(far & (values < 0) & (spread >= NO_SPREAD))
    return kept, {"ES": centre, "varS": spread**2} | _dropped(values, mask, kept)


def clip_v(values: Floats, shortfall: Floats, mask: Bools, a: Args) -> tuple[Bools, dict[str, float]]:
    """(tokens that are kept, numbers): those far below expectation go, all with A = 0, the worst with A < 0."""
    chosen = [float(value) for value in shortfall[mask]]
    spread, kept = std(chosen, ddof=0), mask.copy()
    cells = [(int(b), int(t)) for b, t in zip(*np.nonzero(mask), strict=True)]
    far = [cell for cell in cells if spread >= NO_SPREAD and shortfall[cell] > a.get("mu", 8.5) * spread]
    negative = sorted((cell for cell in far if values[cell] < 0), key=lambda cell: -shortfall[cell])
    most = max(int(a.get("max_frac", 1e-4) * len(cells)), 1)
    for cell in [cell for cell in far if values[cell] == 0] + negative[:most]:
        kept[cell] = False
    return kept, {"stdD": spread} | _dropped(values, mask, kept)


def _dropped(values: Floats, mask: Bools, kept: Bools) -> dict[str, float]:
    """Shares of the action tokens, of those with A > 0, and of those with A < 0."""

    def share(of: Any) -> float:
        return float((of & ~kept).sum()) / max(float(of.sum()), 1.0)

    signs = {"_pos": mask & (values > 0), "_neg": mask & (values < 0)}
    of_sign = {f"frac_clipped{sign}": share(of) if of.any() else 1.0 for sign, of in signs.items()}
    return {"frac_clipped": share(mask) if mask.any() else 1.0} | of_sign
