"""`Algorithm`: the composition of its parts, and what it asks of engine and data."""

from __future__ import annotations

from typing import ClassVar, Self, get_args

from pydantic import Field, SerializeAsAny, model_validator

from engines.algorithms.spec.advantages import AdvantageParams
from engines.algorithms.spec.base import Aggregation, Need, Needs, Params, name_of
from engines.algorithms.spec.losses import LossParams, RecLoss
from engines.algorithms.spec.terms import (
    EntropyParams,
    FilterParams,
    KlInReward,
    KlParams,
    NoEntropy,
    NoKl,
    OverlongShaping,
    RolloutCorrection,
)
from engines.config import Frozen
from engines.plugins import hint


class Algorithm(Frozen):
    """All that decides the gradient of a train step, given the weights and the data.

    Example:
        >>> from engines.algorithms.spec import Grpo, PpoClip
        >>> sorted(Algorithm(advantage=Grpo(), loss=PpoClip()).needs)
        ['old_logprobs', 'rewards', 'rollout_logprobs']
    """

    differs: ClassVar[tuple[str, ...]] = (
        "One denominator for a whole update, counted over all its micro-batches; Trinity-RFT sums the means of the "
        "micro-batches, so its gradient depends on how a batch was cut.",
        "Rows without an action token count nowhere, nothing is added to a denominator, and an empty batch changes "
        "nothing; Trinity-RFT counts such rows in the seq-mean modes and adds 1e-8.",
        "The preset's group size is applied, and *_args change only what they name; Trinity-RFT declares group sizes "
        "but samples repeat_times = 1, and a partial *_args switches the other parameters to other defaults.",
        "Every metric declares whether it is a mean, a sum or an extreme; Trinity-RFT goes by whether the name "
        "contains min or max.",
    )
    """As `Params.differs`, for every algorithm."""

    advantage: SerializeAsAny[AdvantageParams | None] = None
    """None: the loss uses no advantages."""
    loss: SerializeAsAny[LossParams]
    kl: SerializeAsAny[KlParams] = NoKl()
    """To the reference model, in the loss."""
    kl_penalty: SerializeAsAny[KlParams] = NoKl()
    """To the reference model, in the reward."""
    entropy: SerializeAsAny[EntropyParams] = NoEntropy()
    """Of the policy, in the loss."""
    correction: RolloutCorrection | None = None
    """For the difference between sampler and trainer."""
    shaping: OverlongShaping | None = None
    """Of the rewards, by length."""
    filters: tuple[SerializeAsAny[FilterParams], ...] = ()
    """Which rows take part, one after another."""
    mask_truncated: bool = False
    """Responses that were cut at the limit are compared with the others, but do not train."""
    aggregation: Aggregation = "token-mean"
    """token-mean: tokens weigh the same. seq-mean-*: sequences weigh the same, their token losses summed or averaged.
    seq-mean-token-sum-norm: sum of all tokens over the longest response of the update (Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783)."""
    group_size: int = Field(default=1, ge=1)
    """Samples per task."""
    bypass_old_logprobs: bool = True
    """True: the sampler's logprobs are the old logprobs. False: those of the trained weights before the step are."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        known: tuple[str, ...] = get_args(Need)
        if unknown := sorted(set(self.needs) - set(known)):
            raise ValueError(f"{unknown[0]!r} in `requires` is nothing that there is; {hint(unknown[0], known)}")
        if self.loss.takes_advantages and self.advantage is None:
            raise ValueError(f"policy loss {self.loss_name} needs an advantage; set advantage_fn, for example grpo")
        if self.correction is not None and self.bypass_old_logprobs:
            raise ValueError(
                "rollout_correction weighs old against sampler logprobs, and bypass_old_logprobs makes them the same; "
                "set algorithm.bypass_old_logprobs: false"
            )
        if self.correction is not None and "old_logprobs" not in self.loss.needs:
            raise ValueError(f"rollout_correction has no meaning for policy loss {self.loss_name}: it takes no ratio")
        if self.correction is not None and self.correction.level == "token" and self._is_of_sequences:
            raise ValueError(
                f"policy loss {self.loss_name} with clip_mode gspo-one-side has one number per sequence; set "
                "rollout_correction.level: sequence or geometric"
            )
        if self.kl_penalty.needs and self.advantage is None:
            raise ValueError(f"kl_penalty_fn lowers rewards, and policy loss {self.loss_name} uses none")
        return self

    @property
    def _is_of_sequences(self) -> bool:
        return isinstance(self.loss, RecLoss) and self.loss.clip_mode == "gspo-one-side"

    @property
    def loss_name(self) -> str:
        """Name of the policy loss."""
        return name_of(self.loss)

    @property
    def parts(self) -> tuple[Params, ...]:
        """Every part that is there."""
        optional = (self.advantage, self.correction, self.shaping)
        present = tuple(part for part in optional if part is not None)
        return (self.loss, self.kl, self.kl_penalty, self.entropy, *present, *self.filters)

    @property
    def needs(self) -> Needs:
        """What engine and data must provide beyond logprobs of the current policy."""
        needs: set[Need] = set().union(*(part.needs for part in self.parts))
        if self.filters or self.shaping is not None:
            needs.add("rewards")
        if "old_logprobs" in needs and self.bypass_old_logprobs:
            needs.add("rollout_logprobs")
        return frozenset(needs)

    @property
    def has_reward_penalty(self) -> bool:
        """Whether rewards are lowered by a KL."""
        return isinstance(self.kl_penalty, KlInReward) and self.kl_penalty.active
