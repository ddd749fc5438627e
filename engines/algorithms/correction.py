"""Weights for the difference between sampler and trainer. See `RolloutCorrection`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Part, Stat, TokenLoss, Unit, maximum, token_mean
from engines.algorithms.losses import MAX_LOG_RATIO
from engines.algorithms.spec import RolloutCorrection


def corrected(loss: TokenLoss, rows: LossInputs, p: RolloutCorrection) -> TokenLoss:
    """The loss with each token, or row, weighted; `rows` are those of its part. What an expert wrote has no sampler."""
    if loss.part is Part.EXPERT:
        return loss
    weight, stats = weights(rows, p)
    if loss.unit is not Unit.TOKEN:  # then the level is one of rows: `Algorithm` sees to it
        weight = rows.sequence_mean(weight)
    return dataclasses.replace(loss, value=weight * loss.value, stats=loss.stats | stats)


def weights(x: LossInputs, p: RolloutCorrection) -> tuple[Tensor, dict[str, Stat]]:
    """[A] detached weights of the tokens, and their stats."""
    assert x.old_logprobs is not None
    assert x.rollout_logprobs is not None
    logs = x.old_logprobs - x.rollout_logprobs
    if p.level == "sequence":
        logs = x.sequence_sum(logs)[x.row_of_token]
    elif p.level == "geometric":
        logs = x.sequence_mean(logs)[x.row_of_token]
    ratio = logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    beyond = (ratio > p.cap) | (ratio < p.floor)
    match p.name:
        case "truncate":
            weight = ratio.clamp(max=p.cap)
            beyond = ratio > p.cap
        case "mask":
            weight = torch.where(beyond, torch.zeros_like(ratio), ratio)
        case "full":
            weight, beyond = ratio, torch.zeros_like(beyond)
    stats = {
        "rollout/kl": token_mean(x.rollout_logprobs - x.old_logprobs),
        "rollout/weight_mean": token_mean(weight),
        "rollout/ratio_max": maximum(ratio),
        "rollout/beyond_fraction": token_mean(beyond.to(weight.dtype)),
    }
    return weight.detach(), stats
