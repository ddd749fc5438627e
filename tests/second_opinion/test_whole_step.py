"""A whole step of the small model, from experiences to the gradient of every weight, against TRL's trainers in float32.

Both start from the same rows and weights; the policy differs from the reference. Ours runs in several packed
micro-batches without padding, TRL's in padded ones; so this also covers positions, masks, shifts and the temperature.

| TRL | here |
|---|---|
| GRPOTrainer: loss_type dapo, scale_rewards group, temperature | grpo, its epsilon 1e-4; model.temperature |
| RLOOTrainer, one update | rloo, seq-mean-token-sum: the ratio is 1 |
| DPOTrainer: loss_type sigmoid; aot of one pair with label_smoothing | dpo; with label_smoothing |
| SFTTrainer: loss_type nll, dft | sft; policy_loss_fn sft_is |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.algorithms.presets import resolve
from engines.config import ModelConfig
from engines.experience import EID, Experience
from engines.hf.models import Folders, build
from engines.hf.step import TrainStep
from engines.intake import Limits, take_in
from tests.second_opinion import trl_trainers
from tests.tiny_llama import VOCABULARY, engine_config

MEASURED = {"lr": 0.0, "betas": (0.0, 0.999), "clip_grad": 1e9}
"""Optimizer whose first moment is the gradient."""
PROMPTS = ("ab", "ab", "ab", "c", "c", "c")
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 1.0)
GROUP_SIZE = 3


def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other weights, near these: the policy's after some training."""
    generator = torch.Generator().manual_seed(1)
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def answers(seed: int = 0) -> list[list[int]]:
    """Token ids of unequal numbers."""
    random = np.random.default_rng(seed)
    return [random.integers(5, VOCABULARY, length).tolist() for length in (5, 2, 7, 1, 4, 3)]


def ours(
    folder: Path, exps: list[Experience], algorithm: dict[str, Any], temperature: float = 1.0
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one step."""
    config = engine_config(
        algorithm, MEASURED, model=ModelConfig(model_path=str(folder), max_model_len=64, temperature=temperature)
    )
    settings = resolve(config.algorithm)
    models = build(config, settings, Folders(model=folder), torch.device("cpu"))
    models.loaded.model.load_state_dict(moved(models.loaded.model.state_dict()))
    step = TrainStep(models, settings, token_budget=16)
    report = step.run(take_in(exps, settings, Limits(VOCABULARY, 64)).rows, 1, step=0, seed=0)
    moments = models.optimizer.tensors()
    kind = "exp_avg."
    return report.metrics, {name[len(kind) :]: value for name, value in moments.items() if name.startswith(kind)}


def move(trainer: Any) -> None:
    """Give TRL's policy the weights that ours has."""
    trainer.model.load_state_dict(moved(trainer.model.state_dict()))


def gradients(trainer: Any, *losses: Tensor) -> dict[str, Tensor]:
    for loss in losses:
        loss.backward()
    return {name: value.grad for name, value in trainer.model.named_parameters()}


def assert_equal_gradients(our: dict[str, Tensor], their: dict[str, Tensor]) -> None:
    assert our.keys() == their.keys()
    scale = max(float(value.abs().max()) for value in their.values())
    assert scale > 1e-3
    torch.testing.assert_close(our, their, rtol=1e-4, atol=2e-6 * scale)


def prompt_ids(trainer: Any) -> list[list[int]]:
    return trainer.processing_class(list(PROMPTS))["input_ids"]


def sampled(trainer: Any, masks: list[list[int]] | None = None) -> list[Experience]:
    """The rows that `trl_trainers.scored` gives to TRL."""
    return [
        Experience(
            tokens=np.array(prompt + answer),
            prompt_length=len(prompt),
            reward=REWARDS[row],
            action_mask=None if masks is None else np.array(masks[row], np.bool_),
            eid=EID(0, row // GROUP_SIZE, row % GROUP_SIZE, 0, ""),
        )
        for row, (prompt, answer) in enumerate(zip(prompt_ids(trainer), answers(), strict=True))
    ]


def test_grpo_with_kl_tool_tokens_and_temperature(folder: Path) -> None:
    trainer = trl_trainers.grpo(
        folder,
        loss_type="dapo",
        beta=0.2,
        use_bias_correction_kl=False,
        temperature=0.7,
        per_device_train_batch_size=len(PROMPTS),
        num_generations=GROUP_SIZE,
    )
    move(trainer)
    masks = [[1] * len(answer) for answer in answers()]
    masks[2][2:4] = [0, 0]
    inputs = trl_trainers.scored(trainer, answers(), REWARDS, PROMPTS, env_mask=masks)
    their_loss = trl_trainers.loss(trainer, inputs)
    changes: dict[str, Any] = {
        "bypass_old_logprobs": False,
        "advantage_fn_args": {"epsilon": 1e-4},
        "kl_loss_fn": "k3",
        "kl_loss_fn_args": {"kl_coef": 0.2},
    }
    metrics, found = ours(folder, sampled(trainer, masks), changes, temperature=0.7)
    assert metrics["kl/reference"] > 0.01
    assert metrics["kl/reference"] == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(float(their_loss.detach()), rel=1e-4)
    assert_equal_gradients(found, gradients(trainer, their_loss))


def test_rloo_with_kl_in_the_reward(folder: Path) -> None:
    """TRL clips the ratio of the whole answer; in the first update both ratios are 1, and the gradients are equal."""
    trainer = trl_trainers.rloo(folder, beta=0.2, per_device_train_batch_size=len(PROMPTS), num_generations=GROUP_SIZE)
    move(trainer)
    inputs = trl_trainers.scored(trainer, answers(), REWARDS, PROMPTS)
    their_loss = trl_trainers.loss(trainer, inputs)
    changes: dict[str, Any] = {
        "algorithm_type": "rloo",
        "bypass_old_logprobs": False,
        "kl_loss_fn": "none",
        "kl_penalty_fn": "k1",
        "kl_penalty_fn_args": {"kl_coef": 0.2},
        "loss_agg_mode": "seq-mean-token-sum",
    }
    metrics, found = ours(folder, sampled(trainer), changes)
    assert abs(metrics["kl/penalty"]) > 0.01
    assert metrics["kl/penalty"] == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-4)
    assert_equal_gradients(found, gradients(trainer, their_loss))


def pairs(trainer: Any) -> list[dict[str, list[int]]]:
    """Prompt, preferred and refused answers, as TRL's collator takes them."""
    ids, chosen, rejected = prompt_ids(trainer), answers(1), answers(2)[::-1]
    return [
        {"prompt_ids": ids[row], "chosen_ids": chosen[row], "rejected_ids": rejected[row]} for row in range(len(ids))
    ]


def our_pairs(examples: list[dict[str, list[int]]]) -> list[Experience]:
    return [
        Experience(
            tokens=np.array(example["prompt_ids"]),
            chosen=np.array(example["chosen_ids"]),
            rejected=np.array(example["rejected_ids"]),
        )
        for example in examples
    ]


def plain_dpo(**args: float) -> dict[str, Any]:
    return {"algorithm_type": "dpo", "kl_loss_fn": "none", "policy_loss_fn_args": {"beta": 0.3} | args}


def test_dpo(folder: Path) -> None:
    trainer = trl_trainers.dpo(folder, beta=0.3)
    move(trainer)
    examples = pairs(trainer)
    their_loss = trl_trainers.loss(trainer, trainer.data_collator(examples))
    metrics, found = ours(folder, our_pairs(examples), plain_dpo())
    assert metrics["loss/total"] == pytest.approx(float(their_loss.detach()), rel=1e-5)
    logged = {key: trainer._metrics["train"][key][0] for key in ("rewards/chosen", "rewards/rejected")}
    assert metrics["dpo/chosen_reward"] == pytest.approx(logged["rewards/chosen"], rel=1e-4, abs=1e-6)
    assert metrics["dpo/rejected_reward"] == pytest.approx(logged["rewards/rejected"], rel=1e-4, abs=1e-6)
    assert_equal_gradients(found, gradients(trainer, their_loss))


def test_dpo_with_label_smoothing(folder: Path) -> None:
    """TRL's sigmoid ignores label_smoothing. Its aot has it, but sorts the pairs of a batch: of one pair it is ours, so
    the mean of its losses of each pair alone is ours of all.
    """
    trainer = trl_trainers.dpo(folder, beta=0.3, loss_type=["aot"], label_smoothing=0.2)
    move(trainer)
    examples = pairs(trainer)
    losses = [trl_trainers.loss(trainer, trainer.data_collator([each])) / len(examples) for each in examples]
    metrics, found = ours(folder, our_pairs(examples), plain_dpo(label_smoothing=0.2))
    assert metrics["loss/total"] == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-5)
    assert_equal_gradients(found, gradients(trainer, *losses))


@pytest.mark.parametrize(("loss_type", "changes"), [("nll", {}), ("dft", {"policy_loss_fn": "sft_is"})])
def test_sft_in_two_micro_batches(folder: Path, loss_type: str, changes: dict[str, str]) -> None:
    """The loss is over all tokens of the step, however it is cut: num_items_in_batch there, global counts here."""
    trainer = trl_trainers.sft(folder, loss_type=loss_type)
    move(trainer)
    rows = [
        {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        for prompt, answer in zip(prompt_ids(trainer), answers(), strict=True)
    ]
    num_items = torch.tensor(sum(len(answer) for answer in answers()))
    losses = [
        trl_trainers.loss(trainer, trainer.data_collator(rows[cut]), num_items_in_batch=num_items)
        for cut in (slice(0, 1), slice(1, 6))
    ]
    metrics, found = ours(folder, sampled(trainer), {"algorithm_type": "sft"} | changes)
    assert metrics["loss/total"] == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-5)
    assert_equal_gradients(found, gradients(trainer, *losses))
