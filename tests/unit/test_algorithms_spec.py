"""Presets and how a user's config changes them; what is refused, and with which words."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from engines.algorithms.presets import KINDS, PRESETS, resolve
from engines.algorithms.spec import Algorithm, EntropyBonus, Grpo, KlInLoss, NoKl, PpoClip, Sft, function_of
from engines.config import AlgorithmConfig
from engines.errors import ConfigError


def test_grpo_preset_is_the_reference_systems() -> None:
    algorithm = resolve(AlgorithmConfig(algorithm_type="grpo"))
    assert algorithm.advantage == Grpo(epsilon=1e-6, std_threshold=None)
    assert isinstance(algorithm.loss, PpoClip)
    assert (algorithm.loss.low, algorithm.loss.high, algorithm.loss.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert algorithm.kl == KlInLoss(name="k2", kl_coef=0.001)
    assert algorithm.entropy == EntropyBonus(entropy_coef=0.0)
    assert (algorithm.aggregation, algorithm.group_size) == ("token-mean", 2)
    assert algorithm.needs == {"rewards", "rollout_logprobs", "old_logprobs", "reference"}


def test_sft_preset_needs_nothing() -> None:
    algorithm = resolve(AlgorithmConfig(algorithm_type="sft"))
    assert algorithm == Algorithm(loss=Sft())
    assert algorithm.needs == frozenset()


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_distillation_needs_a_reward_only_to_lower_it(name: str) -> None:
    assert resolve(AlgorithmConfig(algorithm_type=name)).needs == {
        "old_logprobs", "rollout_logprobs", "teacher_logprobs"
    }  # fmt: skip
    lowered = resolve(AlgorithmConfig(algorithm_type=name, kl_penalty_fn="k1"))
    assert {"rewards", "reference"} <= lowered.needs


def test_partial_override_changes_only_what_it_names() -> None:
    algorithm = resolve(
        AlgorithmConfig(
            repeat_times=8,
            policy_loss_fn_args={"clip_range_high": 0.28},
            advantage_fn_args={"epsilon": 1e-4, "std_threshold": 0.0},
            kl_loss_fn="none",
            loss_agg_mode="seq-mean-token-sum",
        )
    )
    assert isinstance(algorithm.loss, PpoClip)
    assert (algorithm.loss.low, algorithm.loss.high, algorithm.loss.clip_ratio_c) == (0.2, 0.28, 3.0)
    assert algorithm.advantage == Grpo(epsilon=1e-4, std_threshold=0.0)
    assert isinstance(algorithm.kl, NoKl)
    assert (algorithm.group_size, algorithm.aggregation) == (8, "seq-mean-token-sum")
    assert algorithm.needs == {"rewards", "rollout_logprobs", "old_logprobs"}


def test_clip_range_sets_both_sides() -> None:
    loss = resolve(AlgorithmConfig(policy_loss_fn_args={"clip_range": 0.1, "clip_range_high": 0.3})).loss
    assert isinstance(loss, PpoClip)
    assert (loss.low, loss.high) == (0.1, 0.3)


def test_zero_kl_coefficient_needs_no_reference() -> None:
    assert "reference" not in resolve(AlgorithmConfig(kl_loss_fn_args={"kl_coef": 0.0})).needs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm_type": "grop"}, ["algorithm_type = 'grop'", "did you mean grpo"]),
        (
            {"policy_loss_fn_args": {"clip_rang": 0.1}},
            ["policy_loss_fn", "clip_rang", "policy_loss_fn_args.clip_rang: there is no such parameter"],
        ),
        ({"policy_loss_fn_args": {"clip_ratio_c": 1.0}}, ["clip_ratio_c", "greater than 1", "got 1.0"]),
        ({"kl_loss_fn": "k1"}, ["kl_loss_fn = 'k1'", "expectation 0", "kl_penalty_fn"]),
        ({"kl_loss_fn": "abs"}, ["kl_loss_fn = 'abs'", "no KL", "kl_penalty_fn"]),
        ({"kl_loss_fn_args": {"adaptive": True}}, ["kl_loss_fn = 'k2'", "target_kl", "horizon"]),
        ({"advantage_fn": "grop"}, ["advantage_fn = 'grop'", "did you mean grpo"]),
        ({"rollout_correction": {"name": "truncate"}}, ["rollout_correction", "bypass_old_logprobs: false"]),
        ({"rollout_correction": {"name": "truncate", "args": {"floor": 0.5}}}, ["floor = 0.5 is for mask"]),
        ({"policy_loss_fn": "os:getcwd"}, ["policy_loss_fn = 'os:getcwd'", "no subclass of LossParams"]),
        ({"algorithm_type": "sft", "advantage_fn_args": {"epsilon": 1.0}}, ["advantage_fn_args", "sft"]),
        ({"algorithm_type": "sft", "policy_loss_fn": "ppo"}, ["needs an advantage", "advantage_fn"]),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(AlgorithmConfig(**changes))
    for word in words:
        assert word in str(error.value)


PARAMS: set[Any] = {params for _, known in KINDS.values() for params in known.values()}


@pytest.mark.parametrize("params", sorted(PARAMS, key=str))
def test_every_part_names_a_function_and_its_source(params: Any) -> None:
    assert params.__doc__
    if not params.__name__.startswith("No"):
        assert callable(function_of(params()))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_to_itself(name: str) -> None:
    assert resolve(AlgorithmConfig(algorithm_type=name)) == PRESETS[name]


def test_params_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Grpo().epsilon = 1.0  # type: ignore[misc]


def test_config_of_algorithms_imports_no_torch() -> None:
    code = (
        "import sys, engines.algorithms.presets, engines.registry, engines.intake, engines.conformance;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_need_that_does_not_exist_is_refused() -> None:
    class Misspelt(PpoClip):
        requires = frozenset({"reward", "old_logprobs"})  # type: ignore[assignment]

    with pytest.raises(ValueError, match="'reward' in `requires` is nothing that there is; did you mean rewards"):
        Algorithm(advantage=Grpo(), loss=Misspelt())
