"""Policy losses: pure functions (LossInputs, params) -> TokenLoss. None divides; formulas are cited on their params, in
`engines.algorithms.spec.losses`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Stat, TokenLoss, Unit, maximum, sequence_mean, token_mean
from engines.algorithms.spec import (
    Cispo,
    ClipCov,
    Gspo,
    ImportanceSampling,
    KlCov,
    OpmdLoss,
    PpoClip,
    RecLoss,
    Sapo,
    Sft,
    SftIs,
    SftPhi,
    Sppo,
    Topr,
)

MAX_LOG_RATIO = 20.0
"""PPO and importance sampling clamp the log ratio before exp, as verl and Trinity-RFT do."""
MAX_EXPONENT = 26.0
"""The other losses take ratios as they are, up to e^26: beyond, the square of a gradient may be inf in float32, and the
update lost. With a reward of 1e6 it is not."""


def log_ratio(x: LossInputs, bound: float = MAX_EXPONENT) -> Tensor:
    """[A] lp - old, within +-bound."""
    assert x.old_logprobs is not None
    return (x.logprobs - x.old_logprobs).clamp(-bound, bound)


def advantages(x: LossInputs) -> Tensor:
    """[A]."""
    assert x.advantages is not None
    return x.advantages


def ratio_stats(logs: Tensor) -> dict[str, Stat]:
    """What every loss with a ratio reports, of the [A] log ratios: policy/ratio_mean, policy/ratio_max, kl/policy."""
    ratio = logs.detach().exp()
    return {
        "policy/ratio_mean": token_mean(ratio),
        "policy/ratio_max": maximum(ratio),
        "kl/policy": token_mean(-logs),
    }


def fraction(condition: Tensor, like: Tensor) -> Stat:
    """Stat of the share of action tokens for which an [A] bool is true."""
    return token_mean(condition.to(like.dtype))


def ppo_clip(x: LossInputs, p: PpoClip) -> TokenLoss:
    """[A] clipped surrogate; see `PpoClip`."""
    advantage = advantages(x)
    logs = x.logprobs - x.logprobs.detach() if p.fallback_to_policy_gradient else log_ratio(x, MAX_LOG_RATIO)
    ratio = logs.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - p.low, 1 + p.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantage * p.clip_ratio_c
    negative = advantage < 0
    value = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    stats = {
        "policy/clip_fraction": fraction(clipped > unclipped, value),
        "policy/clip_fraction_lower": fraction(negative & (pessimistic > bound), value),
        **ratio_stats(logs),
    }
    if p.enable_sequence_masking:
        sequence_kl = x.sequence_mean(-logs.detach())
        masked = negative & (sequence_kl > p.delta_sequence_masking)[x.row_of_token]
        value = torch.where(masked, torch.zeros_like(value), value)
        stats["kl/sequence"] = sequence_mean(sequence_kl)
        stats["policy/sequence_masked_fraction"] = fraction(masked, value)
    return TokenLoss(value, stats=stats)


def clip_cov(x: LossInputs, p: ClipCov) -> TokenLoss:
    """[A] clipped surrogate without the selected tokens; see `ClipCov`."""
    assert x.selected is not None
    loss = ppo_clip(x, p)
    value = torch.where(x.selected, torch.zeros_like(loss.value), loss.value)
    return TokenLoss(value, stats=loss.stats | {"policy/selected_fraction": fraction(x.selected, value)})


def kl_cov(x: LossInputs, p: KlCov) -> TokenLoss:
    """[A] surrogate, with a KL penalty on the selected tokens; see `KlCov`."""
    assert x.selected is not None
    logs = log_ratio(x, MAX_LOG_RATIO)
    value = -advantages(x) * logs.exp()
    value = torch.where(x.selected, value + p.ppo_kl_coef * logs.abs(), value)
    stats = {"policy/selected_fraction": fraction(x.selected, value), **ratio_stats(logs)}
    return TokenLoss(value, stats=stats)


def gspo(x: LossInputs, p: Gspo) -> TokenLoss:
    """[A] clipped surrogate on the ratio of the sequence; see `Gspo`."""
    assert x.old_logprobs is not None
    advantage = advantages(x)
    sequence_logs = x.sequence_mean((x.logprobs - x.old_logprobs).detach()).clamp(max=MAX_EXPONENT)
    ratio = (x.logprobs - x.logprobs.detach() + sequence_logs[x.row_of_token]).exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - p.clip_range_low, 1 + p.clip_range_high)
    value = torch.maximum(unclipped, clipped)
    stats = {
        "policy/clip_fraction": fraction(clipped > unclipped, value),
        "kl/sequence": sequence_mean(-sequence_logs),
        **ratio_stats(log_ratio(x)),
    }
    return TokenLoss(value, stats=stats)


def cispo(x: LossInputs, p: Cispo) -> TokenLoss:
    """[A] policy gradient under a clipped weight; see `Cispo`."""
    advantage, logs = advantages(x), log_ratio(x)
    ratio = logs.detach().exp()
    value = -advantage * ratio.clamp(1 - p.clip_range_low, 1 + p.clip_range_high) * x.logprobs
    stats = {"policy/clip_fraction": fraction(ratio > 1 + p.clip_range_high, value), **ratio_stats(logs)}
    if p.enable_mask_clip:
        too_high = (ratio > 1 + p.mask_clip_range_high) & (advantage > 0)
        too_low = (ratio < 1 - p.mask_clip_range_low) & (advantage < 0)
        value = torch.where(too_high | too_low, torch.zeros_like(value), value)
        stats["policy/masked_fraction"] = fraction(too_high | too_low, value)
    return TokenLoss(value, stats=stats)


def sapo(x: LossInputs, p: Sapo) -> TokenLoss:
    """[A] softly gated surrogate; see `Sapo`."""
    advantage, logs = advantages(x), log_ratio(x)
    tau = torch.where(advantage > 0, logs.new_tensor(p.tau_pos), logs.new_tensor(p.tau_neg))
    gate = 4 / tau * torch.sigmoid(tau * (logs.exp() - 1))
    return TokenLoss(-advantage * gate, stats={"policy/gate_mean": token_mean(gate), **ratio_stats(logs)})


def topr(x: LossInputs, p: Topr) -> TokenLoss:
    """[A] policy gradient, tapered where the advantage is low; see `Topr`."""
    advantage, logs = advantages(x), log_ratio(x)
    taper = torch.where(advantage <= p.advantage_threshold, logs.detach().exp().clamp(0, 1), 1.0)
    stats = {"policy/taper_mean": token_mean(taper), **ratio_stats(logs)}
    return TokenLoss(-taper * advantage * x.logprobs, stats=stats)


def sppo(x: LossInputs, p: Sppo) -> TokenLoss:
    """[A] log-ratio surrogate within bounds; see `Sppo`."""
    assert x.old_logprobs is not None
    logs = x.logprobs - x.old_logprobs
    outside = logs.detach().abs() > math.log1p(p.epsilon)
    value = torch.where(outside, torch.zeros_like(logs), -advantages(x) * logs)
    return TokenLoss(value, stats={"policy/clip_fraction": fraction(outside, value), **ratio_stats(log_ratio(x))})


def opmd(x: LossInputs, p: OpmdLoss) -> TokenLoss:
    """[A] policy gradient, damped; see `OpmdLoss`."""
    return TokenLoss(-advantages(x) * x.logprobs / (1 + p.tau))


def importance_sampling(x: LossInputs, p: ImportanceSampling) -> TokenLoss:
    """[A] off-policy policy gradient; see `ImportanceSampling`."""
    del p
    logs = log_ratio(x, MAX_LOG_RATIO)
    return TokenLoss(-advantages(x) * logs.exp(), stats=ratio_stats(logs))


def rec(x: LossInputs, p: RecLoss) -> TokenLoss:
    """[A] weighted, gated policy gradient; see `RecLoss`."""
    assert x.old_logprobs is not None
    advantage, logs = advantages(x), log_ratio(x)
    ratio = logs.detach().exp()
    of_sequence = x.sequence_mean((x.logprobs - x.old_logprobs).detach()).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    sequence_ratio = of_sequence.exp()[x.row_of_token]
    passes = _rec_gate(sequence_ratio if p.clip_mode == "gspo-one-side" else ratio, advantage, p)
    weights = {
        "none": lambda: advantage,
        "importance_sampling": lambda: advantage * ratio,
        "gspo_importance_sampling": lambda: advantage * sequence_ratio,
        "advantage": lambda: advantage * (advantage / p.temp).clamp(max=MAX_LOG_RATIO).exp(),
    }
    value = -weights[p.weight]() * torch.where(passes, x.logprobs, torch.zeros_like(x.logprobs))
    if p.regularizer == "k2":
        value = value + p.regularizer_coef * (x.logprobs - x.old_logprobs).square()
    elif p.regularizer == "forward-kl":
        value = value - p.regularizer_coef * x.logprobs
    stats = {"policy/clip_fraction": fraction(~passes, value), **ratio_stats(logs)}
    if p.clip_mode == "gspo-one-side":
        return TokenLoss(x.sequence_mean(value), Unit.SEQUENCE, stats)
    return TokenLoss(value, stats=stats)


def _rec_gate(ratio: Tensor, advantage: Tensor, p: RecLoss) -> Tensor:
    """[A] bool."""
    below, above = ratio <= 1 + p.epsilon_high, ratio >= 1 - p.epsilon_low
    up, down = advantage >= 0, advantage <= 0
    match p.clip_mode:
        case "none":
            return torch.ones_like(up)
        case "two-side":
            return below & above
        case "ring":
            return (
                (below & above)
                | (up & (ratio <= 1 - p.epsilon_low_prime))
                | (down & (ratio >= 1 + p.epsilon_high_prime))
            )
        case _:
            return (below & up) | (above & down)


def sft(x: LossInputs, p: Sft) -> TokenLoss:
    """[A] negative logprob of the data."""
    del p
    return TokenLoss(-x.logprobs)


def sft_is(x: LossInputs, p: SftIs) -> TokenLoss:
    """[A] negative logprob, weighted by the probability; see `SftIs`."""
    del p
    return TokenLoss(-x.logprobs * x.logprobs.detach().exp())


def sft_phi(x: LossInputs, p: SftPhi) -> TokenLoss:
    """[A] negative logprob, weighted by p (1 - p); see `SftPhi`."""
    probs = x.logprobs.detach().exp()
    capped = x.logprobs.clamp(max=math.log(p.cutoff_prob)) if p.cutoff_prob < 1 else x.logprobs
    return TokenLoss(-capped * probs * (1 - probs))
