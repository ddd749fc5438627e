"""HfEngine: what a step does, what it must not depend on, and what is refused."""

import asyncio
import hashlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.config import EngineConfig
from engines.errors import CheckpointError, ConfigError, DataError, EngineError
from engines.experience import EID, Experience
from engines.hf import engine as hf_engine
from engines.hf.engine import HfEngine
from tests.tiny_llama import engine_config, experience, groups, model_config, with_engine


def weights_of(engine: HfEngine) -> dict[str, torch.Tensor]:
    received: list[Any] = []
    engine.weights_sink = lambda version, weights: received.append(weights)
    engine.upload_state_dict()
    return received[0]


def after_one_step(config: EngineConfig, rows: list[Experience]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    async def scenario(engine: HfEngine) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        return await engine.train_step(rows), weights_of(engine)

    return with_engine(config, scenario)


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_step_does_not_depend_on_micro_batches_or_order(mode: str) -> None:
    """The gradient, seen through its norm and through SGD-like first moments, for budgets of 1 to 1000 tokens."""
    rows = groups(5)
    rows[3].action_mask = np.arange(rows[3].response_length) % 2 == 1
    rows[6].action_mask = np.zeros(rows[6].response_length, np.bool_)
    shuffled = [rows[index] for index in np.random.default_rng(1).permutation(len(rows))]
    algorithm = {
        "loss_agg_mode": mode,
        "kl_loss_fn_args": {"kl_coef": 0.1},
        "entropy_loss_fn_args": {"entropy_coef": 0.1},
    }
    runs = [
        after_one_step(engine_config(algorithm, {"eps": 1.0}, max_token_len_per_gpu=budget), batch)
        for budget, batch in ((1000, rows), (1, rows), (37, rows), (64, shuffled))
    ]
    metrics, weights = runs[0]
    assert metrics["loss/total"] != 0
    for other_metrics, other_weights in runs[1:]:
        for key, value in metrics.items():
            if not key.startswith(("time/", "perf/")):
                assert other_metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_masked_out_rows_are_as_if_they_were_not_there() -> None:
    """Except in the advantages of their group: so their whole group is masked here."""
    rows = groups(2)
    without = [row for row in rows if row.eid.task != 3]
    for row in rows:
        if row.eid.task == 3:
            row.action_mask = np.zeros(row.response_length, np.bool_)
    one, other = (after_one_step(engine_config({"loss_agg_mode": "seq-mean-token-mean"}), r) for r in (rows, without))
    assert one[0]["loss/policy"] == other[0]["loss/policy"]
    assert_equal_weights(one[1], other[1])


def test_tokens_that_do_not_train_change_nothing_but_their_context() -> None:
    """Logprobs of masked tokens, and tokens after the last trained one, are never looked at."""
    rows = groups(2)
    changed = groups(2)
    for row in (*rows, *changed):
        row.action_mask = np.arange(row.response_length) < max(1, row.response_length // 2)
    for row in changed:
        assert row.logprobs is not None
        assert row.action_mask is not None
        row.logprobs = np.where(row.action_mask, row.logprobs, -77.0).astype(np.float32)
        row.tokens[row.prompt_length :][~row.action_mask] = 9
    one, other = (after_one_step(engine_config(), r) for r in (rows, changed))
    assert_equal_weights(one[1], other[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_learning_rate_0_gives_ratio_1_on_sampled_rows_with_dropout_in_the_config(
    dtype: str, temperature: float
) -> None:
    """The sampler's logprobs are the trainer's: the first ratio is 1 and nothing is clipped."""
    model = model_config(
        architecture={"attention_dropout": 0.1}, dtype=dtype, temperature=temperature, max_model_len=40
    )

    async def scenario(engine: HfEngine) -> dict[str, float]:
        prompts = [[5, 6, 7, 8], [20, 21], [30, 31, 32, 33, 34, 35]]
        completions = engine.make_sampler().generate(prompts, n=4, max_tokens=12, temperature=temperature, seed=3)
        rows = [
            experience(
                tokens=[*prompt, *completion.tokens],
                prompt_length=len(prompt),
                logprobs=completion.logprobs,
                reward=float(run),
                eid=EID(batch=0, task=task, run=run),
            )
            for task, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
            for run, completion in enumerate(group)
        ]
        return await engine.train_step(rows)

    metrics = with_engine(engine_config({"kl_loss_fn": "none"}, {"lr": 0.0}, model), scenario)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=tolerance)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=tolerance)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["kl/policy"] == pytest.approx(0, abs=tolerance)


@pytest.mark.parametrize("updates", [1, 2])
def test_recomputed_old_logprobs_make_the_first_ratio_exactly_1(updates: int) -> None:
    config = engine_config({"bypass_old_logprobs": False}, {"lr": 0.0}, updates_per_step=updates)
    metrics, _ = after_one_step(config, groups(0, logprobs=None))
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1
    assert metrics["kl/policy"] == 0
    assert metrics["update/num_applied"] == updates


def test_kl_to_the_reference_is_0_first_and_then_grows() -> None:
    async def scenario(engine: HfEngine) -> list[float]:
        return [(await engine.train_step(groups(seed)))["kl/reference"] for seed in range(3)]

    first, second, third = with_engine(engine_config(), scenario)
    assert first == 0
    assert 0 < second < third


def test_entropy_is_reported_when_asked_for_and_rises_with_its_bonus() -> None:
    async def scenario(engine: HfEngine) -> list[float]:
        rows = groups(0, reward=1.0)
        return [(await engine.train_step(rows))["policy/entropy"] for _ in range(4)]

    algorithm = {"kl_loss_fn": "none", "entropy_loss_fn_args": {"entropy_coef": 1.0}}
    entropies = with_engine(engine_config(algorithm), scenario)
    assert entropies[0] < entropies[-1] <= math.log(101) + 1e-4
    metrics, _ = after_one_step(engine_config(), groups(0))
    assert "policy/entropy" not in metrics


def test_sft_learns_its_rows() -> None:
    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        rows = groups(0, reward=None, logprobs=None)
        return [await engine.train_step(rows) for _ in range(30)]

    history = with_engine(engine_config({"algorithm_type": "sft"}, total_steps=30), scenario)
    assert history[0]["loss/policy"] == pytest.approx(math.log(101), abs=0.1)
    assert history[-1]["loss/policy"] < 1.5
    assert "data/reward_mean" not in history[0]


def test_grpo_makes_rewarded_tokens_likelier() -> None:
    """Reward 1 for responses of token 50, 0 for 60, from the same prompt."""
    rows = [
        experience(
            tokens=[5, 6, token],
            prompt_length=2,
            eid=EID(0, 0, run),
            logprobs=[-math.log(101)],
            reward=float(token == 50),
        )
        for run, token in enumerate([50, 60] * 4)
    ]

    async def scenario(engine: HfEngine) -> float:
        for _ in range(12):
            await engine.train_step(rows)
        (group,) = engine.make_sampler().generate([[5, 6]], n=64, max_tokens=1, temperature=1.0, seed=0)
        sampled = [int(completion.tokens[0]) for completion in group]
        return sampled.count(50) - sampled.count(60)

    assert with_engine(engine_config({"bypass_old_logprobs": False}), scenario) > 10


def test_metrics_by_hand() -> None:
    rows = groups(3, num_groups=3)
    for row in rows:
        if row.eid.task == 1:
            row.reward = 0.25
    algorithm = {"advantage_fn_args": {"std_threshold": 0.0}}
    metrics, _ = after_one_step(engine_config(algorithm, {"lr": 0.5, "lr_warmup_steps": 2}), rows)
    rewards = [row.reward for row in rows]
    assert metrics["data/reward_mean"] == pytest.approx(np.mean(rewards))  # type: ignore[arg-type]
    assert metrics["data/reward_std"] == pytest.approx(np.std(rewards))  # type: ignore[arg-type]
    assert metrics["data/response_length_mean"] == np.mean([row.response_length for row in rows])
    assert metrics["data/num_tokens"] == sum(len(row.tokens) for row in rows)
    assert metrics["data/num_trained_tokens"] == sum(row.response_length for row in rows if row.eid.task != 1)
    assert metrics["groups/num_groups"] == 3
    assert metrics["groups/num_zero_variance"] == 1
    assert metrics["groups/num_dropped_rows"] == 4
    assert (metrics["update/num_applied"], metrics["update/num_skipped"], metrics["update/num_nonfinite"]) == (1, 0, 0)
    assert metrics["lr"] == 0.0
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["loss/kl"])


def test_dropped_groups_leave_the_denominator() -> None:
    rows, config = groups(3, num_groups=3), engine_config({"advantage_fn_args": {"std_threshold": 0.0}})
    for row in rows:
        if row.eid.task == 1:
            row.reward = 0.25
    with_them, _ = after_one_step(config, rows)
    without, _ = after_one_step(config, [row for row in rows if row.eid.task != 1])
    assert with_them["loss/policy"] == without["loss/policy"]


def test_a_batch_without_anything_to_learn_is_a_step_without_update() -> None:
    async def scenario(engine: HfEngine) -> tuple[int, dict[str, float], bool]:
        before = weights_of(engine)
        metrics = await engine.train_step(groups(0, reward=1.0))
        after = weights_of(engine)
        return engine.train_step_num, metrics, all(torch.equal(before[name], after[name]) for name in before)

    config = engine_config({"advantage_fn_args": {"std_threshold": 0.0}})
    step, metrics, unchanged = with_engine(config, scenario)
    assert unchanged
    assert (step, metrics["update/num_skipped"], metrics["update/num_applied"]) == (1, 1, 0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_kl_term_alone_moves_nothing() -> None:
    """Its gradient beside the reference is rounding noise, of which Adam made whole steps."""

    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        reports = [await engine.train_step(groups(0)), await engine.train_step(groups(1))]
        before = weights_of(engine)
        reports.append(await engine.train_step(groups(2, reward=1.0)))
        assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
        return reports

    _, second, third = with_engine(engine_config({"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}), scenario)
    assert second["update/num_applied"] == 1
    assert (third["update/num_applied"], third["update/num_skipped"], third["update/num_nonfinite"]) == (0, 1, 0)
    assert third["kl/reference"] > 0
    assert third["loss/total"] == pytest.approx(0.1 * third["kl/reference"])
    assert (third["grad/norm"], third["lr"]) == (0.0, second["lr"])


def test_schedule_counts_updates_and_updates_take_whole_groups() -> None:
    async def scenario(engine: HfEngine) -> list[float]:
        return [(await engine.train_step(groups(seed)))["lr"] for seed in range(3)]

    optimizer = {"lr": 1.0, "lr_scheduler_type": "linear", "min_lr_ratio": 0.0, "clip_grad": 1e-3}
    config = engine_config(None, optimizer, updates_per_step=2, total_steps=5)
    assert with_engine(config, scenario) == pytest.approx([0.9, 0.7, 0.5])  # the second of two updates each


def test_given_advantages_are_taken_as_they_are() -> None:
    rows = groups(0)
    for row in rows:
        row.advantages = np.zeros(row.response_length, np.float32)
    metrics, _ = after_one_step(engine_config({"kl_loss_fn": "none"}), rows)
    assert metrics["loss/policy"] == metrics["grad/norm"] == 0
    rows[5].advantages = None
    with pytest.raises(DataError, match=rf"{rows[5].eid.uid} has no advantages, others"):
        after_one_step(engine_config(), rows)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_logprobs_skip_the_step_and_give_up_after_three(bad: float) -> None:
    """Nothing changes, bit for bit, the schedule included; a good step in between starts the count anew."""
    poisoned = groups(1)
    assert poisoned[2].logprobs is not None
    poisoned[2].logprobs[0] = bad

    async def scenario(engine: HfEngine) -> None:
        await engine.train_step(groups(0))
        before = weights_of(engine)
        for _ in range(2):
            metrics = await engine.train_step(poisoned)
            assert (metrics["update/num_nonfinite"], metrics["update/num_applied"]) == (1, 0)
        assert_equal_weights(before, weights_of(engine))
        lr = (await engine.train_step(groups(2)))["lr"]
        assert lr == pytest.approx(1e-2 * 0.95)
        assert engine.train_step_num == 4
        for _ in range(2):
            await engine.train_step(poisoned)
        with pytest.raises(EngineError, match=r"3 updates in a row.*max_nonfinite_steps = 3"):
            await engine.train_step(poisoned)
        assert engine.train_step_num == 6
        with pytest.raises(EngineError, match="cannot be used"):
            await engine.train_step(groups(2))

    with_engine(engine_config(None, {"lr_scheduler_type": "linear", "min_lr_ratio": 0.0}), scenario)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": None}, "has no reward; score it"),
        ({"reward": math.nan}, "has reward nan"),
        ({"reward": math.inf}, "has reward inf"),
        ({"logprobs": None}, r"has no logprobs.*bypass_old_logprobs: false"),
        ({"tokens": np.array([5, 6, 101]), "prompt_length": 1}, "token id 101 is outside the vocabulary of 101"),
        ({"tokens": np.array([5, -1, 7]), "prompt_length": 1}, "token id -1 is outside the vocabulary"),
        (
            {"tokens": np.arange(65) % 50, "prompt_length": 3},
            r"65 tokens \(3 of prompt\) are more than .*max_model_len = 64",
        ),
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"experience_type": "dpo"}, "preference pair"),
    ],
)
def test_bad_row_is_named_and_nothing_changes(change: dict[str, Any], words: str) -> None:
    rows = groups(0)
    for name, value in change.items():
        setattr(rows[5], name, value)

    async def scenario(engine: HfEngine) -> None:
        before = weights_of(engine)
        with pytest.raises(DataError, match=rf"experience {rows[5].eid.uid}.*{words}"):
            await engine.train_step(rows)
        assert engine.train_step_num == 0
        assert_equal_weights(before, weights_of(engine))
        await engine.train_step(groups(1))
        assert engine.train_step_num == 1

    with_engine(engine_config(), scenario)


def test_a_failure_inside_a_step_makes_the_engine_unusable_until_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: HfEngine) -> None:
        await engine.train_step(groups(0))
        with monkeypatch.context() as patch:
            patch.setattr(
                hf_engine.TrainStep, "run", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("out of memory"))
            )
            with pytest.raises(EngineError, match=r"train step 2 of 16 rows.*out of memory.*max_token_len_per_gpu"):
                await engine.train_step(groups(1))
        assert engine.train_step_num == 1
        with pytest.raises(EngineError, match="train step 2 failed: out of memory"):
            await engine.train_step(groups(1))
        await engine.prepare()
        assert engine.train_step_num == 0
        await engine.train_step(groups(1))

    with_engine(engine_config(), scenario)


def test_a_cancelled_step_makes_the_engine_unusable() -> None:
    async def scenario(engine: HfEngine) -> None:
        task = asyncio.create_task(engine.train_step(groups(0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineError, match="train_step was cancelled"):
            await engine.train_step(groups(1))

    with_engine(engine_config(), scenario)


def test_non_finite_weights_are_never_saved(tmp_path: Path) -> None:
    async def scenario(engine: HfEngine) -> None:
        assert engine._parts is not None
        weight = next(engine._parts.loaded.model.parameters())
        with torch.no_grad():
            weight[0, 0] = math.nan
        for save in (engine.save_checkpoint, engine.save_state_dict):
            with pytest.raises(EngineError, match="values that are not finite at step 0"):
                save()

    with_engine(engine_config(), scenario, staging_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_save_state_dict_stages_the_model_alone(tmp_path: Path) -> None:
    async def scenario(engine: HfEngine) -> None:
        engine.save_state_dict()

    with_engine(engine_config(), scenario, staging_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_the_owner_forgot_is_named() -> None:
    async def scenario(engine: HfEngine) -> None:
        with pytest.raises(EngineError, match="weights_sink"):
            engine.upload_state_dict()
        with pytest.raises(EngineError, match="staging_dir"):
            engine.save_checkpoint()
        with pytest.raises(EngineError, match=r"sync_method.*memory or checkpoint"):
            engine.sync_weight()

    with_engine(engine_config(), scenario)


RESUMED = """
import asyncio, sys
from pathlib import Path
from engines.hf.engine import HfEngine
from tests.tiny_llama import engine_config, groups
from tests.unit.test_hf_engine import CONFIG, digests

async def main():
    engine = HfEngine(engine_config(**CONFIG))
    engine.restore_dir = Path(sys.argv[1])
    await engine.prepare()
    for seed in range(5, 10):
        await engine.train_step(groups(seed))
    engine.staging_dir = Path(sys.argv[2])
    engine.save_checkpoint()
    await engine.shutdown()

asyncio.run(main())
"""

CONFIG: dict[str, Any] = {
    "algorithm": {"bypass_old_logprobs": False, "kl_loss_fn_args": {"kl_coef": 0.05}},
    "optimizer": {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3},
    "updates_per_step": 2,
}


def digests(folder: Path) -> dict[str, str]:
    names = ("model/model.safetensors", "optimizer.safetensors", "engine_state.json")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def test_ten_steps_equal_five_and_five_in_another_process(tmp_path: Path) -> None:
    """Weights, moments, schedule, counters and random states, by sha256."""
    folders = [tmp_path / name for name in ("five", "ten", "resumed")]
    for folder in folders:
        folder.mkdir()

    async def scenario(engine: HfEngine) -> None:
        for seed in range(10):
            if seed == 5:
                engine.staging_dir = folders[0]
                engine.save_checkpoint()
            await engine.train_step(groups(seed))
        engine.staging_dir = folders[1]
        engine.save_checkpoint()

    with_engine(engine_config(**CONFIG), scenario)
    repository = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", RESUMED, folders[0], folders[2]], check=True, cwd=repository)
    assert digests(folders[1]) == digests(folders[2])
    assert digests(folders[0]) != digests(folders[1])


@pytest.mark.parametrize("name", ["engine_state.json", "optimizer.safetensors", "model/model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_snapshot_is_refused(name: str, damage: str, tmp_path: Path) -> None:
    async def save(engine: HfEngine) -> None:
        await engine.train_step(groups(0))
        engine.save_checkpoint()

    async def nothing(engine: HfEngine) -> None:
        del engine

    with_engine(engine_config(), save, staging_dir=tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="cannot be restored"):
        with_engine(engine_config(), nothing, restore_dir=tmp_path)


def test_unknown_algorithm_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="did you mean grpo"):
        HfEngine(engine_config({"algorithm_type": "grppo"}))
