"""Losses over pairs of a preferred and a refused response: rows 2k and 2k + 1 of a micro-batch. See `Dpo`."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from engines.algorithms.inputs import LossInputs, TokenLoss, Unit, pair_mean
from engines.algorithms.spec import Dpo


def dpo(x: LossInputs, p: Dpo) -> TokenLoss:
    """[B / 2] negative log-likelihood of the preference; see `Dpo`."""
    assert x.reference_logprobs is not None
    rewards = p.beta * x.sequence_sum(x.logprobs - x.reference_logprobs)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    value = -(1 - p.label_smoothing) * logsigmoid(margin) - p.label_smoothing * logsigmoid(-margin)
    stats = {
        "dpo/chosen_reward": pair_mean(chosen),
        "dpo/rejected_reward": pair_mean(rejected),
        "dpo/margin": pair_mean(margin),
        "dpo/accuracy": pair_mean((margin > 0).to(value.dtype)),
    }
    return TokenLoss(value, Unit.PAIR, stats)
