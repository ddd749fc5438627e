"""An algorithm as data: advantage x policy loss x KL x entropy x aggregation x group size. Torch-free, frozen.

Owns: every parameter with its default and its source. Does not own: formulas (`advantages`, `losses`, `kl`, `entropy`,
bound to these types in `objective`) or names of whole algorithms (`presets`).

To add one: a params class here, one function, one line in `objective`, one preset.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engines.config import Frozen

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Need = Literal["rewards", "old_logprobs", "reference", "entropy"]


class Grpo(Frozen):
    """A = (R - mean) / (std + epsilon) over the group. Shao et al. 2024, arXiv:2402.03300, 4.1.2.

    std is the sample std (ddof 1). A group of one, or of equal rewards, has advantage 0.
    """

    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop groups whose std is not above this, and groups of one, before the forward pass. None: keep all."""
    rank_penalty: float | None = Field(default=None, ge=0, le=1)
    """Lower the reward of samples that were likely already: R * (1 - rank / n * penalty), rank by mean logprob."""
    std_cal_level: Literal["group", "batch"] = "group"
    """Whose rewards give the std; the mean is always the group's."""


class PpoClip(Frozen):
    """-min(r A, clip(r, 1 - low, 1 + high) A), dual clip for A < 0. Schulman et al. 2017, arXiv:1707.06347, eq. 7;
    asymmetric range: arXiv:2503.14476; dual clip: arXiv:1912.09729, eq. 5.
    """

    name: Literal["ppo"] = "ppo"
    clip_range: float = Field(default=0.2, ge=0)
    """Both sides of the range, where the next two do not say otherwise."""
    clip_range_low: float | None = Field(default=None, ge=0)
    clip_range_high: float | None = Field(default=None, ge=0)
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Bound of the loss for A < 0, as a multiple of -A."""
    enable_sequence_masking: bool = False
    """Leave out tokens with A < 0 of sequences that moved further than `delta_sequence_masking`. arXiv:2512.02556."""
    delta_sequence_masking: float = Field(default=0.1, ge=0)
    """Largest mean of old minus new logprob of such a sequence, nats."""
    fallback_to_policy_gradient: bool = False
    """Take the ratio to the current policy itself: always 1, gradient of REINFORCE."""

    @property
    def low(self) -> float:
        """1 - low is the smallest ratio with a gradient for A < 0."""
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        """1 + high is the largest ratio with a gradient for A > 0."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


class Sft(Frozen):
    """-logprob of the tokens of the data."""

    name: Literal["sft"] = "sft"


class NoKl(Frozen):
    """No KL term, no reference model."""

    name: Literal["none"] = "none"
    kl_coef: float = 0.0
    """Not used."""


class KlInLoss(Frozen):
    """kl_coef * KL(policy || reference), estimated from the sampled tokens, added to the loss.

    Schulman 2020, http://joschu.net/blog/kl-approx.html. Only estimators with a useful gradient as a loss: that of k1
    has expectation 0, so it belongs into the reward.
    """

    name: Literal["k2", "k3", "low_var_kl"] = "k2"
    kl_coef: float = Field(default=0.001, ge=0)


class NoEntropy(Frozen):
    """No entropy bonus."""

    name: Literal["none"] = "none"
    entropy_coef: float = 0.0
    """Not used."""


class EntropyBonus(Frozen):
    """entropy_coef * entropy of the policy, subtracted from the loss."""

    name: Literal["default"] = "default"
    entropy_coef: float = Field(default=0.0, ge=0)


AdvantageParams = Grpo
"""Discriminated on `name`, as the unions below, when there is more than one."""
LossParams = Annotated[PpoClip | Sft, Field(discriminator="name")]
KlParams = Annotated[NoKl | KlInLoss, Field(discriminator="name")]
EntropyParams = Annotated[NoEntropy | EntropyBonus, Field(discriminator="name")]


class Algorithm(Frozen):
    """All that decides the gradient of a train step, given the weights and the data."""

    advantage: AdvantageParams | None = None
    """None: the loss uses no advantages."""
    loss: LossParams
    kl: KlParams = NoKl()
    entropy: EntropyParams = NoEntropy()
    aggregation: Aggregation = "token-mean"
    """token-mean: tokens weigh the same. seq-mean-*: sequences weigh the same, their token losses summed or averaged.
    seq-mean-token-sum-norm: sum of all tokens over the longest response of the update (Dr. GRPO, arXiv:2503.20783)."""
    group_size: int = Field(default=1, ge=1)
    """Samples per task."""
    bypass_old_logprobs: bool = True
    """True: the sampler's logprobs are the old logprobs."""

    @model_validator(mode="after")
    def _advantage_for_loss(self) -> Self:
        if isinstance(self.loss, PpoClip) and self.advantage is None:
            raise ValueError("policy loss ppo needs an advantage; set advantage_fn, for example grpo")
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must provide beyond logprobs of the current policy."""
        needs: set[Need] = set()
        if self.advantage is not None:
            needs.add("rewards")
        if isinstance(self.loss, PpoClip):
            needs.add("old_logprobs")
        if isinstance(self.kl, KlInLoss) and self.kl.kl_coef > 0:
            needs.add("reference")
        if isinstance(self.entropy, EntropyBonus) and self.entropy.entropy_coef > 0:
            needs.add("entropy")
        return frozenset(needs)
