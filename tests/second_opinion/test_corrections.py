"""Corrections for the difference between sampler and trainer against those that TRL's GRPOTrainer computes and applies.

| TRL | here |
|---|---|
| old_per_token_logps, sampling_per_token_logps | old logprobs (bypass_old_logprobs: false), the sampler's |
| vllm_importance_sampling_mode token_, sequence_ | level token, sequence |
| ..._truncate, ..._mask | name truncate, mask |
| vllm_importance_sampling_clip_max, _clip_min | cap, floor of mask |

TRL's sequence ratio is one number for a row; ours is that number on each of its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.algorithms.presets import resolve
from engines.config import AlgorithmConfig
from tests.second_opinion import trl_trainers
from tests.second_opinion.padded import LENGTHS, NUM_ROWS, Padded, assert_same, batch, ours

TOKENS, SEQUENCES = {"loss_agg_mode": "token-mean"}, {"loss_agg_mode": "seq-mean-token-mean"}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({"loss_type": "dapo"}, {"policy_loss_fn_args": {"clip_ratio_c": 1e9}} | TOKENS),
    "grpo": ({"loss_type": "grpo"}, {"policy_loss_fn_args": {"clip_ratio_c": 1e9}} | SEQUENCES),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, {"algorithm_type": "cispo"} | TOKENS),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
        {"algorithm_type": "gspo", "policy_loss_fn_args": {"clip_range_low": 0.1, "clip_range_high": 0.1}},
    ),
}


def theirs(folder: Path, x: Padded, **config: Any) -> tuple[Tensor, Tensor]:
    """TRL's loss of the batch and the weights in it, both from the logprobs of sampler and trainer."""
    trainer = trl_trainers.grpo(
        folder,
        lambda model: (x.old, None),
        per_device_train_batch_size=NUM_ROWS,
        num_generations=2,
        num_iterations=2,
        **config,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # the sampler is another program, and has the weights
    outputs = trl_trainers.scored(
        trainer,
        [[5] * length for length in LENGTHS],
        [0.0] * NUM_ROWS,
        ["a"] * NUM_ROWS,
        logprobs=[row[:length].tolist() for row, length in zip(x.rollout, LENGTHS, strict=True)],
        env_mask=[row[:length].tolist() for row, length in zip(x.mask, LENGTHS, strict=True)],
    )
    trainer.given = lambda model: (x.logprobs, x.entropies)
    weights = outputs["importance_sampling_ratio"]
    inputs = x.trl_inputs() | {name: outputs[name] for name in ("old_per_token_logps", "importance_sampling_ratio")}
    return trl_trainers.loss(trainer, inputs), weights


def ours_corrected(x: Padded, changes: dict[str, Any], **correction: Any) -> Tensor:
    name = correction.pop("name")
    part: Any = {"name": name, "args": correction}
    settings = {"kl_loss_fn": "none", "bypass_old_logprobs": False, "rollout_correction": part}
    return ours(x, resolve(AlgorithmConfig(**settings | changes)))


CORRECTED = [(loss, level) for loss in LOSSES for level in ("token", "sequence") if (loss, level) != ("gspo", "token")]


@pytest.mark.parametrize(("loss", "level"), CORRECTED)
@pytest.mark.parametrize("name", ["truncate", "mask"])
def test_corrected_loss_and_gradient_are_those_of_trl(folder: Path, name: str, level: str, loss: str) -> None:
    config, changes = LOSSES[loss]
    x, bounds = batch(), {"cap": 1.25, "floor": 0.8} if name == "mask" else {"cap": 1.25}
    their_loss, weights = theirs(
        folder,
        x,
        vllm_importance_sampling_mode=f"{level}_{name}",
        vllm_importance_sampling_clip_max=bounds["cap"],
        vllm_importance_sampling_clip_min=bounds.get("floor"),
        **config,
    )
    reached = weights[x.mask.bool()] if level == "token" else weights
    assert (reached == (1.25 if name == "truncate" else 0)).any()
    assert ((reached > 0) & (reached < 1.25)).any()
    assert_same(x, ours_corrected(x, changes, name=name, level=level, **bounds), their_loss)


def test_gspo_with_a_weight_for_each_token(folder: Path) -> None:
    """Equal losses. Our gradient of a token carries its own weight (GSPO-token, arXiv:2507.18071, eq. 14), TRL's the
    mean weight of the row, because there it passes through the ratio of the row.
    """
    config, changes = LOSSES["gspo"]
    x, bounds = batch(), {"vllm_importance_sampling_clip_max": 1.25}
    their_loss, _ = theirs(folder, x, vllm_importance_sampling_mode="token_truncate", **bounds, **config)
    our_loss = ours_corrected(x, changes, name="truncate", cap=1.25)
    torch.testing.assert_close(our_loss.detach(), their_loss.detach(), rtol=1e-12, atol=0)
    our, their = (torch.autograd.grad(loss, x.logprobs)[0] for loss in (our_loss, their_loss))
    of_row = our.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True) * x.mask
    assert (of_row - our).abs().max() > 1e-3
    torch.testing.assert_close(of_row, their, rtol=1e-12, atol=1e-15)


def test_truncation_has_no_lower_bound_here(folder: Path) -> None:
    """TRL's *_truncate can also lift small weights to clip_min, which no paper has; here truncate takes no floor."""
    config, changes = LOSSES["dapo"]
    x = batch()
    config = config | {"vllm_importance_sampling_clip_max": 1e6, "vllm_importance_sampling_clip_min": 0.9}
    their_loss, weights = theirs(folder, x, vllm_importance_sampling_mode="token_truncate", **config)
    trains = x.mask.bool()
    torch.testing.assert_close(weights[trains], (x.old - x.rollout)[trains].exp().clamp(min=0.9), rtol=1e-12, atol=0)
    our_loss = ours_corrected(x, changes, name="truncate", cap=1e6)
    assert float(our_loss.detach()) != pytest.approx(float(their_loss.detach()), rel=1e-3)
