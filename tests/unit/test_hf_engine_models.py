"""HfEngine with more than a policy: critic, reference, teacher, adaptive KL. They learn, and resume to the bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.algorithms.advantages import AdvantageInputs, group_indices
from engines.algorithms.spec import Gae
from engines.algorithms.token_advantages import gae
from engines.config import CriticConfig, EngineConfig, OptimizerConfig
from engines.errors import CheckpointError, ConfigError, DataError, EngineError
from engines.experience import Experience
from engines.hf.engine import HfEngine
from tests.tiny_llama import VOCABULARY, engine_config, groups, model_config, with_engine

ADAPTIVE = {"adaptive": True, "target_kl": 0.01, "horizon": 50.0}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm_type": "ppo",
        "critic": {"optimizer": {"lr": 1e-2}},
        "kl_loss_fn_args": {"kl_coef": 0.1, **ADAPTIVE},
        "kl_penalty_fn": "k1",
        "kl_penalty_fn_args": {"kl_coef": 0.05, **ADAPTIVE},
        "bypass_old_logprobs": False,
    },
    "on_policy_distill": {"algorithm_type": "on_policy_distill"},
    "clip_cov": {"algorithm_type": "grpo", "policy_loss_fn": "clip_cov", "policy_loss_fn_args": {"clip_cov_lb": -9.0}},
    "mix_chord": {
        "algorithm_type": "mix_chord",
        "policy_loss_fn_args": {"mu_warmup_steps": 2, "mu_decay_steps": 3, "mu_peak": 0.5},
    },
}


def config_of(name: str) -> EngineConfig:
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-2))
    algorithm = {key: value for key, value in ALGORITHMS[name].items() if key != "critic"} | {"critic": critic}
    return engine_config(algorithm, updates_per_step=2)


def batch(step: int) -> list[Experience]:
    rows = groups(step)
    random = np.random.default_rng(step)
    for index, row in enumerate(rows):
        assert row.logprobs is not None
        row.teacher_logprobs = (row.logprobs + random.normal(0, 0.3, len(row.logprobs))).astype(np.float32)
        row.truncate_status = "response_truncated" if index % 5 == 0 else None
        if index % 4 == 3:
            row.info["is_expert"] = True
    return rows


def saved(engine: HfEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a snapshot."""
    folder.mkdir()
    engine.staging_dir = folder
    engine.save_checkpoint()
    return {
        f"{file.relative_to(folder)}:{name}": value
        for file in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_snapshot_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    config = config_of(name)

    async def whole(engine: HfEngine) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        for step in range(2):
            await engine.train_step(batch(step))
        saved(engine, tmp_path / "after two")
        metrics = await engine.train_step(batch(2))
        return metrics, saved(engine, tmp_path / "after three")

    async def resumed(engine: HfEngine) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        assert engine.train_step_num == 2
        metrics = await engine.train_step(batch(2))
        return metrics, saved(engine, tmp_path / "after three again")

    metrics, tensors = with_engine(config, whole)
    again, same = with_engine(config, resumed, restore_dir=tmp_path / "after two")
    assert tensors.keys() == same.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, same[key]), key
    for key, value in metrics.items():
        if not key.startswith(("time/", "perf/")):
            assert again[key] == value, key
    state = (tmp_path / "after three" / "engine_state.json").read_text()
    assert state == (tmp_path / "after three again" / "engine_state.json").read_text()


def test_an_adaptive_coefficient_moves_towards_its_target_by_the_papers_rule() -> None:
    """coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * rows / horizon; Ziegler et al. 2019, 2.2."""

    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        return [await engine.train_step(batch(step)) for step in range(4)]

    metrics = with_engine(config_of("ppo"), scenario)
    coefficient = {"kl": 0.1, "kl_penalty": 0.05}
    measured = {"kl": "kl/reference", "kl_penalty": "kl/penalty"}
    seen: set[float] = set()
    for step in metrics:
        for part, key in measured.items():
            assert step[f"kl/{part}_coef"] == pytest.approx(coefficient[part], rel=1e-9)
            error = min(max(step[key] / 0.01 - 1, -0.2), 0.2)
            seen.add(error)
            coefficient[part] *= 1 + error * 16 / 50.0
    assert len(seen) > 1


def test_the_critic_learns_returns_with_an_optimizer_of_its_own() -> None:
    """Rewards of -1 or 1 told apart by the first token of the prompt: a constant explains none of their variance."""
    rows = groups(0, num_groups=8, group_size=4)
    for row in rows:
        row.reward = 1.0 if int(row.tokens[0]) % 2 else -1.0
    algorithm = {"algorithm_type": "ppo", "critic": CriticConfig(optimizer=OptimizerConfig(lr=1e-2))}

    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        return [await engine.train_step(rows) for _ in range(30)]

    metrics = with_engine(engine_config(algorithm, {"lr": 0.0}), scenario)
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["critic/explained_variance"] > 0.9
    assert metrics[-1]["critic/loss"] < 0.1 * metrics[0]["critic/loss"]
    assert {step["critic/lr"] for step in metrics} == {1e-2}


def test_only_the_critic_learns_during_its_warm_up() -> None:
    algorithm = {"algorithm_type": "ppo", "critic": CriticConfig(optimizer=OptimizerConfig(lr=1e-2))}
    received: list[dict[str, torch.Tensor]] = []

    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        engine.weights_sink = lambda version, weights: received.append(weights)
        metrics: list[dict[str, float]] = []
        for step in range(3):
            engine.upload_state_dict()
            metrics.append(await engine.train_step(batch(step)))
        engine.upload_state_dict()
        return metrics

    metrics = with_engine(engine_config(algorithm, critic_warmup=2), scenario)
    assert all("critic/loss" in step for step in metrics)
    assert ["loss/total" in step for step in metrics] == [False, False, True]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(received)]
    assert same == [True, True, False]


def test_a_truncated_response_is_worth_what_the_critic_expects_of_the_rest() -> None:
    """With gamma = lam = 1, no reward and a constant value v: returns are v where cut, 0 where ended."""

    lengths = np.array([3, 2])
    result = gae(
        AdvantageInputs(
            token_rewards=np.zeros(5),
            rewards=np.zeros(2),
            lengths=lengths,
            groups=group_indices(["a", "b"]),
            values=np.full(5, 0.7),
            bootstrap=np.array([0.7, 0.0]),
        ),
        Gae(),
    )
    assert result.returns is not None
    np.testing.assert_allclose(result.returns, [0.7, 0.7, 0.7, 0.0, 0.0], atol=1e-15)


def test_a_snapshot_without_its_critics_head_is_refused(tmp_path: Path) -> None:
    config = config_of("ppo")

    async def one_step(engine: HfEngine) -> None:
        await engine.train_step(batch(0))
        saved(engine, tmp_path / "snapshot")

    with_engine(config, one_step)
    (tmp_path / "snapshot" / "critic" / "value_head.safetensors").unlink()

    async def nothing(engine: HfEngine) -> None:
        raise AssertionError("prepare must have failed")

    with pytest.raises(CheckpointError, match=r"critic's head in .*snapshot.critic cannot be restored"):
        with_engine(config, nothing, restore_dir=tmp_path / "snapshot")


def test_a_row_without_teacher_logprobs_needs_a_teacher() -> None:
    rows = batch(0)
    rows[5].teacher_logprobs = None

    async def scenario(engine: HfEngine) -> None:
        with pytest.raises(DataError, match=rf"{rows[5].eid.uid} has no teacher_logprobs.*teacher_model_path"):
            await engine.train_step(rows)

    with_engine(config_of("on_policy_distill"), scenario)


def test_a_teacher_that_is_the_model_itself_has_nothing_to_teach(tmp_path: Path) -> None:
    """Its logprobs are the policy's: divergence and advantages are 0, the weights stay; no logprobs in the rows."""

    async def save(engine: HfEngine) -> None:
        engine.staging_dir = tmp_path
        engine.save_state_dict()

    with_engine(engine_config(), save)
    rows = groups(0)
    teacher = model_config().model_copy(update={"teacher_model_path": str(tmp_path / "model")})
    algorithm = {"algorithm_type": "on_policy_distill", "bypass_old_logprobs": False}

    async def scenario(engine: HfEngine) -> dict[str, float]:
        return await engine.train_step(rows)

    metrics = with_engine(engine_config(algorithm, model=teacher), scenario)
    assert metrics["kl/teacher"] == 0.0
    assert metrics["grad/norm"] == 0.0


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = model_config(tokenizer={"kind": "char", "alphabet": "abc"})

    async def save(engine: HfEngine) -> None:
        engine.staging_dir = tmp_path
        engine.save_state_dict()

    with_engine(engine_config(model=other), save)
    teacher = model_config().model_copy(update={"teacher_model_path": str(tmp_path / "model")})
    with pytest.raises(ConfigError, match=rf"its vocabulary has \d+ tokens, the model's {VOCABULARY}"):
        with_engine(engine_config({"algorithm_type": "jsd"}, model=teacher), save)


def test_a_job_without_a_single_update_fails_at_its_end() -> None:
    """Two steps in all, fewer than max_nonfinite_steps, and none of them made an update."""

    async def scenario(engine: HfEngine) -> None:
        for step in range(2):
            rows = batch(step)
            for row in rows:
                assert row.logprobs is not None
                row.logprobs[:] = np.nan
            await engine.train_step(rows)

    with pytest.raises(EngineError, match="2 updates in a row were skipped"):
        with_engine(engine_config({"kl_loss_fn": "none"}, total_steps=2), scenario)
