"""Entropy bonus."""

from __future__ import annotations

from engines.algorithms.inputs import LossInputs, TokenLoss, token_mean
from engines.algorithms.spec import EntropyBonus


def entropy_bonus(x: LossInputs, p: EntropyBonus) -> TokenLoss:
    """[A] minus the entropy times the coefficient; the stat is without the coefficient."""
    assert x.entropies is not None
    return TokenLoss(-p.entropy_coef * x.entropies, stats={"policy/entropy": token_mean(x.entropies)})
