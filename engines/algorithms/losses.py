"""Policy losses: pure functions (LossInputs, params) -> TokenLoss. None divides; formulas are cited on their params."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Reduction, Stat, TokenLoss, token_mean
from engines.algorithms.spec import PpoClip, Sft

MAX_LOG_RATIO = 20.0
"""The log ratio is clamped before exp: one token at e^90 would make the loss inf and lose the update."""


def ppo_clip(x: LossInputs, p: PpoClip) -> TokenLoss:
    """[A] clipped surrogate; see `PpoClip`."""
    assert x.old_logprobs is not None
    assert x.advantages is not None
    old_logprobs = x.logprobs.detach() if p.fallback_to_policy_gradient else x.old_logprobs
    log_ratio = (x.logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - p.low, 1 + p.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -x.advantages * p.clip_ratio_c
    negative = x.advantages < 0
    value = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    stats = {
        "policy/clip_fraction": token_mean((clipped > unclipped).to(value.dtype)),
        "policy/clip_fraction_lower": token_mean((negative & (pessimistic > bound)).to(value.dtype)),
        "policy/ratio_mean": token_mean(ratio),
        "policy/ratio_max": Stat(ratio.detach().max(), Reduction.MAX),
        "kl/policy": token_mean(-log_ratio),
    }
    if p.enable_sequence_masking:
        masked = negative & _moved_away(x, log_ratio, p, stats)
        value = torch.where(masked, torch.zeros_like(value), value)
        stats["policy/sequence_masked_fraction"] = token_mean(masked.to(value.dtype))
    return TokenLoss(value, stats=stats)


def _moved_away(x: LossInputs, log_ratio: Tensor, p: PpoClip, stats: dict[str, Stat]) -> Tensor:
    """[A] True in sequences whose mean of old minus new logprob is above the limit."""
    sequence_kl = x.sequence_mean(-log_ratio.detach())
    stats["kl/sequence"] = Stat(sequence_kl.sum(), Reduction.SEQUENCE_MEAN)
    return (sequence_kl > p.delta_sequence_masking)[x.row_of_token]


def sft(x: LossInputs, p: Sft) -> TokenLoss:
    """[A] negative logprob of the data."""
    del p
    return TokenLoss(-x.logprobs)
