"""Advantages against those that TRL's trainers compute from the rewards of stored answers.

| TRL | here |
|---|---|
| GRPOTrainer: scale_rewards group, batch, none | grpo: std_cal_level group, batch; normalize: false |
| 1e-4 added to the std | epsilon |
| RLOOTrainer: beta | rloo: kl_penalty_fn k1, kl_coef |
| IW-OPD with gamma 0 | on_policy_distill |
| generalised JSD, beta 1 | jsd, lambda_coef 0 |

TRL keeps rewards and advantages in float32.
"""

# The extra `bench` may not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.advantage_stage import penalised, with_advantages
from engines.algorithms.advantages import AdvantageInputs, Float64s
from engines.algorithms.inputs import LossInputs
from engines.algorithms.kl import penalty
from engines.algorithms.losses import opmd
from engines.algorithms.presets import resolve
from engines.algorithms.spec import Jsd, OpmdLoss, function_of
from engines.algorithms.token_advantages import jsd
from engines.config import AlgorithmConfig
from engines.experience import EID, Experience
from engines.intake import Limits, take_in
from tests.second_opinion import trl_trainers
from tests.second_opinion.padded import LENGTHS, NUM_ROWS, batch

REWARDS = (1.0, 0.25, -0.5, 0.75, 0.75, 2.0)
GROUP_SIZE = 3
PROMPTS = ["a"] * GROUP_SIZE + ["b"] * GROUP_SIZE


def ours(rewards: tuple[float, ...], kl: Float64s | None = None, **changes: Any) -> list[float]:
    """[R] our advantages of rows in groups of three; `kl` is taken off the rewards, [N] estimates."""
    settings = resolve(AlgorithmConfig(kl_loss_fn="none", bypass_old_logprobs=False, **changes))
    exps = [
        Experience(tokens=np.full(1 + length, 5), reward=reward, eid=EID(0, row // GROUP_SIZE, row % GROUP_SIZE, 0, ""))
        for row, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=True))
    ]
    rows = take_in(exps, settings, Limits(101, 64)).rows
    if kl is not None:
        rows = penalised(rows, kl, settings.kl_penalty.kl_coef)
    trained, _ = with_advantages(rows, settings, 0)
    return [float(values[0]) for values in trained.columns["advantages"]]


def theirs(trainer: Any, rewards: tuple[float, ...]) -> Tensor:
    completions = [[5] * length for length in LENGTHS]
    return trl_trainers.scored(trainer, completions, rewards, PROMPTS)["advantages"]


SIZES: dict[str, Any] = {"per_device_train_batch_size": NUM_ROWS, "num_generations": GROUP_SIZE}


@pytest.mark.parametrize(
    ("scale_rewards", "changes"),
    [("group", {}), ("batch", {"std_cal_level": "batch"}), ("none", {"normalize": False})],
)
def test_grpo(folder: Path, scale_rewards: str, changes: dict[str, Any]) -> None:
    trainer = trl_trainers.grpo(folder, scale_rewards=scale_rewards, **SIZES)
    found = ours(REWARDS, advantage_fn_args={"epsilon": 1e-4} | changes)
    assert np.ptp(found) > 1
    assert theirs(trainer, REWARDS).tolist() == pytest.approx(found, rel=1e-5)


def test_equal_rewards_are_no_signal_here_and_rounding_noise_there(folder: Path) -> None:
    """TRL's float32 mean of three equal rewards is not the reward; over 1e-4 the rest is an advantage. Ours is 0."""
    rewards = (0.85, 0.85, 0.85, 0.0, 0.0, 1.0)
    found = theirs(trl_trainers.grpo(folder, **SIZES), rewards)
    assert ours(rewards)[:3] == [0, 0, 0]
    assert 1e-5 < float(found[:3].abs().max()) < 1e-3


def test_rloo(folder: Path) -> None:
    trainer = trl_trainers.rloo(folder, lambda model: (torch.zeros(NUM_ROWS, max(LENGTHS)), None), beta=0.0, **SIZES)
    found = ours(REWARDS, algorithm_type="rloo")
    assert found[0] == pytest.approx(1.0 - (0.25 - 0.5) / 2)
    assert theirs(trainer, REWARDS).tolist() == pytest.approx(found, rel=1e-6)


def test_rloo_with_kl_in_the_reward(folder: Path) -> None:
    """The k1 estimates of a row's tokens, summed, come off its reward before the baseline is taken."""
    x = batch()
    trainer = trl_trainers.rloo(folder, lambda model: (x.old, None), beta=0.3, **SIZES)
    trainer.given = lambda model: (x.reference if model is trainer.ref_model else x.old, None)
    responses = x.completion_mask.bool()
    kl = penalty("k1", x.old[responses], x.reference[responses]).numpy()
    changes: dict[str, Any] = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.3}}
    found = ours(REWARDS, kl, algorithm_type="rloo", **changes)
    assert found != pytest.approx(ours(REWARDS, algorithm_type="rloo"), rel=1e-2)
    assert theirs(trainer, REWARDS).tolist() == pytest.approx(found, rel=1e-6)


def logits_and_teacher(seed: int = 0) -> tuple[Tensor, Tensor]:
    """[B, T, V] logits of a student, with gradient, and of a teacher, over 11 tokens, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_ROWS, max(LENGTHS), 11)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher


def test_on_policy_distillation(folder: Path) -> None:
    """TRL's loss is -A lp, A = teacher - sampler: ours with policy_loss_fn opmd at tau 0, in the logits too."""
    with trl_trainers.quiet():
        from trl.experimental.iw_opd import IWOPDTrainer

    x, (logits, teacher_logits) = batch(), logits_and_teacher()
    tokens = torch.arange(NUM_ROWS * max(LENGTHS)).view(NUM_ROWS, -1) % 11
    trains = x.mask.bool()
    logprobs, teacher = (
        torch.log_softmax(each, -1).gather(2, tokens[..., None])[..., 0] for each in (logits, teacher_logits)
    )
    trainer: Any = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    labels = torch.where(trains, tokens, -100)
    their_loss = IWOPDTrainer._compute_iw_opd_loss(trainer, logits, tokens, labels, teacher, x.rollout)
    flat = x.flat()
    settings = resolve(AlgorithmConfig(algorithm_type="on_policy_distill"))
    inputs = AdvantageInputs(
        token_rewards=np.zeros(int(trains.sum())),
        rewards=np.zeros(NUM_ROWS),
        lengths=flat.num_actions.numpy(),
        groups=(),
        old_logprobs=x.rollout[trains].numpy(),
        teacher_logprobs=teacher[trains].numpy(),
    )
    assert settings.advantage is not None
    advantages = torch.from_numpy(function_of(settings.advantage)(inputs, settings.advantage).values)
    loss = opmd(
        LossInputs(logprobs[trains], flat.row_of_token, flat.num_actions, advantages=advantages), OpmdLoss(tau=0.0)
    )
    our_loss = loss.value.sum() / trains.sum()
    assert float(our_loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-12)
    our, their = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (our_loss, their_loss))
    torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-15)


def test_jsd_at_its_ends(folder: Path) -> None:
    """TRL sums over the vocabulary; ours is one sample of it. At lambda_coef 0 its mean over the student is their
    reverse KL, beta 1. Between the ends they differ: the mixture's half that belongs to the teacher is a mean over the
    teacher there, and over the student's samples here (arXiv:2306.13649 on the student's data alone, Trinity-RFT's).
    """
    with trl_trainers.quiet():
        from trl.experimental.iw_opd import IWOPDTrainer

    student, teacher = logits_and_teacher()
    student_logs, teacher_logs = (torch.log_softmax(each.detach(), -1) for each in (student, teacher))
    count = student_logs.numel()

    def expected(share: float) -> float:
        inputs = AdvantageInputs(
            token_rewards=np.zeros(count),
            rewards=np.zeros(1),
            lengths=np.array([count]),
            groups=(),
            old_logprobs=student_logs.flatten().numpy(),
            teacher_logprobs=teacher_logs.flatten().numpy(),
        )
        divergences = -jsd(inputs, Jsd(lambda_coef=share, exact_gradient=False)).values
        return float((student_logs.exp().flatten().numpy() * divergences).sum()) / (count / 11)

    def of_trl(beta: float) -> float:
        labels = torch.zeros(NUM_ROWS, max(LENGTHS), dtype=torch.long)
        return float(IWOPDTrainer.generalized_jsd_loss(student.detach(), teacher, labels, beta=beta))

    assert of_trl(1.0) == pytest.approx(expected(0.0), rel=1e-9)
    assert of_trl(0.5) != pytest.approx(expected(0.5), rel=1e-2)
