"""Binds params to functions, by type, and adds up the terms of a loss. Owns: which function a params class means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engines.algorithms.advantages import AdvantageInputs, Advantages, grpo
from engines.algorithms.entropy import entropy_bonus
from engines.algorithms.inputs import LossInputs, Reduction, Stat, TokenLoss
from engines.algorithms.kl import kl_in_loss
from engines.algorithms.losses import ppo_clip, sft
from engines.algorithms.reduce import Counts, aggregate
from engines.algorithms.spec import Algorithm, EntropyBonus, Grpo, KlInLoss, PpoClip, Sft

ADVANTAGES: dict[type, Callable[[AdvantageInputs, Any], Advantages]] = {Grpo: grpo}
LOSSES: dict[type, Callable[[LossInputs, Any], TokenLoss]] = {PpoClip: ppo_clip, Sft: sft}
KL_TERMS: dict[type, Callable[[LossInputs, Any], TokenLoss]] = {KlInLoss: kl_in_loss}
ENTROPY_TERMS: dict[type, Callable[[LossInputs, Any], TokenLoss]] = {EntropyBonus: entropy_bonus}


def advantage_fn(algorithm: Algorithm) -> Callable[[AdvantageInputs], Advantages] | None:
    """The advantage function with its parameters; None if the algorithm has no advantages."""
    params = algorithm.advantage
    if params is None:
        return None
    function = ADVANTAGES[type(params)]
    return lambda inputs: function(inputs, params)


def total_loss(algorithm: Algorithm, x: LossInputs, counts: Counts) -> tuple[Tensor, dict[str, Stat]]:
    """This micro-batch's share of the update's loss, and its stats. Shares of all micro-batches add up."""
    terms = {"loss/policy": LOSSES[type(algorithm.loss)](x, algorithm.loss)}
    if "reference" in algorithm.needs:
        terms["loss/kl"] = KL_TERMS[type(algorithm.kl)](x, algorithm.kl)
    if "entropy" in algorithm.needs:
        terms["loss/entropy"] = ENTROPY_TERMS[type(algorithm.entropy)](x, algorithm.entropy)
    shares = {key: aggregate(term, x, algorithm.aggregation, counts) for key, term in terms.items()}
    total = sum(shares.values(), start=x.logprobs.new_zeros(()))
    stats = {key: Stat(share.detach(), Reduction.SUM) for key, share in (shares | {"loss/total": total}).items()}
    for term in terms.values():
        stats |= term.stats
    return total, stats
