"""Presets and how a user's config changes them; what is refused, and with which words."""

import subprocess
import sys
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from engines.algorithms import spec
from engines.algorithms.objective import ADVANTAGES, ENTROPY_TERMS, KL_TERMS, LOSSES
from engines.algorithms.presets import resolve
from engines.algorithms.spec import Algorithm, EntropyBonus, Grpo, KlInLoss, NoEntropy, NoKl, PpoClip, Sft
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
    assert algorithm.needs == {"rewards", "old_logprobs", "reference"}


def test_sft_preset_needs_nothing() -> None:
    algorithm = resolve(AlgorithmConfig(algorithm_type="sft"))
    assert algorithm == Algorithm(loss=Sft())
    assert algorithm.needs == frozenset()


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
    assert algorithm.needs == {"rewards", "old_logprobs"}


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
        ({"policy_loss_fn_args": {"clip_rang": 0.1}}, ["policy_loss_fn", "clip_rang", "not permitted"]),
        ({"policy_loss_fn_args": {"clip_ratio_c": 1.0}}, ["clip_ratio_c", "greater than 1", "got 1.0"]),
        ({"kl_loss_fn": "k1"}, ["kl_loss_fn = 'k1'", "'k2'"]),
        ({"advantage_fn": "gae"}, ["advantage_fn = 'gae'", "'grpo'"]),
        ({"algorithm_type": "sft", "advantage_fn_args": {"epsilon": 1.0}}, ["advantage_fn_args", "sft"]),
        ({"algorithm_type": "sft", "policy_loss_fn": "ppo"}, ["needs an advantage", "advantage_fn"]),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(AlgorithmConfig(**changes))
    for word in words:
        assert word in str(error.value)


def test_every_params_class_is_bound_to_a_function_and_nothing_else_is() -> None:
    def classes(union: Any) -> set[type]:
        members = get_args(get_args(union)[0]) or (union,)
        return set(members)

    assert classes(spec.LossParams) == LOSSES.keys()
    assert classes(spec.KlParams) - {NoKl} == KL_TERMS.keys()
    assert classes(spec.EntropyParams) - {NoEntropy} == ENTROPY_TERMS.keys()
    assert {spec.AdvantageParams} == ADVANTAGES.keys()


def test_params_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Grpo().epsilon = 1.0  # type: ignore[misc]


def test_config_of_algorithms_imports_no_torch() -> None:
    code = (
        "import sys, engines.algorithms.presets, engines.registry, engines.intake, engines.conformance;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
