"""On a policy whose every answer can be enumerated, expected gradients are the exact ones: of rewards, of divergences.

By definition not exact, and so tested as such: advantages over the std of the group, baselines that know the row's own
reward without leaving it out, ratios beyond a clip, divergences at the sampled token that are no unbiased estimates.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from engines.algorithms.advantages import AdvantageInputs, Advantages, group_indices
from engines.algorithms.correction import corrected
from engines.algorithms.inputs import LossInputs, TokenLoss
from engines.algorithms.kl import penalty
from engines.algorithms.spec import (
    AdvantageParams,
    Asymre,
    Cispo,
    ClipCov,
    Grpo,
    Gspo,
    ImportanceSampling,
    Jsd,
    KlCov,
    KlInLoss,
    LossParams,
    Mix,
    OnPolicyDistill,
    Opmd,
    OpmdLoss,
    PpoClip,
    Rec,
    RecLoss,
    Reinforce,
    Remax,
    Rloo,
    RolloutCorrection,
    Sapo,
    Sppo,
    Topr,
    function_of,
)
from engines.errors import ConfigError
from engines.experience import EID
from tests.properties.conftest import Explore
from tests.properties.variants import KL_IN_LOSS, REC, algorithm

VOCABULARY = 3
SEEDS = st.integers(0, 2**32 - 1)


class Enumerated:
    """All answers of `length` tokens from a table of logits by (previous token, token); token 0 comes first."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.answers = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
        """[S, length]."""
        random = np.random.default_rng(seed)
        self.logits = self.table(random).requires_grad_()
        self.rewards = torch.from_numpy(random.normal(size=len(self.answers)))
        """[S]."""
        self.other = self.table(random)
        """Logits of another policy: a reference, a teacher, an older one."""
        self.third = self.table(random)

    @staticmethod
    def table(random: np.random.Generator) -> Tensor:
        return torch.from_numpy(random.uniform(-0.8, 0.8, (VOCABULARY, VOCABULARY)))

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, length]."""
        previous = torch.cat([torch.zeros_like(self.answers[:, :1]), self.answers[:, :-1]], 1)
        return torch.log_softmax(logits, -1)[previous, self.answers]

    def probabilities(self, logits: Tensor) -> Tensor:
        """[S] of whole answers."""
        return self.logprobs(logits).sum(1).exp()

    def inputs(self, advantages: Tensor, old: Tensor | None = None, **fields: Any) -> LossInputs:
        """Every answer once; advantages [S], or [S, length]; old logits, by default the policy's own."""
        size = len(self.answers)
        old_logprobs = self.logprobs(self.logits.detach() if old is None else old)
        spread = advantages[:, None].expand(size, self.length) if advantages.ndim == 1 else advantages
        return LossInputs(
            logprobs=self.logprobs(self.logits).flatten(),
            row_of_token=torch.arange(size).repeat_interleave(self.length),
            num_actions=torch.full((size,), self.length),
            old_logprobs=old_logprobs.flatten(),
            advantages=spread.flatten(),
            selected=torch.zeros(size * self.length, dtype=torch.bool),
            **fields,
        )

    def expected_gradient(self, loss: TokenLoss, sampler: Tensor) -> Tensor:
        """Of the sum over the tokens of an answer, answers drawn from the sampler's logits."""
        by_answer = loss.value.view(len(self.answers), -1)
        if by_answer.shape[1] != self.length:  # a mean over the tokens
            by_answer = by_answer * self.length
        weights = self.probabilities(sampler).detach()
        return torch.autograd.grad((weights * by_answer.sum(1)).sum(), self.logits)[0]

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.logits)[0]

    @property
    def policy_gradient(self) -> Tensor:
        """Of the expected reward."""
        return self.gradient((self.probabilities(self.logits) * self.rewards).sum())

    def kl(self, one: Tensor, other: Tensor) -> Tensor:
        """KL(one, other) of whole answers."""
        difference = (self.logprobs(one) - self.logprobs(other)).sum(1)
        return (self.probabilities(one) * difference).sum()


def computed(params: Any, x: LossInputs) -> TokenLoss:
    return function_of(params)(x, params)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


ON_POLICY: list[LossParams] = [
    *(PpoClip(), PpoClip(fallback_to_policy_gradient=True), PpoClip(enable_sequence_masking=True)),
    *(ClipCov(), KlCov(), Gspo(), Cispo(), Cispo(enable_mask_clip=True), Sapo(), Topr(), Sppo(), OpmdLoss(tau=0.0)),
    ImportanceSampling(),
]
UNWEIGHTED_REC = [
    each.loss for each in REC.values() if isinstance(each.loss, RecLoss) and each.loss.weight != "advantage"
]


@pytest.mark.parametrize("params", [*ON_POLICY, *UNWEIGHTED_REC], ids=str)
def test_at_ratio_1_the_gradient_is_that_of_the_expected_reward(explore: Explore, params: LossParams) -> None:
    """Every policy loss, answers of two tokens. A forward-KL regulariser has expectation 0, k2 is at its minimum."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(2, seed)
        loss = computed(params, world.inputs(world.rewards))
        close(world.expected_gradient(loss, world.logits), -world.policy_gradient)


def test_opmd_and_mix_have_a_share_of_it(explore: Explore) -> None:
    """opmd: 1 / (1 + tau). mix: 1 - mu, and mu of the expert's negative log-likelihood."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(2, seed)
        damped = computed(OpmdLoss(tau=3.0), world.inputs(world.rewards))
        close(world.expected_gradient(damped, world.logits), -world.policy_gradient / 4)
        experts = torch.arange(len(world.answers) * 2) % 2 == 0
        sampled_loss, expert_loss = computed(Mix(mu=0.3), world.inputs(world.rewards))  # type: ignore[misc]
        close(world.expected_gradient(sampled_loss, world.logits), -0.7 * world.policy_gradient)
        assert not expert_loss.value.numel()
        only = world.inputs(world.rewards, is_expert=torch.ones_like(experts))
        sampled_loss, expert_loss = computed(Mix(mu=0.3), only)  # type: ignore[misc]
        likelihood = (world.probabilities(world.other) * world.logprobs(world.logits).sum(1)).sum()
        close(world.expected_gradient(expert_loss, world.other), -0.3 * world.gradient(likelihood))
        assert not sampled_loss.value.numel()


OFF_POLICY: list[LossParams] = [
    ImportanceSampling(),
    KlCov(),
    RecLoss(weight="importance_sampling"),
    Cispo(clip_range_high=99),
]


@pytest.mark.parametrize("params", OFF_POLICY, ids=str)
def test_an_unclipped_ratio_makes_the_gradient_of_an_older_sampler_exact(explore: Explore, params: LossParams) -> None:
    """Of answers of one token: a ratio per token knows nothing of the tokens before."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        loss = computed(params, world.inputs(world.rewards, old=world.other))
        close(world.expected_gradient(loss, world.other), -world.policy_gradient)
        longer = Enumerated(2, seed)
        loss = computed(params, longer.inputs(longer.rewards, old=longer.other))
        assert not torch.allclose(longer.expected_gradient(loss, longer.other), -longer.policy_gradient)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["full", "truncate", "mask"])
def test_the_correction_makes_the_gradient_of_another_sampler_exact(explore: Explore, level: Any, name: Any) -> None:
    """Per row for answers of two tokens, per token for those of one; capped where no weight reaches the cap.

    Decoupled PPO too: the ratio to a proximal policy times its own to the sampler is the whole ratio.
    """

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(2 if level == "sequence" else 1, seed)
        params = RolloutCorrection(name=name, level=level, cap=1e3)
        rollout = world.logprobs(world.other).flatten()
        x = world.inputs(world.rewards, rollout_logprobs=rollout)
        loss = corrected(computed(PpoClip(), x), x, params)
        close(world.expected_gradient(loss, world.other), -world.policy_gradient)
        if level == "token":
            x = world.inputs(world.rewards, old=world.third, rollout_logprobs=rollout)
            loss = corrected(computed(ImportanceSampling(), x), x, params)
            close(world.expected_gradient(loss, world.other), -world.policy_gradient)


def test_a_cap_that_is_reached_is_a_bias() -> None:
    world = Enumerated(1, 0)
    x = world.inputs(world.rewards, rollout_logprobs=world.logprobs(world.other).flatten())
    loss = corrected(computed(PpoClip(), x), x, RolloutCorrection(cap=1.0))
    assert not torch.allclose(world.expected_gradient(loss, world.other), -world.policy_gradient)


def group_gradient(world: Enumerated, params: AdvantageParams, size: int, rewards: Tensor) -> Tensor:
    """Expected gradient over all groups of `size` answers, mean over the rows of a group."""
    probabilities = world.probabilities(world.logits).detach()
    advantages = torch.zeros(len(world.answers), dtype=torch.float64)
    for group in itertools.product(range(len(world.answers)), repeat=size):
        values = rewards[list(group)].numpy()
        x = AdvantageInputs(
            token_rewards=values,
            rewards=values,
            lengths=np.ones(size, np.int64),
            groups=group_indices(["a"] * size),
            eids=[EID(0, 0, run) for run in range(size)],
            infos=[{"reward_baseline": 0.7}] * size,
        )
        weight = float(probabilities[list(group)].prod())
        for answer, value in zip(group, function_of(params)(x, params).values, strict=True):
            advantages[answer] += weight * value / size
    expected = advantages / probabilities  # the mean advantage of an answer
    return world.expected_gradient(computed(ImportanceSampling(), world.inputs(expected)), world.logits)


SHARES: list[tuple[AdvantageParams, bool]] = [
    *((params, False) for params in (Rloo(), Reinforce(), Remax())),
    *((params, True) for params in (Grpo(normalize=False), Opmd(), Rec(), Asymre(baseline_shift=-0.4))),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("params", "knows_itself"), SHARES, ids=str)
def test_a_baseline_is_unbiased(params: AdvantageParams, knows_itself: bool, size: int) -> None:
    """Leave-one-out and greedy baselines exactly; a mean with the row itself in it leaves (n - 1) / n."""
    world = Enumerated(1, size)
    share = (size - 1) / size if knows_itself else 1.0
    close(group_gradient(world, params, size, world.rewards), -share * world.policy_gradient)


@pytest.mark.parametrize("params", [Grpo(), Rec(std_normalize=True), Opmd(opmd_baseline="logavgexp")], ids=str)
def test_right_or_wrong_points_along_the_policy_gradient_whatever_the_baseline(params: AdvantageParams) -> None:
    """With rewards of 0 and 1 an std only scales the gradient of a task; with others it turns it."""
    world = Enumerated(1, 3)
    others = group_gradient(world, params, 3, world.rewards)
    assert float(torch.cosine_similarity(others.flatten(), -world.policy_gradient.flatten(), 0)) < 1 - 1e-6
    world.rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    found = group_gradient(world, params, 3, world.rewards)
    assert float(torch.cosine_similarity(found.flatten(), -world.policy_gradient.flatten(), 0)) == pytest.approx(1)


def kl_gradient(world: Enumerated, name: Any, sampler: Tensor) -> tuple[Tensor, Tensor]:
    """Expected value and gradient of a KL term with coefficient 0.5, over 0.5."""
    reference = world.logprobs(world.other).flatten()
    x = world.inputs(world.rewards, old=sampler, reference_logprobs=reference)
    loss = computed(KlInLoss(name=name, kl_coef=0.5), x)
    value = (world.probabilities(sampler) * loss.value.detach()).sum() / 0.5
    return value, world.expected_gradient(loss, sampler) / 0.5


def test_gradient_of_each_kl_in_the_loss(explore: Explore) -> None:
    """k2: of KL(policy, reference). k3, and low_var_kl where it is not clipped: of KL(reference, policy)."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        sampler = world.logits.detach()
        forward, backward = world.kl(world.logits, world.other), world.kl(world.other, world.logits)
        to_reference, from_reference = world.gradient(forward), world.gradient(backward)
        close(kl_gradient(world, "k2", sampler)[1], to_reference)
        for name in ("k3", "low_var_kl"):
            value, gradient = kl_gradient(world, name, sampler)
            close(gradient, from_reference)
            close(value, forward.detach())  # the value is of the other one


def test_corrected_k3_is_exact_off_policy(explore: Explore) -> None:
    """Value and gradient of KL(policy, reference), where no token is twice as likely as it was."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        mixture = (torch.softmax(world.logits.detach(), -1) + torch.softmax(world.third, -1)) / 2
        value, gradient = kl_gradient(world, "corrected_k3", mixture.log())
        forward = world.kl(world.logits, world.other)
        close(value, forward.detach())
        close(gradient, world.gradient(forward))
        uncorrected = kl_gradient(world, "k3", mixture.log())[1]
        assert not torch.allclose(uncorrected, gradient)


@pytest.mark.parametrize(("name", "why"), [("k1", "expectation 0: it would add noise alone"), ("abs", "of no KL")])
def test_estimators_without_a_kl_gradient_are_refused_in_the_loss(name: Any, why: str) -> None:
    """With the reason, which the enumeration bears out; in the reward both are welcome."""
    with pytest.raises(ValidationError, match=why):
        KlInLoss(name=name)
    with pytest.raises(ConfigError, match=rf"kl_loss_fn = '{name}'.*{why}"):
        algorithm("grpo", kl_loss_fn=name)
    assert algorithm("grpo", kl_penalty_fn=name, kl_penalty_fn_args={"kl_coef": 0.1}).has_reward_penalty
    world = Enumerated(1, 0)
    logprobs, reference = world.logprobs(world.logits), world.logprobs(world.other)
    estimates = penalty(name, logprobs, reference)
    gradient = world.gradient((logprobs.exp().detach() * estimates).sum())
    if name == "k1":
        assert float(gradient.abs().max()) < 1e-15
    for one, other in ((world.logits, world.other), (world.other, world.logits)):
        exact = world.gradient(world.kl(one, other))
        assert float(torch.cosine_similarity(gradient.flatten(), exact.flatten(), 0)) < 0.999


def test_each_kl_in_the_reward_has_the_expectation_that_it_claims(explore: Explore) -> None:
    """k1, k3, corrected_k3 (of the policy that sampled): KL(policy, reference) exactly. k2: to third order."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        logprobs = world.logprobs(world.logits.detach())
        probabilities, divergence = logprobs.exp(), world.kl(world.logits, world.other).detach()
        for name in ("k1", "k3", "low_var_kl", "corrected_k3"):
            close((probabilities * penalty(name, logprobs, world.logprobs(world.other))).sum(), divergence)
        near = world.logits.detach() + 1e-3 * world.other
        exact = float(world.kl(world.logits, near).detach())
        estimated = float((probabilities * penalty("k2", logprobs, world.logprobs(near))).sum())
        assert estimated == pytest.approx(exact, rel=1e-2)


def test_k1_in_the_reward_is_the_gradient_of_the_regularised_reward(explore: Explore) -> None:
    """E[R] - c KL(policy, reference), over whole answers of two tokens: why k1 belongs there."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(2, seed)
        logprobs = world.logprobs(world.logits.detach())
        taken_off = penalty("k1", logprobs, world.logprobs(world.other)).sum(1)
        loss = computed(ImportanceSampling(), world.inputs(world.rewards - 0.3 * taken_off))
        regularised = (world.probabilities(world.logits) * world.rewards).sum() - 0.3 * world.kl(
            world.logits, world.other
        )
        close(world.expected_gradient(loss, world.logits), -world.gradient(regularised))


def distillation(world: Enumerated, params: AdvantageParams, answers: slice = slice(None)) -> Advantages:
    """Of answers of one token, each once."""
    student, teacher = (world.logprobs(each).flatten()[answers] for each in (world.logits.detach(), world.other))
    size = len(student)
    x = AdvantageInputs(
        token_rewards=np.zeros(size),
        rewards=np.zeros(size),
        lengths=np.ones(size, np.int64),
        groups=group_indices([str(row) for row in range(size)]),
        old_logprobs=student.numpy(),
        teacher_logprobs=teacher.numpy(),
    )
    return function_of(params)(x, params)


def distilled(world: Enumerated, params: AdvantageParams) -> Tensor:
    """Expected gradient of a distillation's loss at ratio 1."""
    values = torch.from_numpy(distillation(world, params).values)
    return world.expected_gradient(computed(PpoClip(), world.inputs(values)), world.logits)


def divergence(world: Enumerated, share: float) -> Tensor:
    """b KL(T, M) + (1 - b) KL(S, M), M = b T + (1 - b) S (Agarwal 2023, eq. 1); KL(S, T), KL(T, S) at the ends."""
    if share in (0, 1):
        return world.kl(world.logits, world.other) if share == 0 else world.kl(world.other, world.logits)
    student, teacher = world.probabilities(world.logits), world.probabilities(world.other)
    mixture = share * teacher + (1 - share) * student
    of_teacher = (teacher * (teacher / mixture).log()).sum()
    return share * of_teacher + (1 - share) * (student * (student / mixture).log()).sum()


def test_distillation_follows_kl_to_the_teacher(explore: Explore) -> None:
    """on_policy_distill, and jsd with lambda_coef 0: the gradient of KL(student, teacher)."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        exact = world.gradient(world.kl(world.logits, world.other))
        close(distilled(world, OnPolicyDistill()), exact)
        close(distilled(world, Jsd(lambda_coef=0.0)), exact)
        close(distilled(world, Jsd(lambda_coef=0.0, exact_gradient=False)), exact)
        close(distilled(world, Jsd(lambda_coef=1.0)), world.gradient(world.kl(world.other, world.logits)))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_jsd_follows_the_divergence_to_the_mixture(explore: Explore, share: float) -> None:
    @explore(SEEDS)
    def holds(seed: int) -> None:
        world = Enumerated(1, seed)
        close(distilled(world, Jsd(lambda_coef=share)), world.gradient(divergence(world, share)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_measured_divergence_is_the_exact_one_in_expectation(explore: Explore, share: float) -> None:
    """And never negative, on whatever was sampled: that of the reference is, and falls when it should rise."""

    @explore(SEEDS)
    def holds(seed: int) -> None:
        world, params = Enumerated(1, seed), Jsd(lambda_coef=share)
        answers = range(len(world.answers))
        measured = [distillation(world, params, slice(i, i + 1)).stats["distill/jsd"] for i in answers]
        assert min(measured) >= 0
        expected = (world.probabilities(world.logits) * torch.tensor(measured, dtype=torch.float64)).sum()
        close(expected, divergence(world, share))


def test_the_divergence_at_the_sampled_token_follows_none() -> None:
    """By definition of the reference system: the opposite of reverse KL at lambda_coef 1, either sign between."""
    worlds = [Enumerated(1, seed) for seed in range(8)]
    exact = [each.gradient(each.kl(each.logits, each.other)) for each in worlds]
    for world, gradient in zip(worlds, exact, strict=True):
        close(distilled(world, Jsd(lambda_coef=1.0, exact_gradient=False)), -gradient)
    between = [distilled(each, Jsd(exact_gradient=False)) for each in worlds]
    assert {float((one * other).sum()) > 0 for one, other in zip(between, exact, strict=True)} == {True, False}


def test_every_kl_of_the_loss_was_tested() -> None:
    assert set(KL_IN_LOSS) == {"k2", "k3", "low_var_kl", "corrected_k3"}
