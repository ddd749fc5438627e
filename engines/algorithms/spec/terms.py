"""Parameters of what stands beside the policy loss: KL to the reference, entropy, and what the rows are put through.

KL estimates, with d = lp - reference at the sampled token (Schulman 2020, http://joschu.net/blog/kl-approx.html):

| name | value | as a loss, its gradient is that of |
|---|---|---|
| k1 | d | nothing: expectation 0. Only in the reward |
| k2 | d^2 / 2 | KL(policy, reference), exactly |
| k3 | exp(-d) - 1 + d, d at least -40 | KL(reference, policy), exactly |
| low_var_kl | k3, d within +-20, result within +-10 | as k3, where nothing is clipped |
| abs | absolute d | twice the total variation: no KL. Only in the reward |
| corrected_k3 | k3 clip(r, 0, 2), r the ratio to old | KL(policy, reference), off-policy too |
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from engines.algorithms.spec.base import NOTHING, Needs, Params

OLD: Needs = frozenset({"old_logprobs"})
REWARDS: Needs = frozenset({"rewards"})
REFERENCE: Needs = frozenset({"reference"})
ENTROPY: Needs = frozenset({"entropy"})

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"]


class KlParams(Params):
    """Base of the KL terms; kl_coef is fixed, or adapted after each step (Ziegler et al. 2019, arXiv:1909.08593, 2.2).

    Adaptive: kl_coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * rows / horizon.
    """

    differs: ClassVar[tuple[str, ...]] = (
        "adaptive works; Trinity-RFT's run ends with an error.",
        "A reference model is there whenever it is needed; Trinity-RFT's run ends with a KeyError without one.",
    )
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, or the first one if adaptive. 0: no KL, no reference model."""
    adaptive: bool = False
    """Let the coefficient follow the KL, step by step."""
    target_kl: float | None = Field(default=None, gt=0)
    """Nats per action token that an adaptive coefficient aims at."""
    horizon: float | None = Field(default=None, gt=0)
    """Rows after which an adaptive coefficient has moved by its own size."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.adaptive and (self.target_kl is None or self.horizon is None or not self.kl_coef):
            raise ValueError("an adaptive KL coefficient needs target_kl, horizon and a kl_coef above 0 to begin with")
        return self

    @property
    def active(self) -> bool:
        """Whether there is such a term."""
        return self.kl_coef > 0

    @property
    def needs(self) -> Needs:
        """A reference model, if there is a term."""
        return REFERENCE if self.active else NOTHING


class NoKl(KlParams):
    """No KL term, no reference model."""

    differs: ClassVar[tuple[str, ...]] = ()
    name: Literal["none"] = "none"
    kl_coef: float = 0.0
    """Not used."""

    @property
    def active(self) -> bool:
        """Never, whatever the coefficient."""
        return False


class KlInLoss(KlParams):
    """kl_coef * KL(policy, reference), estimated at the sampled tokens, added to the loss.

    With d = lp - reference: k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 within bounds; corrected_k3 = k3
    clip(r, 0, 2), r the ratio to old. As a loss, the gradient of k2 and corrected_k3 is that of KL(policy, reference),
    that of k3 of KL(reference, policy). Schulman 2020, http://joschu.net/blog/kl-approx.html; Liu et al. 2025,
    arXiv:2510.01555; corrected_k3: DeepSeek 2025 (V3.2), arXiv:2512.02556. Adaptive: Ziegler et al. 2019,
    arXiv:1909.08593, 2.2: kl_coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * rows / horizon.
    """

    function: ClassVar[str] = "engines.algorithms.kl:kl_in_loss"
    differs: ClassVar[tuple[str, ...]] = (
        *KlParams.differs,
        "k1 and abs are refused in the loss, where their gradient is not that of a KL; Trinity-RFT takes them.",
        "corrected_k3: the gradient runs through its ratio, as in Trinity-RFT, here as a choice: only so is it that of "
        "the KL, as a test by enumeration shows.",
    )
    name: Literal["k2", "k3", "low_var_kl", "corrected_k3"] = "k2"

    @property
    def needs(self) -> Needs:
        """corrected_k3 reads the ratio."""
        return super().needs | (OLD if self.active and self.name == "corrected_k3" else NOTHING)

    @model_validator(mode="before")
    @classmethod
    def _has_a_gradient(cls, values: object) -> object:
        name = values.get("name") if isinstance(values, dict) else None
        why = {"k1": "of k1 has expectation 0: it would add noise alone", "abs": "of abs is that of no KL"}
        if name in why:
            raise ValueError(f"as a loss, the gradient {why[name]}; use k2, or kl_penalty_fn: {name} (in the reward)")
        return values


class KlInReward(KlParams):
    """kl_coef * KL(old, reference) of each action token, taken off its reward before the advantages.

    With d = old - reference: k1 = d; k2 = d^2 / 2; k3 and corrected_k3 = exp(-d) - 1 + d; low_var_kl = k3 within
    bounds; abs = absolute d. Schulman 2020, http://joschu.net/blog/kl-approx.html. Adaptive: Ziegler et al. 2019,
    arXiv:1909.08593, 2.2: kl_coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * rows / horizon.
    """

    function: ClassVar[str] = "engines.algorithms.kl:penalty"
    name: KlEstimator = "k1"

    @property
    def needs(self) -> Needs:
        """The old policy's logprobs beside the reference's, and rewards to lower."""
        return super().needs | (OLD | REWARDS if self.active else NOTHING)


class EntropyParams(Params):
    """Base of the entropy terms."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """The coefficient. 0: no bonus, and no entropies are computed for it."""

    @property
    def active(self) -> bool:
        """Whether there is such a term."""
        return self.entropy_coef > 0

    @property
    def needs(self) -> Needs:
        """Entropies, if there is a term."""
        return ENTROPY if self.active else NOTHING


class NoEntropy(EntropyParams):
    """No entropy bonus."""

    name: Literal["none"] = "none"
    entropy_coef: float = 0.0
    """Not used."""

    @property
    def active(self) -> bool:
        """Never, whatever the coefficient."""
        return False


class EntropyBonus(EntropyParams):
    """entropy_coef * entropy of the policy, subtracted from the loss. Mnih et al. 2016 (A3C), arXiv:1602.01783, 4."""

    function: ClassVar[str] = "engines.algorithms.entropy:entropy_bonus"
    name: Literal["default"] = "default"


class EntropyBonusOfSamples(EntropyParams):
    """As default, on the sampled rows alone: what an expert wrote has its own entropy."""

    function: ClassVar[str] = "engines.algorithms.entropy:entropy_bonus_of_samples"
    differs: ClassVar[tuple[str, ...]] = ("0 if there is no sampled row; Trinity-RFT has NaN in the seq-mean modes.",)
    name: Literal["mix"] = "mix"


class RolloutCorrection(Params):
    """A weight on each token for the difference between sampler and trainer: w = exp(old - rollout), detached.

    Needs `bypass_old_logprobs: false`: else the sampler's logprobs are the old ones. With a ratio lp - old beside it
    this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): old is the proximal policy, the sampler the
    behaviour policy.
    """

    function: ClassVar[str] = "engines.algorithms.correction:corrected"
    requires: ClassVar[Needs] = frozenset({"old_logprobs", "rollout_logprobs"})
    name: Literal["truncate", "mask", "full"] = "truncate"
    """truncate: min(w, cap) (Yao et al. 2025, truncated importance sampling). mask: w within floor and cap, else 0 (Liu
    et al. 2025, masked importance sampling). full: w as it is."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of each token; of the row, as the product over its tokens; or as their geometric mean."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight of truncate; beyond it mask gives 0. Not used by full."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Below it mask gives 0. Not used by the others."""

    @model_validator(mode="after")
    def _floor_is_read(self) -> Self:
        if self.floor and self.name != "mask":
            raise ValueError(f"floor = {self.floor} is for mask; {self.name} has no lower bound")
        return self


class OverlongShaping(Params):
    """Takes up to `penalty` off the reward of a response near the longest allowed, or beyond.

    Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13. Nothing before the last cache_share of model.max_response_tokens,
    then linear, all of it at the limit.
    """

    function: ClassVar[str] = "engines.algorithms.filters:overlong"
    name: Literal["overlong"] = "overlong"
    cache_share: float = Field(default=0.2, gt=0, le=1)
    """The paper has 4,096 of 20,480 tokens."""
    penalty: float = Field(default=1.0, ge=0)
    """Reward units."""


class FilterParams(Params):
    """Base of the filters: which rows of a whole batch take part. The function is (FilterInputs, params) -> [R] kept.

    Filters see rewards as they were given, before shaping.
    """


class GroupFilterParams(FilterParams):
    """Base of the filters that keep or drop whole groups.

    With `refill`, the explorer of mode both drops before it writes, and samples more tasks until the batch is full.
    """

    refill: bool = True
    """Sample more tasks until the batch is full. False: the batch is smaller."""
    max_rounds: int = Field(default=10, ge=1)
    """Batches of tasks that are sampled for one step before the explorer gives up."""


class DynamicSampling(GroupFilterParams):
    """Keeps groups that are neither all right nor all wrong. Yu et al. 2025 (DAPO), arXiv:2503.14476, 3.2.

    Right: `metrics[metric_key]`, or the reward where that is missing, is above correct_threshold.
    """

    function: ClassVar[str] = "engines.algorithms.filters:dynamic_sampling"
    name: Literal["dynamic_sampling"] = "dynamic_sampling"
    metric_key: str = "accuracy"
    """Name in `metrics` of each row."""
    correct_threshold: float = 0.0
    """A row is right above this."""


class RewardStdFilter(GroupFilterParams):
    """Keeps groups of at least two rows whose rewards have a population std above the threshold."""

    function: ClassVar[str] = "engines.algorithms.filters:reward_std"
    name: Literal["reward_std_filter"] = "reward_std_filter"
    refill: bool = False
    """Sample more tasks until the batch is full. False: the batch is smaller."""
    threshold: float = Field(default=0.0, ge=0)
    """Groups whose std is not above this are left out."""


class RewardFilter(FilterParams):
    """Keeps rows with a reward of at least the threshold."""

    function: ClassVar[str] = "engines.algorithms.filters:reward"
    name: Literal["reward_filter"] = "reward_filter"
    threshold: float = 0.0
    """Smallest reward that is kept."""


class BestOfGroup(FilterParams):
    """Keeps the num_kept best rows of each group, the first ones among equals, if they reach min_reward.

    Dong et al. 2023 (RAFT), arXiv:2304.06767: fine-tuning on the best of n. A group of equal rewards has no best: it is
    dropped, unless it has one row.
    """

    function: ClassVar[str] = "engines.algorithms.filters:best_of_group"
    name: Literal["best_of_group"] = "best_of_group"
    num_kept: int = Field(default=1, ge=1)
    """Rows of each group."""
    min_reward: float | None = None
    """Smallest reward that is kept. None: any."""


FILTERS: tuple[type[FilterParams], ...] = (DynamicSampling, RewardStdFilter, RewardFilter, BestOfGroup)
"""Those that are built in."""
