"""Parameters of the advantages. Formulas are computed in float64 on whole groups, by `engines.algorithms.advantages`
(one number per row) and `engines.algorithms.token_advantages` (one per action token).

Notation: R reward of a row, A advantage, n rows of a group (one `eid.tid`), t action tokens; V values of the critic.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engines.algorithms.spec.base import Needs, Params

SAMPLER: Needs = frozenset({"rollout_logprobs"})
GROUP_OF_ONE = "A group of one has advantage 0 and is counted in a metric; in Trinity-RFT its advantage is its reward."
ACTIONS_ONLY = (
    "Runs over action tokens alone, and is 0 elsewhere; Trinity-RFT's runs through what tools wrote and padding."
)
ROWS, TOKENS = "engines.algorithms.advantages", "engines.algorithms.token_advantages"


class AdvantageParams(Params):
    """Base of all advantages. The function is (AdvantageInputs, params) -> Advantages."""

    requires: ClassVar[Needs] = frozenset({"rewards"})
    compares_samples: ClassVar[bool] = False
    """Whether a task with one sample has advantage 0."""


class Grpo(AdvantageParams):
    """A = (R - mean) / (std + epsilon) over the group. Shao et al. 2024, arXiv:2402.03300, 4.1.2.

    std is the sample std (ddof 1). A group of one, or of equal rewards, has advantage 0.
    """

    function: ClassVar[str] = f"{ROWS}:grpo"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = (
        GROUP_OF_ONE,
        "rank_penalty: mean, std and numerator all have the lowered rewards; Trinity-RFT's numerator has the raw one.",
    )
    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std."""
    normalize: bool = True
    """Divide by the std. False: A = R - mean (Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783)."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop groups whose std is not above this, and groups of one, before the forward pass. None: keep all."""
    rank_penalty: float | None = Field(default=None, ge=0, le=1)
    """Lower the reward of samples that were likely already: R * (1 - rank / n * penalty), rank by mean logprob."""
    duplicate_experiences: bool = False
    """Train kept groups once more in place of dropped ones, as many, drawn at random. Polaris, An et al. 2025."""
    std_cal_level: Literal["group", "batch"] = "group"
    """Whose rewards give the std; the mean is always the group's."""

    @property
    def needs(self) -> Needs:
        """The rank penalty reads the sampler's logprobs."""
        return self.requires if self.rank_penalty is None else self.requires | SAMPLER


class Reinforce(AdvantageParams):
    """A = R. Williams 1992, without a baseline."""

    function: ClassVar[str] = f"{ROWS}:reinforce"
    name: Literal["reinforce"] = "reinforce"


class Rloo(AdvantageParams):
    """A = R - mean of the other rows of the group. Ahmadian et al. 2024, arXiv:2402.14740, 2.3.

    A group of one has advantage 0: there is nothing to compare with.
    """

    function: ClassVar[str] = f"{ROWS}:rloo"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = (GROUP_OF_ONE,)
    name: Literal["rloo"] = "rloo"


class Remax(AdvantageParams):
    """A_t = rewards from t on, less the reward of the greedy answer to the same task. Li et al. 2023, arXiv:2310.10505.

    The baseline is `info.reward_baseline` of each row; the explorer writes it.
    """

    function: ClassVar[str] = f"{TOKENS}:remax"
    requires: ClassVar[Needs] = frozenset({"rewards", "greedy_baseline"})
    name: Literal["remax"] = "remax"


class Opmd(AdvantageParams):
    """A = R - b, with b the mean of the group, or tau * (logsumexp(R / tau) - log n).

    On-policy mirror descent: Kimi 2025, arXiv:2501.12599, 2.3.2. A group of one has advantage 0.
    """

    function: ClassVar[str] = f"{ROWS}:opmd"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = (GROUP_OF_ONE,)
    name: Literal["opmd"] = "opmd"
    opmd_baseline: Literal["mean", "logavgexp"] = "mean"
    """b: which of the two."""
    tau: float = Field(default=1.0, gt=0)
    """Temperature of logavgexp."""


class Asymre(AdvantageParams):
    """A = R - (mean of the group + baseline_shift). Arnal et al. 2025, arXiv:2506.20520.

    A negative shift leaves more weight on successes than on failures. A group of one has advantage 0.
    """

    function: ClassVar[str] = f"{ROWS}:asymre"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = (GROUP_OF_ONE,)
    name: Literal["asymre"] = "asymre"
    baseline_shift: float = -0.1
    """Reward units; the paper's stable choice is slightly below 0."""


class Rec(AdvantageParams):
    """A = R - mean of the group, with `std_normalize` over (population std + epsilon). Yao et al. 2025,
    arXiv:2509.24203.

    drop balance: where more rows are below the mean than not, surplus ones of them, drawn at random, get advantage 0
    and count in no statistic. A group of one has advantage 0.
    """

    function: ClassVar[str] = f"{ROWS}:rec"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = ("A group of one has advantage 0; Trinity-RFT's run ends with an error.",)
    name: Literal["rec"] = "rec"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std."""
    std_normalize: bool = False
    """Divide by the std."""
    drop: Literal["balance"] | None = None
    """balance: set surplus rows below the mean aside. None: keep all."""


class StepWiseGrpo(AdvantageParams):
    """GRPO over runs of several steps: the last step of each run has the reward, all steps get the run's advantage.

    Trinity-RFT's multi-step GRPO: Pan et al. 2025, arXiv:2505.17826. The last step is that with the largest `eid.step`.
    A task with one run has advantage 0.
    """

    function: ClassVar[str] = f"{ROWS}:step_wise_grpo"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = (
        "A task with one run has advantage 0; in Trinity-RFT its advantage is its reward.",
        "The last step of a run is the one with the largest eid.step; Trinity-RFT takes the one that is listed last.",
    )
    name: Literal["step_wise_grpo"] = "step_wise_grpo"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std."""
    enable_step_norm: bool = False
    """Divide by the number of steps of the run."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop tasks whose std over runs is not above this, and those with one run. None: keep all."""
    std_cal_level: Literal["group", "batch"] = "group"
    """Whose final rewards give the std."""


class Gigpo(AdvantageParams):
    """A = A_run + omega * A_step. Feng et al. 2025, arXiv:2505.10978.

    A_run: the sum of a run's step rewards, compared over the runs of its task. A_step: the discounted rewards from a
    step on, compared over all steps that were in the same state (`info[env_state_hash_key]`), where there are several.
    A step's reward is `info[step_reward_key]`; if no step of a run has it, the last one has the row's reward.
    """

    function: ClassVar[str] = f"{ROWS}:gigpo"
    compares_samples: ClassVar[bool] = True
    differs: ClassVar[tuple[str, ...]] = ("A task with one run has A_run 0; in Trinity-RFT it is the run's return.",)
    name: Literal["gigpo"] = "gigpo"
    omega: float = Field(default=1.0, ge=0)
    """Weight of A_step."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per step."""
    fnorm: Literal["none", "std"] = "none"
    """std: divide both by (std + epsilon). none: by (1 + epsilon)."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the divisor."""
    step_reward_key: str = "step_reward"
    """Where in `info` the reward of a step is."""
    env_state_hash_key: str = "env_state_hash"
    """Where in `info` the state is that a step began in, as anything that can be printed."""


class Gae(AdvantageParams):
    """delta_t = r_t + gamma V_(t+1) - V_t; A_t = delta_t + gamma lam A_(t+1), whitened; the critic learns A_t + V_t.

    Schulman et al. 2015, arXiv:1506.02438, eq. 16. t counts action tokens only: what a tool wrote is skipped. After the
    last token V is 0, but for a truncated response it is the critic's: the answer would have gone on.
    """

    function: ClassVar[str] = f"{TOKENS}:gae"
    differs: ClassVar[tuple[str, ...]] = (ACTIONS_ONLY,)
    requires: ClassVar[Needs] = frozenset({"rewards", "values"})
    name: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """0: one-step temporal differences; 1: Monte-Carlo returns."""


class ReinforcePlusPlus(AdvantageParams):
    """A_t = r_t + gamma A_(t+1), whitened over the action tokens of the batch. Hu 2025, arXiv:2501.03262."""

    function: ClassVar[str] = f"{TOKENS}:reinforce_plus_plus"
    differs: ClassVar[tuple[str, ...]] = (ACTIONS_ONLY,)
    name: Literal["reinforceplusplus"] = "reinforceplusplus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""


class OnPolicyDistill(AdvantageParams):
    """A_t = kl_coef * (teacher logprob - old logprob): a policy gradient towards the teacher.

    Agarwal et al. 2023 (GKD), arXiv:2306.13649 (reverse KL on the student's samples); Thinking Machines 2025, On-Policy
    Distillation. Rewards are not used.
    """

    function: ClassVar[str] = f"{TOKENS}:on_policy_distill"
    requires: ClassVar[Needs] = frozenset({"old_logprobs", "teacher_logprobs"})
    name: Literal["on_policy_distill"] = "on_policy_distill"
    kl_coef: float = Field(default=1.0, ge=0)
    """Scale of the advantages."""


class Jsd(AdvantageParams):
    """A policy gradient that lowers the generalised Jensen-Shannon divergence from the teacher.

    Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 1. With b = lambda_coef, s and T the student's and the teacher's
    logprob over the temperature, m = logsumexp(s + log(1 - b), T + log b): A_t = -kl_coef (1 - b) (s - m), the exact
    gradient's (that of m has expectation 0). b = 0: -kl_coef (s - T), reverse KL; b = 1: kl_coef (exp(T - s) - 1),
    forward KL.
    """

    function: ClassVar[str] = f"{TOKENS}:jsd"
    requires: ClassVar[Needs] = frozenset({"old_logprobs", "teacher_logprobs"})
    differs: ClassVar[tuple[str, ...]] = (
        "Trinity-RFT's advantage is minus the divergence at the sampled token, whose gradient leads to the teacher at "
        "lambda_coef 0 alone, and away from it at 1; exact_gradient: false gives it.",
    )
    name: Literal["jsd"] = "jsd"
    lambda_coef: float = Field(default=0.5, ge=0, le=1)
    """b: share of the teacher in the mixture."""
    kl_coef: float = Field(default=1.0, ge=0)
    """Scale of the advantages."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides both logprobs first."""
    exact_gradient: bool = True
    """False: A = -kl_coef J, J = b (T - m) + (1 - b) (s - m), b = 0: s - T, b = 1: T - s; distill/jsd is its mean."""


class ClipB(AdvantageParams):
    """GRPO that drops negative tokens whose update would take most entropy away, by the batch's scores.

    Wang et al. 2026 (Clip_B), arXiv:2602.03392. S = p (H + log p) with p the sampled token's probability and H the
    entropy there. Tokens with A < 0 and S - mean(S) below -mu std(S) take no part; mean and std over the action tokens
    of the batch.
    """

    function: ClassVar[str] = f"{TOKENS}:clip_b"
    compares_samples: ClassVar[bool] = True
    requires: ClassVar[Needs] = frozenset({"rewards", "rollout_logprobs", "distribution"})
    name: Literal["clipb"] = "clipb"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std of the group's rewards."""
    mu: float = Field(default=2.5, ge=0)
    """Standard deviations below the batch's mean at which tokens are dropped."""


class ClipV(AdvantageParams):
    """As clipb, with S compared to its expectation over the vocabulary instead of the batch mean.

    Wang et al. 2026 (Clip_V), arXiv:2602.03392. D = E[S] - S. Tokens with D above mu std(D) take no part: all with A =
    0; with A < 0 the worst, up to max_frac.
    """

    function: ClassVar[str] = f"{TOKENS}:clip_v"
    compares_samples: ClassVar[bool] = True
    requires: ClassVar[Needs] = frozenset({"rewards", "old_logprobs", "distribution"})
    name: Literal["clipv"] = "clipv"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the std of the group's rewards."""
    mu: float = Field(default=8.5, ge=0)
    """Standard deviations of D above which tokens are dropped."""
    max_frac: float = Field(default=1e-4, ge=0, le=1)
    """Largest share of the action tokens that are dropped for A < 0; at least one may be."""


ADVANTAGES: tuple[type[AdvantageParams], ...] = (
    *(Grpo, Reinforce, Rloo, Remax, Opmd, Asymre, Rec, StepWiseGrpo, Gigpo),
    *(Gae, ReinforcePlusPlus, OnPolicyDistill, Jsd, ClipB, ClipV),
)
"""Those that are built in."""
