"""Losses by hand, their gradients, and the KL gradients on a policy small enough to enumerate."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs
from engines.algorithms.kl import estimate, k1, k2, k3
from engines.algorithms.losses import ppo_clip, rec, sft
from engines.algorithms.objective import Objective
from engines.algorithms.reduce import Counts, StatTotals, aggregate, counts_by_part
from engines.algorithms.spec import (
    Aggregation,
    Algorithm,
    Cispo,
    EntropyBonus,
    Grpo,
    Gspo,
    KlInLoss,
    LossParams,
    NoEntropy,
    NoKl,
    PpoClip,
    RecLoss,
    Sapo,
    Sft,
    Topr,
    function_of,
    name_of,
)

MODES: list[Aggregation] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def at_ratio(ratios: list[float], advantages: list[float]) -> LossInputs:
    """Tokens of one row with these ratios to the old policy."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        row_of_token=torch.zeros(len(ratios), dtype=torch.int64),
        num_actions=torch.tensor([len(ratios)]),
        old_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )


def test_ppo_clip_by_hand() -> None:
    """low 0.2, high 0.28, c 3. A > 0: r, then 1.28; A < 0: 0.8, r, then 3."""
    x = at_ratio([0.5, 1.2, 1.5, 0.5, 1.2, 5.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    loss = ppo_clip(x, PpoClip(clip_range_low=0.2, clip_range_high=0.28))
    expected = [-1.0, -2.4, -2.56, 1.6, 2.4, 6.0]
    torch.testing.assert_close(loss.value.detach(), torch.tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss.value.sum(), x.logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.4, 0, 0, 2.4, 0], dtype=torch.float64))


def test_clip_fractions_count_exactly_the_tokens_without_gradient() -> None:
    ratios = [0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1] * 2
    x = at_ratio(ratios, [1.0] * 8 + [-1.0] * 8)
    loss = ppo_clip(x, PpoClip(clip_range_low=0.2, clip_range_high=0.28))
    (gradient,) = torch.autograd.grad(loss.value.sum(), x.logprobs)
    counted = loss.stats["policy/clip_fraction"].value + loss.stats["policy/clip_fraction_lower"].value
    assert counted == (gradient == 0).sum() == 6


@pytest.mark.parametrize("ratio", [0.8, 1.28, 3.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_beside_a_bound_is_the_finite_difference(ratio: float, advantage: float) -> None:
    p = PpoClip(clip_range_low=0.2, clip_range_high=0.28)
    for side in (-1e-3, 1e-3):
        x = at_ratio([ratio + side], [advantage])
        (gradient,) = torch.autograd.grad(ppo_clip(x, p).value.sum(), x.logprobs)
        step = 1e-6
        up, down = (ppo_clip(at_ratio([(ratio + side) * math.exp(s)], [advantage]), p).value for s in (step, -step))
        assert float(gradient) == pytest.approx(float((up - down).detach()) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("log_ratio", [-90.0, 25.0, 90.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_are_finite(log_ratio: float, advantage: float) -> None:
    x = LossInputs(
        logprobs=torch.tensor([0.0], requires_grad=True),
        row_of_token=torch.tensor([0]),
        num_actions=torch.tensor([1]),
        old_logprobs=torch.tensor([-log_ratio]),
        advantages=torch.tensor([advantage]),
    )
    loss = ppo_clip(x, PpoClip())
    (gradient,) = torch.autograd.grad(loss.value.sum(), x.logprobs)
    assert torch.isfinite(loss.value).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
@pytest.mark.parametrize("name", ["k2", "k3", "low_var_kl", "corrected_k3"])
def test_kl_to_a_far_reference_is_finite(name: str, log_ratio: float) -> None:
    """In float32, where e^89 is inf; the squared norm of the gradient too."""
    logprobs = torch.tensor([-95.0, -95.0], requires_grad=True)
    divergence = estimate(name, logprobs, logprobs.detach() - log_ratio, logprobs.detach() - torch.tensor([-90.0, 90]))
    (gradient,) = torch.autograd.grad(divergence.sum(), logprobs)
    assert torch.isfinite(divergence).all()
    assert torch.isfinite(torch.linalg.vector_norm(gradient))


def test_rec_weighs_a_huge_advantage_finitely() -> None:
    """A exp(A), the exponent at most 20."""
    loss = rec(at_ratio([1.0], [1e6]), RecLoss(weight="advantage"))
    assert float(loss.value.detach()) == pytest.approx(1e6 * math.exp(20))


def test_sequence_masking_leaves_out_only_bad_tokens_of_sequences_that_moved() -> None:
    """Rows: moved with A < 0, stayed with A < 0, moved with A > 0. Moved: old - new = 0.5 > 0.1."""
    moved = torch.tensor([-0.5, -0.5, 0.0, -0.5], dtype=torch.float64)
    x = LossInputs(
        logprobs=(moved - 1).requires_grad_(),
        row_of_token=torch.tensor([0, 0, 1, 2]),
        num_actions=torch.tensor([2, 1, 1]),
        old_logprobs=torch.full((4,), -1.0, dtype=torch.float64),
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0], dtype=torch.float64),
    )
    loss = ppo_clip(x, PpoClip(enable_sequence_masking=True, delta_sequence_masking=0.1))
    torch.testing.assert_close(loss.value.detach(), torch.tensor([0, 0, 1, -math.exp(-0.5)], dtype=torch.float64))
    assert loss.stats["policy/sequence_masked_fraction"].value == 2


def enumerated_gradients(estimator: str) -> tuple[Tensor, Tensor, Tensor]:
    """Over all 3 actions of p: expected gradient of the estimator as a loss, gradients of KL(p || q) and KL(q || p)."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    values = {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, reference)
    expected = torch.autograd.grad((logprobs.exp().detach() * values).sum(), logits, retain_graph=True)[0]
    forward_kl = (logprobs.exp() * (logprobs - reference)).sum()
    reverse_kl = (reference.exp() * (reference - logprobs)).sum()
    exact = torch.autograd.grad(forward_kl, logits, retain_graph=True)[0]
    return expected, exact, torch.autograd.grad(reverse_kl, logits)[0]


def test_kl_gradients_on_an_enumerable_policy() -> None:
    as_loss, policy_to_reference, reference_to_policy = enumerated_gradients("k2")
    torch.testing.assert_close(as_loss, policy_to_reference)
    torch.testing.assert_close(enumerated_gradients("k3")[0], reference_to_policy)
    torch.testing.assert_close(enumerated_gradients("k1")[0], torch.zeros(3, dtype=torch.float64))


def random_inputs(lengths: list[int], dtype: torch.dtype = torch.float64) -> LossInputs:
    generator = torch.Generator().manual_seed(sum(lengths))
    count = sum(lengths)

    def normal(scale: float) -> Tensor:
        return (torch.randn(count, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return LossInputs(
        logprobs=(normal(0.3) - 2).requires_grad_(),
        row_of_token=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_actions=torch.tensor(lengths),
        old_logprobs=normal(0.3) - 2,
        advantages=normal(1.0),
        reference_logprobs=normal(0.3) - 2,
        entropies=normal(0.3) + 2,
    )


def part(x: LossInputs, rows: list[int]) -> tuple[LossInputs, Tensor]:
    """Some rows as a micro-batch of their own, and which tokens they are."""
    chosen = torch.isin(x.row_of_token, torch.tensor(rows))
    renumbered = torch.repeat_interleave(torch.arange(len(rows)), x.num_actions[rows])

    def pick(values: Tensor | None) -> Tensor:
        assert values is not None
        return values[chosen]

    cut = LossInputs(
        logprobs=x.logprobs[chosen].detach().requires_grad_(),
        row_of_token=renumbered,
        num_actions=x.num_actions[rows],
        old_logprobs=pick(x.old_logprobs),
        advantages=pick(x.advantages),
        reference_logprobs=pick(x.reference_logprobs),
        entropies=pick(x.entropies),
    )
    return cut, chosen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0], [1, 2, 3]]])
def test_loss_gradient_and_stats_do_not_depend_on_the_cut(mode: Aggregation, cut: list[list[int]]) -> None:
    algorithm = Algorithm(
        advantage=Grpo(),
        loss=PpoClip(enable_sequence_masking=True),
        kl=KlInLoss(kl_coef=0.1),
        entropy=EntropyBonus(entropy_coef=0.1),
        aggregation=mode,
    )
    lengths = [1, 7, 3, 12]
    x, counts = random_inputs(lengths), counts_by_part(lengths, [2, 8, 3, 20], [False] * 4)
    objective = Objective(algorithm)
    whole, whole_stats = objective.loss(x, counts)
    (whole_gradient,) = torch.autograd.grad(whole, x.logprobs)
    loss, gradient, totals = 0.0, torch.zeros_like(whole_gradient), StatTotals()
    for rows in cut:
        inputs, chosen = part(x, rows)
        share, stats = objective.loss(inputs, counts)
        loss += float(share.detach())
        gradient[chosen] = torch.autograd.grad(share, inputs.logprobs)[0]
        totals.add(stats)
    assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-15)
    expected = StatTotals()
    expected.add(whole_stats)
    for key, number in expected.numbers(counts).items():
        assert totals.numbers(counts)[key].value == pytest.approx(number.value, rel=1e-12, abs=1e-15), key


def test_length_bias_in_closed_form() -> None:
    """Rows of 2 and 8 tokens with losses 1 and 3 per token, the longest response 10 tokens."""
    lengths = [2, 8]
    x = random_inputs(lengths)
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)[x.row_of_token]
    loss = sft(LossInputs(-values, x.row_of_token, x.num_actions), Sft())
    counts = Counts.of(lengths, [2, 10])
    totals = [float(aggregate(loss, x, mode, counts)) for mode in MODES]
    assert totals == pytest.approx([26 / 10, (2 + 24) / 2, (1 + 3) / 2, 26 / 10])


def test_no_action_tokens_give_zero_and_no_nan() -> None:
    empty = LossInputs(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for mode in MODES:
        assert aggregate(sft(empty, Sft()), empty, mode, Counts.of([], [])) == 0


def test_float32_agrees_with_float64() -> None:
    algorithm = Algorithm(advantage=Grpo(), loss=PpoClip(), kl=KlInLoss(), entropy=EntropyBonus(entropy_coef=0.01))
    lengths = [5, 9, 2]
    counts, objective = counts_by_part(lengths, lengths, [False] * 3), Objective(algorithm)
    single, double = (objective.loss(random_inputs(lengths, d), counts) for d in (torch.float32, torch.float64))
    assert float(single[0].detach()) == pytest.approx(float(double[0].detach()), rel=1e-5)


RATIO_LOSSES = [RecLoss(weight="importance_sampling"), Cispo(), Gspo(), Sapo(), Topr(), PpoClip()]


@pytest.mark.parametrize("params", RATIO_LOSSES, ids=name_of)
@pytest.mark.parametrize("exponent", [25.0, 90.0])
def test_extreme_ratios_are_finite_in_float32(exponent: float, params: LossParams) -> None:
    x = at_ratio([math.exp(exponent)], [-1.0])
    assert x.old_logprobs is not None
    assert x.advantages is not None
    single = dataclasses.replace(
        x, logprobs=x.logprobs.float(), old_logprobs=x.old_logprobs.float(), advantages=x.advantages.float()
    )
    value = function_of(params)(single, params).value
    (gradient,) = torch.autograd.grad(value.sum(), x.logprobs)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(gradient).all())


def test_weight_of_rec_is_the_ratio_itself() -> None:
    """Not one that is clamped as in PPO."""
    x = at_ratio([math.exp(25.0)], [-1.0])
    value = rec(x, RecLoss(weight="importance_sampling")).value.detach()
    assert float(value) == pytest.approx(math.exp(25.0) * float(x.logprobs.detach()), rel=1e-9)


@pytest.mark.parametrize("kind", ["kl", "entropy"])
def test_none_with_a_coefficient_is_still_no_term(kind: str) -> None:
    none = {"kl": NoKl(kl_coef=0.05, adaptive=True, target_kl=0.1, horizon=10), "entropy": NoEntropy(entropy_coef=0.05)}
    parts: dict[str, Any] = {kind: none[kind]}
    algorithm = Algorithm(advantage=Grpo(), loss=PpoClip(), **parts)
    assert algorithm.needs == {"rewards", "old_logprobs", "rollout_logprobs"}
    _, stats = Objective(algorithm).loss(random_inputs([2, 3]), counts_by_part([2, 3], [2, 3], [False] * 2))
    assert f"loss/{kind}" not in stats
