"""Parameters of the policy losses. Formulas are computed by `engines.algorithms.losses`, `.mixing`, `.preference`.

Notation: lp, old logprob of a token under the policy that is trained and under the one that the ratio is taken to; r =
exp(lp - old), in ppo and importance_sampling within e^+-20; A advantage; sg() stops the gradient. All losses are
minimised; none divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engines.algorithms.spec.base import Needs, Params, imported, name_of

POLICY, SELECTION = "engines.algorithms.losses", "engines.algorithms.selection"
RATIO: Needs = frozenset({"old_logprobs"})
EXPERTS: Needs = frozenset({"expert_rows"})


class LossParams(Params):
    """Base of all policy losses. The function is (LossInputs, params) -> TokenLoss, or a tuple of them."""

    takes_advantages: ClassVar[bool] = True
    select: ClassVar[str | None] = None
    """module:name of a function (SelectionInputs, params) -> [N] flags, once per step, before it is cut: tokens that
    the loss treats differently, and that can be told only from the whole batch."""

    @property
    def selection(self) -> Callable[..., Any] | None:
        """The function that `select` names. Raises ConfigError if it cannot be imported."""
        return None if self.select is None else imported(f"the selection of {name_of(self)!r}", self.select)


class PpoClip(LossParams):
    """-min(r A, clip(r, 1 - low, 1 + high) A), dual clip for A < 0.

    Schulman et al. 2017 (PPO), arXiv:1707.06347, eq. 7; asymmetric range: Yu et al. 2025 (DAPO), arXiv:2503.14476, 3.1;
    dual clip: Ye et al. 2019, arXiv:1912.09729, eq. 5.
    """

    function: ClassVar[str] = f"{POLICY}:ppo_clip"
    requires: ClassVar[Needs] = RATIO
    name: Literal["ppo"] = "ppo"
    clip_range: float = Field(default=0.2, ge=0)
    """Both sides of the range, where the next two do not say otherwise."""
    clip_range_low: float | None = Field(default=None, ge=0)
    """1 - this is the smallest ratio with a gradient for A < 0. None: clip_range."""
    clip_range_high: float | None = Field(default=None, ge=0)
    """1 + this is the largest ratio with a gradient for A > 0. None: clip_range."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Bound of the loss for A < 0, as a multiple of -A."""
    enable_sequence_masking: bool = False
    """Leave out tokens with A < 0 of sequences that moved further than `delta_sequence_masking`. DeepSeek 2025
    (V3.2), arXiv:2512.02556, eq. 9."""
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


class ClipCov(PpoClip):
    """PPO without the gradient of some tokens whose logprob and advantage vary together most.

    Cui et al. 2025 (Clip-Cov), arXiv:2505.22617, eq. 10 to 12; there without PPO's clip. cov = (A - mean A) (old - mean
    old). Of the tokens with cov within the bounds, a share `clip_cov_ratio` of all action tokens, drawn at random, is
    detached.
    """

    function: ClassVar[str] = f"{POLICY}:clip_cov"
    select: ClassVar[str | None] = f"{SELECTION}:clip_cov"
    name: Literal["clip_cov"] = "clip_cov"  # type: ignore[assignment]
    clip_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    """Share of all action tokens that is detached; at least one token is."""
    clip_cov_lb: float = 1.0
    """Lower bound of cov."""
    clip_cov_ub: float = 5.0
    """Upper bound of cov."""


class KlCov(LossParams):
    """-A r, and ppo_kl_coef |lp - old| on the tokens with the largest covariance.

    Cui et al. 2025 (KL-Cov), arXiv:2505.22617, eq. 13 and 14. cov as in clip_cov; a share `kl_cov_ratio` of all action
    tokens, those with the largest cov, is held back.
    """

    function: ClassVar[str] = f"{POLICY}:kl_cov"
    requires: ClassVar[Needs] = RATIO
    select: ClassVar[str | None] = f"{SELECTION}:kl_cov"
    name: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    """Share of all action tokens that is held back; at least one token is."""
    ppo_kl_coef: float = Field(default=1.0, ge=0)
    """How strongly they are held back."""


class Gspo(LossParams):
    """PPO's clip on the ratio of the whole sequence, s = exp(mean(lp - old)), without dual clip.

    Each token has the ratio s in value and its own share of the gradient. Zheng et al. 2025 (GSPO),
    arXiv:2507.18071, eq. 5 and 7; in the form of tokens, eq. 13 and 14. Goes with aggregation seq-mean-token-mean.
    """

    function: ClassVar[str] = f"{POLICY}:gspo"
    requires: ClassVar[Needs] = RATIO
    differs: ClassVar[tuple[str, ...]] = (
        "The preset's seq-mean-token-mean is applied; in Trinity-RFT loss_agg_mode's own default, token-mean, wins.",
    )
    name: Literal["gspo"] = "gspo"
    clip_range_low: float = Field(default=3e-4, ge=0)
    """1 - this is the smallest s with a gradient for A < 0."""
    clip_range_high: float = Field(default=4e-4, ge=0)
    """1 + this is the largest s with a gradient for A > 0."""


class Cispo(LossParams):
    """-A sg(clip(r, 1 - low, 1 + high)) lp: every token keeps a gradient, its weight is clipped.

    MiniMax 2025 (CISPO), arXiv:2506.13585, eq. 4 and 5. With `enable_mask_clip`, tokens beyond the mask's range in the
    direction of their advantage have none.
    """

    function: ClassVar[str] = f"{POLICY}:cispo"
    requires: ClassVar[Needs] = RATIO
    name: Literal["cispo"] = "cispo"
    clip_range_low: float = Field(default=1.0, ge=0)
    """1 - this is the smallest weight; 1 and more: no lower bound."""
    clip_range_high: float = Field(default=0.28, ge=0)
    """1 + this is the largest weight."""
    enable_mask_clip: bool = False
    """Also stop the gradient of tokens beyond the mask's range."""
    mask_clip_range_low: float = Field(default=1.0, ge=0)
    """Below 1 - this, tokens with A < 0 are masked."""
    mask_clip_range_high: float = Field(default=0.28, ge=0)
    """Above 1 + this, tokens with A > 0 are masked."""


class Sapo(LossParams):
    """-A f(r), f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A: a soft gate in place of the clip.

    Gao et al. 2025 (SAPO), arXiv:2511.20347, eq. 5 and 6. Differentiated through the gate, whose slope is 1 at r = 1.
    """

    function: ClassVar[str] = f"{POLICY}:sapo"
    requires: ClassVar[Needs] = RATIO
    differs: ClassVar[tuple[str, ...]] = (
        "The paper's objective, differentiated through its gate; Trinity-RFT detaches the gate and weighs lp with it.",
    )
    name: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0)
    """tau for A > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """tau for the others, not below tau_pos: the gate of negative tokens closes sooner."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tau_neg < self.tau_pos:
            raise ValueError(f"tau_neg = {self.tau_neg} is below tau_pos = {self.tau_pos}")
        return self


class Topr(LossParams):
    """-sg(a) A lp; a = clip(r, 0, 1) for A <= advantage_threshold, else 1.

    Le Roux et al. 2025 (TOPR), arXiv:2503.14286. Ratios are those of tokens; the paper's are of sequences.
    """

    function: ClassVar[str] = f"{POLICY}:topr"
    requires: ClassVar[Needs] = RATIO
    name: Literal["topr"] = "topr"
    advantage_threshold: float = 0.0
    """Rows whose advantage is not above this are tapered."""


class Sppo(LossParams):
    """-A (lp - old) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else nothing.

    Vaswani et al. 2021 (sPPO), arXiv:2108.05828, as Trinity-RFT has it.
    """

    function: ClassVar[str] = f"{POLICY}:sppo"
    requires: ClassVar[Needs] = RATIO
    name: Literal["sppo"] = "sppo"
    epsilon: float = Field(default=0.3, ge=0)
    """How far the ratio may be from 1, either way."""


class OpmdLoss(LossParams):
    """-A lp / (1 + tau). Kimi 2025, arXiv:2501.12599, eq. 3; in Trinity-RFT's form: Yao et al. 2025, arXiv:2509.24203,
    2.2.
    """

    function: ClassVar[str] = f"{POLICY}:opmd"
    name: Literal["opmd"] = "opmd"
    tau: float = Field(default=1.0, ge=0)
    """Strength of the regularisation towards the old policy: it divides the step."""


class ImportanceSampling(LossParams):
    """-A r: the off-policy policy gradient, unclipped. Degris et al. 2012, arXiv:1205.4839."""

    function: ClassVar[str] = f"{POLICY}:importance_sampling"
    requires: ClassVar[Needs] = RATIO
    name: Literal["importance_sampling"] = "importance_sampling"


class RecLoss(LossParams):
    """-w(A) lp where the clip mode lets the token through, and a regulariser. Yao et al. 2025 (REC), arXiv:2509.24203.

    The ratio is detached. clip_mode: none; two-side: 1 - low <= r <= 1 + high; one-side: r <= 1 + high for A >= 0, r >=
    1 - low for A <= 0; gspo-one-side: the same with the ratio of the sequence, sequences weighing the same; ring:
    two-side, or r <= 1 - low' for A >= 0, or r >= 1 + high' for A <= 0.
    """

    function: ClassVar[str] = f"{POLICY}:rec"
    requires: ClassVar[Needs] = RATIO
    differs: ClassVar[tuple[str, ...]] = (
        "weight gspo_importance_sampling works with every clip_mode; Trinity-RFT's run ends with an error but for "
        "gspo-one-side.",
    )
    name: Literal["rec"] = "rec"
    epsilon_low: float = Field(default=0.2, ge=0)
    """low."""
    epsilon_high: float = Field(default=0.2, ge=0)
    """high."""
    epsilon_low_prime: float = Field(default=0.6, ge=0)
    """low', of the ring."""
    epsilon_high_prime: float = Field(default=2.0, ge=0)
    """high', of the ring."""
    clip_mode: Literal["none", "two-side", "one-side", "gspo-one-side", "ring"] = "none"
    """Which ratios let a token through."""
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none"
    """w: A; A r; A times the ratio of the sequence; A exp(A / temp), the exponent at most 20."""
    regularizer: Literal["none", "k2", "forward-kl"] = "none"
    """k2: + coef (lp - old)^2. forward-kl: - coef lp."""
    regularizer_coef: float = Field(default=0.0, ge=0)
    """coef."""
    temp: float = Field(default=1.0, gt=0)
    """Temperature of the weight `advantage`."""


class _Supervised(LossParams):
    takes_advantages: ClassVar[bool] = False


class Sft(_Supervised):
    """-lp of the tokens of the data."""

    function: ClassVar[str] = f"{POLICY}:sft"
    name: Literal["sft"] = "sft"


class SftIs(_Supervised):
    """-sg(exp(lp)) lp: tokens weigh as they are likely. Wu et al. 2025 (DFT), arXiv:2508.05629."""

    function: ClassVar[str] = f"{POLICY}:sft_is"
    name: Literal["sft_is"] = "sft_is"


class SftPhi(_Supervised):
    """-sg(p (1 - p)) min(lp, log cutoff_prob), p = exp(lp): least where the model is sure, of it or of its opposite.

    Zhang et al. 2025 (CHORD), arXiv:2508.11408, eq. 5 and 6.
    """

    function: ClassVar[str] = f"{POLICY}:sft_phi"
    name: Literal["sft_phi"] = "sft_phi"
    cutoff_prob: float = Field(default=1.0, gt=0, le=1)
    """Tokens more likely than this have no gradient."""


class Dpo(LossParams):
    """-(1 - s) log sigmoid(x) - s log sigmoid(-x), x = beta (D_chosen - D_rejected), D = sum(lp - reference).

    Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7; s smooths labels. One number per pair, then the mean over
    pairs.
    """

    function: ClassVar[str] = "engines.algorithms.preference:dpo"
    requires: ClassVar[Needs] = frozenset({"reference", "pairs"})
    takes_advantages: ClassVar[bool] = False
    differs: ClassVar[tuple[str, ...]] = (
        "One sigmoid for each pair, then the mean; Trinity-RFT has one sigmoid of the margins of a whole micro-batch.",
    )
    name: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """s: how often a pair is labelled the wrong way round."""


class Mix(LossParams):
    """(1 - mu) PPO on the sampled rows + mu SFT on the expert rows, each over its own number of tokens or rows.

    Zhang et al. 2025 (CHORD), arXiv:2508.11408, eq. 3, with a fixed mu.
    """

    function: ClassVar[str] = "engines.algorithms.mixing:mix"
    requires: ClassVar[Needs] = RATIO | EXPERTS
    differs: ClassVar[tuple[str, ...]] = (
        "Sampled and expert rows each have their own denominator; Trinity-RFT's normalisers are not connected to its "
        "config, so that the loss grows with the number of rows.",
    )
    name: Literal["mix"] = "mix"
    mu: float = Field(default=0.1, ge=0, le=1)
    """Share of the expert rows."""
    clip_range: float = Field(default=0.2, ge=0)
    """Of PPO: both sides of the range, where the next two do not say otherwise."""
    clip_range_low: float | None = Field(default=None, ge=0)
    """1 - this is the smallest ratio with a gradient for A < 0. None: clip_range."""
    clip_range_high: float | None = Field(default=None, ge=0)
    """1 + this is the largest ratio with a gradient for A > 0. None: clip_range."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Of PPO: bound of the loss for A < 0, as a multiple of -A."""

    @property
    def ppo(self) -> PpoClip:
        """The loss of the sampled rows."""
        return PpoClip(**self.model_dump(include={"clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c"}))


class MixChord(Mix):
    """mix with mu by train step, and SFT weighted by phi. Zhang et al. 2025 (CHORD), arXiv:2508.11408, eq. 3 and 6.

    mu rises from 0 to mu_peak within mu_warmup_steps, then falls on a cosine to mu_valley within mu_decay_steps.
    """

    function: ClassVar[str] = "engines.algorithms.mixing:mix_chord"
    name: Literal["mix_chord"] = "mix_chord"  # type: ignore[assignment]
    mu: Annotated[float, Field(exclude=True)] = 0.0
    """Not used."""
    mu_warmup_steps: int = Field(default=0, ge=0)
    """Train steps of the rise."""
    mu_decay_steps: int = Field(default=0, ge=0)
    """Train steps of the fall."""
    mu_peak: float = Field(default=0.1, ge=0, le=1)
    """mu after the rise."""
    mu_valley: float = Field(default=0.1, ge=0, le=1)
    """mu after the fall."""
    enable_phi_function: bool = True
    """True: sft_phi on the expert rows; False: sft."""


LOSSES: tuple[type[LossParams], ...] = (
    *(PpoClip, ClipCov, KlCov, Gspo, Cispo, Sapo, Topr, Sppo, OpmdLoss, ImportanceSampling, RecLoss),
    *(Sft, SftIs, SftPhi, Dpo, Mix, MixChord),
)
"""Those that are built in."""
