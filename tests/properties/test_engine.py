"""The same properties through the whole engine, on a transformer of two layers: every preset, in float32.

Hypothesis is not needed here: what varies from batch to batch is in the other files, what a model adds is here.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.algorithms.presets import PRESETS
from engines.algorithms.spec import Algorithm
from engines.config import EngineConfig, ModelConfig, TokenizerConfig
from engines.experience import Experience
from engines.hf.engine import HfEngine
from tests.properties.batches import Shape, batch, changed, shuffled
from tests.properties.small_models import assert_same_metrics
from tests.properties.test_masked import disturb, half_masked
from tests.properties.variants import KL_IN_LOSS
from tests.tiny_llama import VOCABULARY, engine_config, model_config

SHAPES = Shape(((5, 2, 6, 1), (3,), (4, 6, 1)), 3), Shape(((2, 4), (6, 1, 3)), 5)
OPTIMIZER = {"lr": 1e-2, "eps": 1.0}
"""With an eps of 1 a step follows the gradient, not its sign: roundings stay small."""
NOT_OF_THE_STEP = ("time/", "perf/")


def rows_for(algorithm: Algorithm, shape: Shape = SHAPES[0]) -> list[Experience]:
    """Rows whose sampler's logprobs are not far from what a fresh model says."""

    def near(row: Experience) -> None:
        if row.logprobs is not None:
            row.logprobs = row.logprobs * np.float32(0.2) - np.float32(4.2)

    return changed(batch(algorithm, shape, VOCABULARY), near)


def run(config: Any, *steps: Sequence[Experience]) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """Metrics of each step, without times; the weights before the first and after the last."""

    async def life() -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
        engine = HfEngine(config)
        weights: list[dict[str, Tensor]] = []
        engine.weights_sink = lambda version, received: weights.append(dict(received))
        await engine.prepare()
        try:
            engine.upload_state_dict()
            history = [await engine.train_step(list(rows)) for rows in steps]
            engine.upload_state_dict()
        finally:
            await engine.shutdown()
        kept = [{k: v for k, v in each.items() if not k.startswith(NOT_OF_THE_STEP)} for each in history]
        return kept, weights

    return asyncio.run(life())


def config_of(name: str, budget: int = 1000, algorithm: dict[str, Any] | None = None, **changes: Any) -> EngineConfig:
    optimizer = changes.pop("optimizer", OPTIMIZER)
    choices: dict[str, Any] = {"algorithm_type": name, "critic": {"optimizer": optimizer}} | (algorithm or {})
    return engine_config(choices, optimizer, max_token_len_per_gpu=budget, **changes)


LLAMA = model_config(architecture={"attention_dropout": 0.3})
GPT2 = ModelConfig(
    architecture={
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        **{f"{part}_pdrop": 0.3 for part in ("attn", "embd", "resid")},
    },
    tokenizer=TokenizerConfig(kind="char"),
    max_model_len=64,
)


@pytest.mark.parametrize(
    ("name", "model"), [*((name, LLAMA) for name in PRESETS), *((name, GPT2) for name in ("grpo", "ppo", "dpo"))]
)
def test_two_steps_depend_on_no_budget_no_order_and_no_masked_token(name: str, model: ModelConfig) -> None:
    """Equal steps are equal to the bit, whatever the numbers of masked tokens are; others to float32.

    GPT-2 has absolute positions: padding that shifted them would show.
    """
    algorithm = PRESETS[name]
    steps = [half_masked(rows_for(algorithm, shape), 1) for shape in SHAPES]
    history, (start, end) = run(config_of(name, model=model), *steps)
    again, (_, equal_end) = run(config_of(name, model=model), *(changed(rows, disturb) for rows in steps))
    assert history == again
    assert all(torch.equal(end[key], equal_end[key]) for key in end)
    others, (_, other_end) = run(config_of(name, 13, model=model), *(shuffled(rows, 1) for rows in steps))
    for one, other in zip(history, others, strict=True):
        assert_same_metrics(one, other, 1e-4, 1e-5)
    moved, apart = (torch.cat([(end[key] - each[key]).flatten() for key in end]) for each in (start, other_end))
    assert float(moved.norm()) > 1e-4
    assert float(apart.norm()) <= 1e-4 * float(moved.norm())


WITH_RATIO = [name for name, each in PRESETS.items() if "old_logprobs" in each.needs]
FIRST: list[tuple[str, ModelConfig, dict[str, Any]]] = [
    *((name, LLAMA, {}) for name in WITH_RATIO),
    ("grpo", GPT2, {}),
    ("ppo", GPT2, {}),
    ("grpo", LLAMA, {"policy_loss_fn": "clip_cov"}),
    ("grpo", LLAMA, {"policy_loss_fn": "kl_cov"}),
]


@pytest.mark.parametrize(("name", "model", "algorithm"), FIRST)
def test_the_first_ratio_is_exactly_1_with_dropout_in_the_config(
    name: str, model: ModelConfig, algorithm: dict[str, Any]
) -> None:
    """Old logprobs are those of the weights before the step: nothing is clipped, and the policy is no distance away."""
    rows = rows_for(PRESETS[name])
    changes = algorithm | {"bypass_old_logprobs": False}
    (metrics,), _ = run(config_of(name, 13, changes, optimizer={"lr": 0.0}, model=model), rows)
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1
    assert metrics["kl/policy"] == 0
    clipped = [key for key in metrics if "clip_fraction" in key and not key.startswith("critic/")]
    assert [metrics[key] for key in clipped] == [0] * len(clipped)


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_first_ratio_is_exactly_1_among_other_rows_than_old_logprobs_were_computed_with(
    seed: int, num_updates: int
) -> None:
    """A KL in the reward reads old logprobs of all rows, then groups are dropped.

    Of two updates the first alone is exact; by definition the second has the old logprobs from before the step.
    """
    rows = rows_for(PRESETS["grpo"], Shape(((5, 2, 6, 1), (3,), (4, 6, 1), (2,), (6, 6)), seed))
    algorithm = {
        "kl_penalty_fn": "k1",
        "kl_penalty_fn_args": {"kl_coef": 0.1},
        "advantage_fn_args": {"std_threshold": 0.9},
        "bypass_old_logprobs": False,
    }
    config = config_of("grpo", algorithm=algorithm, optimizer={"lr": 0.0}, updates_per_step=num_updates)
    (metrics,), _ = run(config, rows)
    assert 0 < metrics["groups/num_dropped_rows"] < len(rows)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=0 if num_updates == 1 else 1e-6)


def test_a_kl_to_the_model_itself_is_0_and_so_is_its_gradient() -> None:
    """The reference is the first policy: in the first step no estimator moves anything."""
    rows = changed(rows_for(PRESETS["grpo"]), lambda row: setattr(row, "reward", 1.0))
    for name in KL_IN_LOSS:
        algorithm = {"kl_loss_fn": name, "kl_loss_fn_args": {"kl_coef": 1.0}, "bypass_old_logprobs": False}
        (metrics,), _ = run(config_of("grpo", algorithm=algorithm), changed(rows, _without_token_rewards))
        assert metrics["kl/reference"] == metrics["loss/kl"] == 0
        assert metrics["grad/norm"] < 1e-6


def _without_token_rewards(row: Experience) -> None:
    row.token_level_reward = None


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_that_trains_nothing_leaves_the_weights(name: str) -> None:
    """All masked; for pairs, which have no mask, learning rate 0."""

    def mask(row: Experience) -> None:
        if row.chosen is None:
            row.action_mask = np.zeros(row.response_length, np.bool_)

    pairs = "pairs" in PRESETS[name].needs
    optimizer = {"lr": 0.0} if pairs else OPTIMIZER
    (metrics,), (before, after) = run(config_of(name, optimizer=optimizer), changed(rows_for(PRESETS[name]), mask))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert metrics["update/num_applied"] == pairs
    assert all(np.isfinite(value) for value in metrics.values())
