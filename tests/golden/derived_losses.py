"""Policy losses, KL estimates and aggregation, once more from their papers: plain loops in float64, slopes by hand.

Nothing of `engines` is used here. A token has a value and a slope, d value / d logprob; a row weighs its tokens. What
carries `_of_that_system` is not from a paper: it is how the reference system computes, where that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Token = tuple[float, float]
"""(value, slope)."""
Args = dict[str, Any]
EPSILON = 1e-8
"""What the reference system adds to denominators."""


@dataclass(slots=True)
class Tokens:
    """The action tokens of one row; a list is empty if the loss has no use for it."""

    logprob: list[float]
    old: list[float] = field(default_factory=list[float])
    advantage: list[float] = field(default_factory=list[float])
    reference: list[float] = field(default_factory=list[float])

    @property
    def log_ratios(self) -> list[float]:
        """lp - old."""
        return [lp - old for lp, old in zip(self.logprob, self.old, strict=True)]

    @property
    def mean_log_ratio(self) -> float:
        """Over the row."""
        return sum(self.log_ratios) / max(len(self.logprob), 1)


def within(x: float, low: float, high: float) -> float:
    """x, or the bound that it is beyond."""
    return min(max(x, low), high)


def ratio_20(d: float) -> Token:
    """exp(d) with d within +-20, and its slope."""
    r = math.exp(within(d, -20, 20))
    return r, r if abs(d) <= 20 else 0.0


def ppo(row: Tokens, a: Args) -> list[Token]:
    """Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; sequence
    masking: DeepSeek-V3.2, arXiv:2512.02556.
    """
    clip = a.get("clip_range", 0.2)
    low, high = (clip if a.get(f"clip_range_{side}") is None else a[f"clip_range_{side}"] for side in ("low", "high"))
    fallback = a.get("fallback_to_policy_gradient", False)
    masked = a.get("enable_sequence_masking", False) and not fallback
    drift = -sum(within(d, -20, 20) for d in row.log_ratios) / max(len(row.logprob), 1)
    tokens: list[Token] = []
    for d, adv in zip(row.log_ratios, row.advantage, strict=True):
        r, slope = (1.0, 1.0) if fallback else ratio_20(d)
        value, slope = -adv * r, -adv * slope
        clipped = -adv * within(r, 1 - low, 1 + high)
        if clipped > value:
            value, slope = clipped, 0.0
        if adv < 0 and value > -adv * a.get("clip_ratio_c", 3.0):
            value, slope = -adv * a.get("clip_ratio_c", 3.0), 0.0
        if masked and adv < 0 and drift > a.get("delta_sequence_masking", 0.1):
            value, slope = 0.0, 0.0
        tokens.append((value, slope))
    return tokens


def ppo_masked_of_that_system(drift: float, advantages: Sequence[float], a: Args) -> int:
    """Tokens that sequence masking leaves out, as counted there: of all positions of a row, masked ones included."""
    far = drift > a.get("delta_sequence_masking", 0.1)
    return sum(far and adv < 0 for adv in advantages)


def gspo(row: Tokens, a: Args) -> list[Token]:
    """Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 9: s = exp(mean(lp - old)), each token with its own gradient."""
    both = a.get("clip_range")
    low = a.get("clip_range_low", 3e-4 if both is None else both)
    high = a.get("clip_range_high", 4e-4 if both is None else both)
    s, tokens = math.exp(row.mean_log_ratio), list[Token]()
    for adv in row.advantage:
        clipped = -adv * within(s, 1 - low, 1 + high)
        tokens.append((clipped, 0.0) if clipped > -adv * s else (-adv * s, -adv * s))
    return tokens


def cispo(row: Tokens, a: Args) -> list[Token]:
    """MiniMax 2025, arXiv:2506.13585, 3.1, with its token mask."""
    low, high = a.get("clip_range_low", 1.0), a.get("clip_range_high", 0.28)
    mask_low, mask_high = a.get("mask_clip_range_low", 1.0), a.get("mask_clip_range_high", 0.28)
    tokens: list[Token] = []
    for lp, d, adv in zip(row.logprob, row.log_ratios, row.advantage, strict=True):
        r = math.exp(d)
        weight = -adv * within(r, 1 - low, 1 + high)
        beyond = (r > 1 + mask_high and adv > 0) or (r < 1 - mask_low and adv < 0)
        weight = 0.0 if a.get("enable_mask_clip", False) and beyond else weight
        tokens.append((weight * lp, weight))
    return tokens


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _sapo_gate(r: float, adv: float, a: Args) -> tuple[float, float]:
    """(tau, sigmoid(tau (r - 1)))."""
    tau = a.get("tau_pos", 1.0) if adv > 0 else a.get("tau_neg", 1.05)
    return tau, _sigmoid(tau * (r - 1))


def sapo(row: Tokens, a: Args) -> list[Token]:
    """Gao et al. 2025, arXiv:2511.20347, eq. 5: -A 4 / tau s, s = sigmoid(tau (r - 1)), slope -A 4 s (1 - s) r."""
    tokens: list[Token] = []
    for d, adv in zip(row.log_ratios, row.advantage, strict=True):
        r = math.exp(d)
        tau, s = _sapo_gate(r, adv, a)
        tokens.append((-adv * 4 / tau * s, -adv * 4 * s * (1 - s) * r))
    return tokens


def sapo_of_that_system(row: Tokens, a: Args) -> list[Token]:
    """Difference 3: the gate is detached and weighs the logprob."""
    tokens: list[Token] = []
    for lp, d, adv in zip(row.logprob, row.log_ratios, row.advantage, strict=True):
        tau, s = _sapo_gate(math.exp(d), adv, a)
        tokens.append((-adv * 4 / tau * s * lp, -adv * 4 / tau * s))
    return tokens


def topr(row: Tokens, a: Args) -> list[Token]:
    """Le Roux et al. 2025, arXiv:2503.14286, with the ratio of the token: r within 0 and 1 where A is low."""
    tokens: list[Token] = []
    for lp, d, adv in zip(row.logprob, row.log_ratios, row.advantage, strict=True):
        taper = within(math.exp(d), 0, 1) if adv <= a.get("advantage_threshold", 0.0) else 1.0
        tokens.append((-taper * adv * lp, -taper * adv))
    return tokens


def sppo(row: Tokens, a: Args) -> list[Token]:
    """Trinity-RFT's simplified PPO: -A (lp - old) where 1 / (1 + epsilon) <= r <= 1 + epsilon."""
    bound = 1 + a.get("epsilon", 0.3)
    tokens: list[Token] = []
    for d, adv in zip(row.log_ratios, row.advantage, strict=True):
        inside = 1 / bound <= math.exp(d) <= bound
        tokens.append((-adv * d, -adv) if inside else (0.0, 0.0))
    return tokens


def opmd(row: Tokens, a: Args) -> list[Token]:
    """Kimi 2025, arXiv:2501.12599, eq. 3: -A lp over 1 + tau."""
    scale = -1 / (1 + a.get("tau", 1.0))
    return [(scale * adv * lp, scale * adv) for lp, adv in zip(row.logprob, row.advantage, strict=True)]


def importance_sampling(row: Tokens, a: Args) -> list[Token]:
    """-A r, the off-policy policy gradient (Degris et al. 2012, arXiv:1205.4839)."""
    del a
    tokens = [ratio_20(d) for d in row.log_ratios]
    return [(-adv * r, -adv * slope) for (r, slope), adv in zip(tokens, row.advantage, strict=True)]


def rec(row: Tokens, a: Args) -> list[Token]:
    """Yao et al. 2025, arXiv:2509.24203: weight, gate and regulariser of the policy gradient."""
    sequence, temp, coef = math.exp(row.mean_log_ratio), a.get("temp", 1.0), a.get("regularizer_coef", 0.0)
    tokens: list[Token] = []
    for lp, d, adv in zip(row.logprob, row.log_ratios, row.advantage, strict=True):
        r = math.exp(d)
        match a.get("weight", "none"):
            case "importance_sampling":
                weight = adv * r
            case "gspo_importance_sampling":
                weight = adv * sequence
            case "advantage":
                weight = adv * math.exp(adv / temp)
            case _:
                weight = adv
        if not _rec_passes(sequence if a.get("clip_mode") == "gspo-one-side" else r, adv, a):
            weight = 0.0
        value, slope = -weight * lp, -weight
        if a.get("regularizer") == "k2":
            value, slope = value + coef * d * d, slope + 2 * coef * d
        elif a.get("regularizer") == "forward-kl":
            value, slope = value - coef * lp, slope - coef
        tokens.append((value, slope))
    return tokens


def _rec_passes(r: float, adv: float, a: Args) -> bool:
    low, high = 1 - a.get("epsilon_low", 0.2), 1 + a.get("epsilon_high", 0.2)
    match a.get("clip_mode", "none"):
        case "none":
            return True
        case "two-side":
            return low <= r <= high
        case "ring":
            below, above = 1 - a.get("epsilon_low_prime", 0.6), 1 + a.get("epsilon_high_prime", 2.0)
            return low <= r <= high or (adv >= 0 and r <= below) or (adv <= 0 and r >= above)
        case _:
            return (adv >= 0 and r <= high) or (adv <= 0 and r >= low)


def sft(row: Tokens, a: Args) -> list[Token]:
    """Negative log-likelihood."""
    del a
    return [(-lp, -1.0) for lp in row.logprob]


def sft_is(row: Tokens, a: Args) -> list[Token]:
    """Wu et al. 2025, arXiv:2508.05629, eq. 9: weighted by the probability, which is constant."""
    del a
    return [(-lp * math.exp(lp), -math.exp(lp)) for lp in row.logprob]


def sft_phi(row: Tokens, a: Args) -> list[Token]:
    """Zhang et al. 2025 (CHORD), arXiv:2508.11408, eq. 6: weighted by p (1 - p); nothing beyond the cutoff."""
    cap = math.log(a["cutoff_prob"]) if a.get("cutoff_prob", 1.0) < 1 else math.inf
    weights = [math.exp(lp) * (1 - math.exp(lp)) for lp in row.logprob]
    return [(-min(lp, cap) * w, -w if lp <= cap else 0.0) for lp, w in zip(row.logprob, weights, strict=True)]


LOSSES: dict[str, Callable[[Tokens, Args], list[Token]]] = {
    **{"ppo": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "topr": topr, "sppo": sppo, "opmd": opmd, "rec": rec},
    **{"importance_sampling": importance_sampling, "sft": sft, "sft_is": sft_is, "sft_phi": sft_phi},
}


def kl(name: str, row: Tokens) -> list[Token]:
    """Schulman 2020, http://joschu.net/blog/kl-approx.html, d = lp - reference; corrected_k3 weighs k3 with the ratio r
    to old, at most 2, and has the gradient of both factors, r (1 - exp(-d)) + r (exp(-d) - 1 + d) = r d: what is
    expected over tokens of the old policy is the KL, and its slope is that of the KL (difference 13: our choice).
    """
    tokens: list[Token] = []
    for index, (lp, reference) in enumerate(zip(row.logprob, row.reference, strict=True)):
        d = lp - reference
        match name:
            case "none":
                tokens.append((0.0, 0.0))
            case "k1":
                tokens.append((d, 1.0))
            case "abs":
                tokens.append((abs(d), float((d > 0) - (d < 0))))
            case "k2":
                tokens.append((d * d / 2, d))
            case "k3":
                tokens.append((math.exp(-d) - 1 + d, 1 - math.exp(-d)))
            case "low_var_kl":
                minus_d = within(-d, -20, 20)
                value = math.exp(minus_d) - 1 - minus_d
                moves = abs(d) <= 20 and value <= 10
                tokens.append((min(value, 10.0), 1 - math.exp(minus_d) if moves else 0.0))
            case "corrected_k3":
                k3, ratio = math.exp(-d) - 1 + d, math.exp(lp - row.old[index]) if row.old else 1.0
                slope = ratio * d if row.old and ratio <= 2 else min(ratio, 2.0) * (1 - math.exp(-d))
                tokens.append((k3 * min(ratio, 2.0), slope))
            case _:
                raise ValueError(f"no derivation of the KL estimator {name!r}")
    return tokens


def kl_size(row: Tokens) -> float:
    """Largest number that cancels in an estimate of the row: what rounding may leave is a share of it."""
    return max((math.exp(abs(lp - ref)) for lp, ref in zip(row.logprob, row.reference, strict=True)), default=0.0)


def row_weights(lengths: Sequence[int], width: int, mode: str, of_that_system: bool = False) -> list[float]:
    """[B] what each token of a row is multiplied with. Dr. GRPO, arXiv:2503.20783; DAPO, arXiv:2503.14476, 3.3.

    Difference 4: that system counts rows without tokens, and adds 1e-8 to what it divides by.
    """
    epsilon = EPSILON if of_that_system else 0.0
    num_rows = len(lengths) if of_that_system else sum(length > 0 for length in lengths)
    match mode:
        case "token-mean":
            weight = [1 / (sum(lengths) + epsilon) if sum(lengths) else 0.0] * len(lengths)
        case "seq-mean-token-sum":
            weight = [1 / max(num_rows, 1)] * len(lengths)
        case "seq-mean-token-mean":
            weight = [1 / max(num_rows, 1) / (length + epsilon) if length else 0.0 for length in lengths]
        case "seq-mean-token-sum-norm":
            weight = [1 / (width + epsilon)] * len(lengths)
        case _:
            raise ValueError(f"no derivation of the aggregation {mode!r}")
    return weight


def dpo(rows: Sequence[Tokens], a: Args, of_that_system: bool = False) -> tuple[float, list[float], list[float]]:
    """(mean loss, [B] slope of each token of a row, [P] losses). Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label
    smoothing: Mitchell 2023, cDPO. Rows 2k and 2k + 1 are preferred and refused.

    Difference 2: that system sums the margins of all pairs before the sigmoid.
    """
    beta, smooth = a.get("beta", 0.1), a.get("label_smoothing", 0.0)
    rewards = [beta * sum(lp - ref for lp, ref in zip(row.logprob, row.reference, strict=True)) for row in rows]
    margins = [rewards[k] - rewards[k + 1] for k in range(0, len(rows), 2)]
    if of_that_system:
        margins = [sum(margins)]
    losses = [(1 - smooth) * _softplus(-x) + smooth * _softplus(x) for x in margins]
    slopes = [beta * (smooth - 1 + _sigmoid(x)) / len(margins) for x in margins]
    per_row = [slopes[0 if of_that_system else k // 2] * (1 if k % 2 == 0 else -1) for k in range(len(rows))]
    return sum(losses) / max(len(losses), 1), per_row, losses


def _softplus(x: float) -> float:
    """log(1 + exp(x))."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def chord_mu(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """CHORD, arXiv:2508.11408, eq. 4: up within `warmup` steps, down on a cosine within `decay`."""
    if step < warmup:
        return peak * step / warmup
    share = (step - warmup) / decay if decay else 1.0
    return valley if share >= 1 else valley + (peak - valley) * (1 + math.cos(math.pi * share)) / 2
