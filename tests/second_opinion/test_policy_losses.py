"""Policy losses and their gradients against `_compute_loss` of TRL's GRPOTrainer, on the same logprobs, in float64.

| TRL | here |
|---|---|
| loss_type grpo, bnpo, dapo | aggregation seq-mean-token-mean, token-mean, token-mean |
| epsilon, epsilon_high | clip_range_low, clip_range_high; in cispo epsilon_high is 1 + clip_range_high |
| delta, or None | clip_ratio_c, or one that no ratio reaches |
| importance_sampling_level sequence | gspo |
| sapo_temperature_pos, _neg | tau_pos, tau_neg |
| off_policy_mask_threshold | enable_sequence_masking, delta_sequence_masking |
| beta; with use_bias_correction_kl | kl_coef of k3; of corrected_k3 |
| entropy_coef | entropy_coef, at token-mean |
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.algorithms.presets import resolve
from engines.algorithms.spec import Algorithm
from engines.config import AlgorithmConfig
from tests.second_opinion import trl_trainers
from tests.second_opinion.padded import LONGEST, NUM_ROWS, Padded, assert_same, batch, ours

NEVER = 1e9
"""A dual clip that no ratio reaches."""


def ppo(**args: Any) -> dict[str, Any]:
    """Our GRPO without KL, and without dual clip unless one is given."""
    return {"kl_loss_fn": "none", "policy_loss_fn_args": {"clip_ratio_c": NEVER} | args}


def plain(name: str, aggregation: str = "token-mean", **args: Any) -> dict[str, Any]:
    """Another preset without KL."""
    return {
        "algorithm_type": name,
        "kl_loss_fn": "none",
        "loss_agg_mode": aggregation,
        "policy_loss_fn_args": args,
    }


SEQUENCES = {"loss_agg_mode": "seq-mean-token-mean"}
K3: dict[str, Any] = {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.3}}
WIDE = {"epsilon": 0.05, "epsilon_high": 0.1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, ppo() | SEQUENCES),
    "bnpo": ({"loss_type": "bnpo"}, ppo()),
    "dapo without dual clip": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"algorithm_type": "dapo", "policy_loss_fn_args": {"clip_ratio_c": NEVER}},
    ),
    "dapo as it is": ({"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0}, {"algorithm_type": "dapo"}),
    "a dual clip that bites": ({"loss_type": "dapo", "delta": 1.3}, ppo(clip_ratio_c=1.3)),
    "no clip": (
        {"loss_type": "dapo", "epsilon": 1.0, "epsilon_high": NEVER},
        plain("importance_sampling"),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, plain("cispo")),
    "cispo, tight": ({"loss_type": "cispo", "epsilon_high": 1.01}, plain("cispo", clip_range_high=0.01)),
    # Theirs are float32, whatever the logprobs are: temperatures that float32 has exactly.
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_neg": 1.0625},
        plain("sapo", "seq-mean-token-mean", tau_neg=1.0625),
    ),
    "sapo, other gates": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.75, "sapo_temperature_neg": 2.0},
        plain("sapo", "seq-mean-token-mean", tau_pos=0.75, tau_neg=2.0),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        plain("gspo", "seq-mean-token-mean"),
    ),
    "gspo, a range that lets some through": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **WIDE},
        plain("gspo", "seq-mean-token-mean", clip_range_low=0.05, clip_range_high=0.1),
    ),
    "sequences that moved too far": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
        ppo(enable_sequence_masking=True, delta_sequence_masking=0.05),
    ),
    "k3": (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
        ppo() | K3,
    ),
    "k3 by sequence": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        ppo() | SEQUENCES | K3,
    ),
    "corrected k3": (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
        ppo() | {"kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 0.3}},
    ),
    "entropy bonus": (
        {"loss_type": "bnpo", "entropy_coef": 0.2},
        ppo() | {"entropy_loss_fn_args": {"entropy_coef": 0.2}},
    ),
}

NEAR = {"corrected k3": 0.2}
"""Spread of the log ratios, where the ratio has a bound here and none there."""


def theirs(folder: Path, x: Padded, inputs: dict[str, Tensor] | None = None, **config: Any) -> Tensor:
    """TRL's loss of the batch."""
    trainer = trl_trainers.grpo(
        folder,
        lambda model: (x.logprobs, x.entropies),
        per_device_train_batch_size=NUM_ROWS,
        num_generations=2,
        max_completion_length=LONGEST,
        **config,
    )
    return trl_trainers.loss(trainer, x.trl_inputs() | (inputs or {}))


def algorithm(**changes: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**changes))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(folder: Path, name: str, seed: int) -> None:
    config, changes = CASES[name]
    x = batch(NEAR.get(name, 0.6), seed)
    assert_same(x, ours(x, algorithm(**changes)), theirs(folder, x, **config))


def test_the_cases_reach_both_sides_of_every_clip() -> None:
    """Otherwise a wrong bound would go unseen."""
    for seed in (0, 1):
        x = batch(seed=seed).flat()
        assert x.old_logprobs is not None
        assert x.advantages is not None
        ratio = (x.logprobs.detach() - x.old_logprobs).exp()
        for sign in (1, -1):
            reached = ratio[x.advantages * sign > 0]
            assert reached.min() < 0.8
            assert reached.max() > 1.28


def test_first_update_of_a_step(folder: Path) -> None:
    """The ratio is 1 in value and the policy's in gradient: TRL leaves the old logprobs out, we detach the new ones."""
    x = batch()
    on_policy = dataclasses.replace(x, old=x.logprobs.detach())
    inputs = {name: value for name, value in x.trl_inputs().items() if name != "old_per_token_logps"}
    trainer = trl_trainers.grpo(
        folder, lambda model: (x.logprobs, x.entropies), per_device_train_batch_size=NUM_ROWS, num_generations=2
    )
    assert_same(x, ours(on_policy, algorithm(**ppo())), trl_trainers.loss(trainer, inputs))


CUTS = (slice(0, 1), slice(1, 3), slice(3, 6))


def accumulated(folder: Path, x: Padded, loss_type: str) -> Tensor:
    """TRL's loss of a step of three micro-batches with one, two and three rows."""
    trainer = trl_trainers.grpo(
        folder,
        loss_type=loss_type,
        given=lambda model: (x.logprobs, x.entropies),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=len(CUTS),
        num_generations=2,
    )
    total = torch.zeros((), dtype=torch.float64)
    for cut in CUTS:
        part = x.rows(cut)
        trainer.given = lambda model, part=part: (part.logprobs, part.entropies)
        inputs = {name: value[cut] for name, value in x.trl_inputs().items() if name != "num_items_in_batch"}
        inputs["num_items_in_batch"] = x.mask.sum()
        total = total + trl_trainers.loss(trainer, inputs)
    return total


def test_micro_batches_add_up_to_the_batch(folder: Path) -> None:
    x = batch()
    assert_same(x, ours(x, algorithm(**ppo())), accumulated(folder, x, "dapo"))


def test_bnpo_of_trl_is_a_mean_of_micro_batch_means_and_ours_is_not(folder: Path) -> None:
    """TRL's bnpo divides each micro-batch by its own tokens, so that its loss depends on the cut: wanted difference."""
    x = batch()
    token_mean = algorithm(**ppo())
    of_parts = sum(ours(x.rows(cut), token_mean) for cut in CUTS) / len(CUTS)
    assert isinstance(of_parts, Tensor)
    assert_same(x, of_parts, accumulated(folder, x, "bnpo"))
    assert float(of_parts.detach()) != pytest.approx(float(ours(x, token_mean).detach()), rel=0.05)


def test_dr_grpo_of_trl_also_divides_by_the_number_of_rows(folder: Path) -> None:
    """Ours is verl's: the sum of all tokens over the length. TRL's is that over the rows too, as is the paper's eq. 2.

    A learning rate for the one is a factor of the batch size away from the other's.
    """
    x = batch()
    our_loss = ours(x, algorithm(algorithm_type="dr_grpo", policy_loss_fn_args={"clip_ratio_c": NEVER}))
    assert_same(x, our_loss / NUM_ROWS, theirs(folder, x, loss_type="dr_grpo"))


def test_rows_without_an_action_token_count_in_their_mean_and_not_in_ours(folder: Path) -> None:
    """TRL's grpo divides by all rows of the micro-batch, also by those that are masked whole: wanted difference."""
    x = batch()
    x.mask[1] = 0
    our_loss = ours(x, algorithm(**ppo(), **SEQUENCES))
    assert_same(x, our_loss * (NUM_ROWS - 1) / NUM_ROWS, theirs(folder, x, loss_type="grpo"))
    assert_same(x, ours(x, algorithm(**ppo())), theirs(folder, x, loss_type="dapo"))


def test_corrected_k3_is_bounded_here(folder: Path) -> None:
    """The ratio in corrected_k3 is at most 2 here, as in Trinity-RFT, and has no gradient beyond; TRL has no bound."""
    x = batch(advantages=torch.zeros(NUM_ROWS, dtype=torch.float64))
    x = dataclasses.replace(x, logprobs=(x.old + math.log(3)).requires_grad_())
    d, trains, num_tokens = x.logprobs.detach() - x.reference, x.mask.bool(), x.mask.sum()
    k3, slope = (-d).exp() - 1 + d, 1 - (-d).exp()
    changes = ppo() | {"kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 1.0}}
    losses = ours(x, algorithm(**changes)), theirs(folder, x, loss_type="dapo", beta=1.0, use_bias_correction_kl=True)
    gradients = 2 * slope, 3 * (slope + k3)
    for loss, ratio, gradient in zip(losses, (2, 3), gradients, strict=True):
        assert float(loss.detach()) == pytest.approx(float((ratio * k3)[trains].sum() / num_tokens), rel=1e-12)
        (found,) = torch.autograd.grad(loss, x.logprobs)
        torch.testing.assert_close(found, torch.where(trains, gradient / num_tokens, 0.0), rtol=1e-12, atol=1e-15)
