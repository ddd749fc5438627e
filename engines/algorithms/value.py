"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.algorithms.inputs import TokenLoss, token_mean


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> TokenLoss:
    """[A] max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2. verl 0.9.1, core_algos.compute_value_loss; Schulman's
    PPO2 baseline. All [A]; `values` carry the gradient.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - clip_range), old_values + clip_range)
    plain_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    stats = {
        "critic/value_mean": token_mean(values),
        "critic/clip_fraction": token_mean((clipped_loss > plain_loss).to(values.dtype)),
    }
    return TokenLoss(0.5 * torch.maximum(plain_loss, clipped_loss), stats=stats)
