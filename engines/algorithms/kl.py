"""KL divergence to the reference model, estimated at sampled tokens, in the loss or in the reward; fixed or adapted.

Which estimator is right where, and why: the table in `engines.algorithms.spec.terms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Part, TokenLoss, token_mean
from engines.algorithms.spec import KlInLoss, KlParams

MAX_CORRECTION = 2.0
"""Largest ratio by which corrected_k3 weighs a token."""
MAX_EXPONENT = 40.0
"""k3 is flat where the reference is e^40 times likelier: one such token would make loss and gradient norm inf."""
MAX_ADAPTATION = 0.2
"""Largest relative error that moves an adaptive coefficient."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased, can be negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative."""
    d = (logprobs - reference).clamp(min=-MAX_EXPONENT)
    return torch.exp(-d) - 1 + d


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 with d within +-20 and the result within +-10 (verl 0.9.1, core_algos.kl_penalty)."""
    minus_d = (reference - logprobs).clamp(-20, 20)
    return (minus_d.exp() - 1 - minus_d).clamp(-10, 10)


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|."""
    return (logprobs - reference).abs()


def corrected_k3(logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """k3 times the ratio to the old policy, at most 2; the gradient runs through the ratio too.

    So the expectation over tokens of the old policy is KL(policy, reference), and its gradient is that of this KL.
    """
    return k3(logprobs, reference) * (logprobs - old).clamp(max=math.log(MAX_CORRECTION)).exp()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
}


def estimate(name: str, logprobs: Tensor, reference: Tensor, old: Tensor | None) -> Tensor:
    """[A] estimates; `old` is read by corrected_k3 alone, which is k3 without it."""
    if name == "corrected_k3":
        return k3(logprobs, reference) if old is None else corrected_k3(logprobs, reference, old)
    return ESTIMATORS[name](logprobs, reference)


def kl_in_loss(x: LossInputs, p: KlInLoss) -> TokenLoss:
    """[A] estimate times the coefficient, of the sampled rows: what an expert wrote is no sample of the policy.

    The stat is without the coefficient.
    """
    sampled = x.part(Part.SAMPLED)
    assert sampled.reference_logprobs is not None
    divergence = estimate(p.name, sampled.logprobs, sampled.reference_logprobs, sampled.old_logprobs)
    return TokenLoss(p.kl_coef * divergence, stats={"kl/reference": token_mean(divergence)}, part=Part.SAMPLED)


def penalty(name: str, old: Tensor, reference: Tensor) -> Tensor:
    """[N] estimates that are taken off the rewards, of the policy that sampled: its ratio to itself is 1."""
    return estimate(name, old, reference, None)


def adapted(coefficient: float, p: KlParams, measured: float, num_rows: int) -> float:
    """The coefficient of the next step, after one with `num_rows` rows at this KL; see `KlParams`."""
    assert p.target_kl is not None
    assert p.horizon is not None
    error = min(max(measured / p.target_kl - 1, -MAX_ADAPTATION), MAX_ADAPTATION)
    return coefficient * (1 + error * num_rows / p.horizon)
