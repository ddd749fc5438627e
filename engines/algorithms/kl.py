"""KL divergence to the reference model, estimated on sampled tokens. Schulman 2020, http://joschu.net/blog/kl-approx.html.

With d = logprob - reference logprob of the sampled token: k1 = d and k3 = exp(-d) - 1 + d are unbiased as values, k2 =
d^2 / 2 is not. As losses their gradients differ: k2 gives the exact gradient of KL(policy || reference) in expectation
over on-policy samples, k3 that of KL(reference || policy), k1 gives 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, TokenLoss, token_mean
from engines.algorithms.spec import KlInLoss


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased, can be negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative."""
    d = logprobs - reference
    return torch.exp(-d) - 1 + d


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 with d within +-20 and the result within +-10 (verl 0.9.1, core_algos.kl_penalty)."""
    minus_d = (reference - logprobs).clamp(-20, 20)
    return (minus_d.exp() - 1 - minus_d).clamp(-10, 10)


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|."""
    return (logprobs - reference).abs()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
}


def kl_in_loss(x: LossInputs, p: KlInLoss) -> TokenLoss:
    """[A] estimate times the coefficient; the stat is without the coefficient."""
    assert x.reference_logprobs is not None
    divergence = ESTIMATORS[p.name](x.logprobs, x.reference_logprobs)
    return TokenLoss(p.kl_coef * divergence, stats={"kl/reference": token_mean(divergence)})
