"""Entropy bonuses."""

from __future__ import annotations

import dataclasses

from engines.algorithms.inputs import LossInputs, Part, TokenLoss, token_mean
from engines.algorithms.spec import EntropyParams


def entropy_bonus(x: LossInputs, p: EntropyParams) -> TokenLoss:
    """[A] minus the entropy times the coefficient; the stat is without the coefficient."""
    assert x.entropies is not None
    return TokenLoss(-p.entropy_coef * x.entropies, stats={"policy/entropy": token_mean(x.entropies)})


def entropy_bonus_of_samples(x: LossInputs, p: EntropyParams) -> TokenLoss:
    """The same over the sampled rows."""
    return dataclasses.replace(entropy_bonus(x.part(Part.SAMPLED), p), part=Part.SAMPLED)
