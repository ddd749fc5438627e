"""The algorithms that properties are about: every preset, and variants that reach every parameter with a branch."""

from __future__ import annotations

import itertools
from typing import Any, get_args

from engines.algorithms.presets import PRESETS, resolve
from engines.algorithms.spec import (
    Aggregation,
    Algorithm,
    ClipB,
    ClipV,
    Gae,
    Gigpo,
    Grpo,
    Rec,
    RecLoss,
    ReinforcePlusPlus,
)
from engines.config import AlgorithmConfig


def algorithm(algorithm_type: str, **changes: Any) -> Algorithm:
    """A preset with changes, as a config makes it."""
    return resolve(AlgorithmConfig(algorithm_type=algorithm_type, **changes))


def choices(field: str) -> tuple[str, ...]:
    """The values of a field of `RecLoss`."""
    return get_args(RecLoss.model_fields[field].annotation)


KL_IN_LOSS = ("k2", "k3", "low_var_kl", "corrected_k3")
KL_IN_REWARD = ("k1", "abs", *KL_IN_LOSS)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
RECOMPUTED: dict[str, Any] = {"bypass_old_logprobs": False}


def _corrected(name: str, level: str, base: str = "grpo", **changes: Any) -> Algorithm:
    bounds = {"cap": 1.5} | ({"floor": 0.5} if name == "mask" else {})
    part = {"name": name, "args": {"level": level, **bounds}}
    return algorithm(base, rollout_correction=part, **RECOMPUTED, **changes)


def _rec(clip_mode: str, weight: str, regularizer: str) -> Algorithm:
    parameters = {"clip_mode": clip_mode, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.3}
    return algorithm("rec", policy_loss_fn_args=parameters)


REC = {
    f"rec/{clip_mode}/{weight}/{regularizer}": _rec(clip_mode, weight, regularizer)
    for clip_mode, weight, regularizer in itertools.product(*map(choices, ("clip_mode", "weight", "regularizer")))
}
"""All modes of REC."""

VARIANTS: dict[str, Algorithm] = {
    **{f"kl/{name}": algorithm("grpo", kl_loss_fn=name, kl_loss_fn_args={"kl_coef": 0.3}) for name in KL_IN_LOSS},
    **{f"penalty/{n}": algorithm("rloo", kl_penalty_fn=n, kl_penalty_fn_args={"kl_coef": 0.3}) for n in KL_IN_REWARD},
    "penalty/mix": algorithm("mix", kl_penalty_fn="k2", kl_penalty_fn_args={"kl_coef": 0.3}),
    "penalty/ppo": algorithm("ppo", kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.3}, **RECOMPUTED),
    "kl/adaptive": algorithm(
        "grpo", kl_loss_fn_args={"kl_coef": 0.3, "adaptive": True, "target_kl": 0.1, "horizon": 10}
    ),
    **{f"aggregation/grpo/{mode}": algorithm("grpo", loss_agg_mode=mode) for mode in AGGREGATIONS},
    **{f"aggregation/mix/{mode}": algorithm("mix", loss_agg_mode=mode) for mode in AGGREGATIONS},
    **{f"aggregation/ppo/{mode}": algorithm("ppo", loss_agg_mode=mode) for mode in AGGREGATIONS},
    **{
        f"correction/{name}/{level}": _corrected(name, level)
        for name in ("truncate", "mask", "full")
        for level in ("token", "sequence", "geometric")
    },
    "correction/mix": _corrected("truncate", "token", "mix"),
    "correction/rec": _corrected("mask", "geometric", "rec", policy_loss_fn_args={"clip_mode": "gspo-one-side"}),
    "entropy/all": algorithm("grpo", entropy_loss_fn_args={"entropy_coef": 0.2}),
    "entropy/samples": algorithm("mix", entropy_loss_fn_args={"entropy_coef": 0.2}),
    "old/recomputed": algorithm("grpo", **RECOMPUTED),
    "old/recomputed_mix": algorithm("mix", **RECOMPUTED),
    "clip/dual": algorithm("grpo", policy_loss_fn_args={"clip_ratio_c": 1.3}),
    "clip/sequence_masking": algorithm("grpo", policy_loss_fn_args={"enable_sequence_masking": True}),
    "clip/policy_gradient": algorithm("grpo", policy_loss_fn_args={"fallback_to_policy_gradient": True}),
    "clip/cispo_mask": algorithm("cispo", policy_loss_fn_args={"enable_mask_clip": True, "mask_clip_range_low": 0.2}),
    "clip_cov": algorithm(
        "grpo",
        policy_loss_fn="clip_cov",
        policy_loss_fn_args={"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
    ),
    "kl_cov": algorithm("grpo", policy_loss_fn="kl_cov", policy_loss_fn_args={"kl_cov_ratio": 0.2}),
    "clipb": algorithm("grpo", advantage_fn="clipb", advantage_fn_args={"mu": 0.5}),
    "clipv": algorithm("grpo", advantage_fn="clipv", advantage_fn_args={"mu": 0.1, "max_frac": 0.3}),
    "overlong": algorithm("grpo", overlong_shaping={"name": "overlong", "args": {"cache_share": 0.8}}),
    "mask_truncated": algorithm("grpo", mask_truncated=True),
    "filter/reward": algorithm("grpo", filters=[{"name": "reward_filter"}]),
    "filter/reward_std": algorithm("grpo", filters=[{"name": "reward_std_filter", "args": {"threshold": 0.1}}]),
    "grpo/batch_std": algorithm("grpo", advantage_fn_args={"std_cal_level": "batch"}),
    "grpo/std_threshold": algorithm("grpo", advantage_fn_args={"std_threshold": 0.1}),
    "grpo/rank_penalty": algorithm("grpo", advantage_fn_args={"rank_penalty": 0.3}),
    "opmd/logavgexp": algorithm("opmd", advantage_fn_args={"opmd_baseline": "logavgexp"}),
    "rec/std": algorithm("rec", advantage_fn_args={"std_normalize": True}),
    "rec/balance": algorithm("rec", advantage_fn_args={"drop": "balance"}),
    "multi_step_grpo/norm": algorithm(
        "multi_step_grpo", advantage_fn_args={"enable_step_norm": True, "std_threshold": 0.0}
    ),
    "gigpo/std": algorithm("gigpo", advantage_fn_args={"fnorm": "std", "gamma": 0.9, "omega": 0.5}),
    "ppo/gae": algorithm("ppo", advantage_fn_args={"gamma": 0.95, "lam": 0.9}),
    "reinforceplusplus/discounted": algorithm("reinforceplusplus", advantage_fn_args={"gamma": 0.9}),
    "jsd/0": algorithm("jsd", advantage_fn_args={"lambda_coef": 0.0}),
    "jsd/1": algorithm("jsd", advantage_fn_args={"lambda_coef": 1.0, "temperature": 2.0}),
    "distill/recomputed": algorithm("on_policy_distill", **RECOMPUTED),
    "dpo/smooth": algorithm("dpo", policy_loss_fn_args={"label_smoothing": 0.1}),
    "sft/is": algorithm("sft", policy_loss_fn="sft_is"),
    "sft/phi": algorithm("sft", policy_loss_fn="sft_phi", policy_loss_fn_args={"cutoff_prob": 0.3}),
    "mix_chord/sft": algorithm(
        "mix_chord", policy_loss_fn_args={"enable_phi_function": False, "mu_warmup_steps": 3, "mu_decay_steps": 5}
    ),
    **{name: REC[name] for index, name in enumerate(REC) if index % 7 == 0},
}

ALGORITHMS: dict[str, Algorithm] = {**PRESETS, **VARIANTS}

BY_POSITION = {
    "clip_cov": "which tokens are detached is drawn at random, by position",
    "kl_cov": "among equal covariances the first tokens are held back",
    "rec/balance": "which surplus rows are set aside is drawn at random, by position",
    "grpo/rank_penalty": "rows of equal mean logprob, those that train nothing among them, rank by position",
}
"""Algorithms whose choice among equals depends, by definition, on the order of rows."""


def why_batch_wide(algorithm: Algorithm) -> str | None:
    """Why, by definition, what a group is worth depends on the other groups of the batch. None: it does not."""
    if algorithm.loss.select is not None:
        return "covariances are centred on the batch, and a share of its tokens is chosen"
    match algorithm.advantage:
        case Gae() | ReinforcePlusPlus():
            return "advantages are whitened over the batch"
        case Grpo(std_cal_level="batch"):
            return "rewards are divided by the std of the batch"
        case ClipB() | ClipV():
            return "scores are compared to the batch's"
        case Rec(drop="balance"):
            return "rows are drawn from one stream for the whole batch"
        case Gigpo():
            return "steps in the same state are compared over all tasks"
    return None
