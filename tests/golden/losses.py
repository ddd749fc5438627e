"""Evaluates policy_loss_*: our losses against the reference's numbers, and against their derivations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from engines.algorithms.inputs import Part
from engines.algorithms.mixing import chord_mu
from engines.algorithms.presets import KINDS
from engines.algorithms.spec import Dpo, LossParams, Mix, MixChord, PpoClip, RecLoss, function_of
from tests.golden import derived_losses as derived
from tests.golden.batches import Batch
from tests.golden.checks import Verdict
from tests.golden.format import Case, Unreadable, floats, padded

METRICS = {
    "pg_clipfrac": "policy/clip_fraction",
    "pg_clipfrac_lower": "policy/clip_fraction_lower",
    "ppo_kl": "kl/policy",
    "approx_kl": "kl/policy",
    "ppo_kl_seq": "kl/sequence",
    "ratio/mean": "policy/ratio_mean",
    "avg_ratio": "policy/ratio_mean",
    "avg_alpha": "policy/taper_mean",
    "avg_soft_gate": "policy/gate_mean",
}
"""Name of a metric there -> here."""
SEQUENCE_MASK_EPSILON = 1e-10
"""Of the denominators of its metrics there."""
CONSTRUCTOR = {"epsilon_low_prime": 0.4, "epsilon_high_prime": 0.4}
"""Of rec there, if init_args name others alone (difference 8): its default_args, and ours, are 0.6 and 2."""
LOSS_METRICS = {f"{name}_loss" for name in ("pg", "cispo", "sapo", "topr", "opmd", "sft", "sft_is", "sft_phi", "dpo")}
MIX_ARGS = {
    *("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"),
    *("train_batch_size_usual", "train_batch_size_expert"),
}
"""What the reference's mix and mix_chord divide by: difference 9."""


def policy_loss(name: str, case: Case) -> Verdict:
    """One case of policy_loss_<name>."""
    special: dict[str, Callable[[Case], Verdict]] = {
        "dpo": _dpo,
        "mix": lambda case: _mixed("mix", case),
        "mix_chord": lambda case: _mixed("mix_chord", case),
    }
    return special[name](case) if name in special else _plain(name, case)


def _parameters(name: str, case: Case, besides: set[str]) -> tuple[LossParams, Any]:
    """Our parameters and the aggregation. Raises Unreadable for an init_arg that we do not know."""
    args = {key: value for key, value in case.init_args.items() if key not in besides}
    mode = args.pop("loss_agg_mode", "seq-mean-token-mean" if name == "gspo" else "token-mean")
    if name == "gspo" and (both := args.pop("clip_range", None)) is not None:
        args = {"clip_range_low": both, "clip_range_high": both} | args
    try:
        params = KINDS["policy_loss_fn"][1][name].model_validate({"name": name, **args})
    except ValidationError as error:
        raise Unreadable(f"init_args of {name}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    assert isinstance(params, LossParams)
    of_sequences = isinstance(params, RecLoss) and params.clip_mode == "gspo-one-side"
    return params, "seq-mean-token-mean" if of_sequences else mode


def _plain(name: str, case: Case) -> Verdict:
    verdict, batch = Verdict(), Batch.of(case.inputs)
    params, mode = _parameters(name, case, set())
    if batch.skips_rows(mode):
        verdict.differences.add(4)
    if name == "sapo" and batch.mask.any():
        verdict.differences.add(3)
    there_params = params
    if isinstance(params, RecLoss) and params.clip_mode == "ring" and not case.init_args.keys() >= CONSTRUCTOR.keys():
        verdict.differences.add(8)
        there_params = params.model_copy(update=CONSTRUCTOR | params.model_dump(include=set(case.init_args)))
    loss = function_of(params)
    ours = batch.reduced(loss(batch.inputs, params), mode, batch.inputs, batch.counts)
    tokens = {row: derived.LOSSES[name](values, case.init_args) for row, values in enumerate(batch.rows)}
    wanted, gradient, size = batch.derived(tokens, mode)
    verdict.compare("loss, derived", ours.loss, wanted, atol=1e-14 * max(1, size))
    verdict.compare("gradient, derived", ours.gradient, gradient)
    if case.error is not None:
        _explain_error(verdict, params, case)
        return verdict
    x = batch.inputs_there()
    there = batch.reduced(loss(x, there_params), mode, x, batch.counts_there())
    value, slopes = there.loss, there.gradient
    if name == "sapo":
        tokens = {row: derived.sapo_of_that_system(values, case.init_args) for row, values in enumerate(batch.rows)}
        value, slopes, size = batch.derived(tokens, mode, of_that_system=True)
    verdict.compare("loss", value, case.outputs["loss"], atol=1e-14 * max(1, size))
    verdict.compare("gradient", slopes, _gradient(case, batch))
    metrics = {key: there.metrics[own] for key, own in METRICS.items() if own in there.metrics}
    metrics |= dict.fromkeys(LOSS_METRICS, value) | _shares(name, params, batch, there.metrics)
    if "policy/sequence_masked_fraction" in there.metrics:
        metrics |= _sequence_masking(case, batch)
    verdict.compare_metrics(case.outputs["metrics"], metrics, set())
    return verdict


def _shares(name: str, params: LossParams, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that are shares of the action tokens, with that system's denominator."""
    num_tokens = float(batch.mask.sum())
    scale = 1 / (num_tokens + derived.EPSILON)
    if name == "cispo":
        return {"unmasked_frac": num_tokens * scale - metrics.get("policy/masked_fraction", 0.0)}
    if name == "sapo":
        return {"pos_adv_frac": scale * sum(adv > 0 for row in batch.rows for adv in row.advantage)}
    return {}


def _sequence_masking(case: Case, batch: Batch) -> dict[str, float]:
    """Metrics of PPO's sequence masking, as counted there."""
    drifts, num_masked = list[float](), 0
    fallback = case.init_args.get("fallback_to_policy_gradient", False)
    for row, advantages in zip(batch.rows, padded(case.inputs, "advantages").tolist(), strict=True):
        drift = 0.0 if fallback else -sum(derived.within(d, -20, 20) for d in row.log_ratios)
        drifts.append(drift / (len(row.logprob) + SEQUENCE_MASK_EPSILON))
        num_masked += derived.ppo_masked_of_that_system(drifts[-1], advantages, case.init_args)
    share = num_masked / (float(batch.mask.sum()) + SEQUENCE_MASK_EPSILON)
    return {"seq_mask/masked_tokens": share, "seq_mask/mean_sequence_kl": sum(drifts) / len(drifts)}


def _gradient(case: Case, batch: Batch) -> Any:
    """That of the file; a loss that does not depend on the logprobs has none there."""
    given = case.outputs["grad_logprob"]
    return batch.mask * 0.0 if given is None else floats(given).reshape(batch.mask.shape)


def _explain_error(verdict: Verdict, params: LossParams, case: Case) -> None:
    """Difference 7: gspo_importance_sampling crashes there unless the clip mode computes the ratio that it needs.
    Difference 8: init_args without a clip range leave PPO without one.
    """
    if isinstance(params, RecLoss):
        lacks_ratio = params.weight == "gspo_importance_sampling" and params.clip_mode != "gspo-one-side"
        verdict.differences |= {7} if lacks_ratio else set()
    if isinstance(params, PpoClip | Mix) and not case.init_args.keys() & {"clip_range", "clip_range_low"}:
        verdict.differences.add(8)
    covered = bool(verdict.differences & {7, 8})
    verdict.require(f"a listed difference covers {str(case.error)[:60]!r}", covered)


def _dpo(case: Case) -> Verdict:
    verdict, batch = Verdict(), Batch.of(case.inputs)
    params, _ = _parameters("dpo", case, {"loss_agg_mode"})
    assert isinstance(params, Dpo)
    if len(batch.mask) % 2:
        raise Unreadable(f"{len(batch.mask)} rows are not pairs")
    if len(batch.mask) > 2:
        verdict.differences.add(2)
    # every row of a pair is there, even one without an action token
    empty, lengths = batch.mask.sum(1) == 0, batch.inputs.num_actions
    x = batch.inputs
    if empty.any():
        rows = [row for row, count in enumerate(batch.lengths) for _ in range(count)]
        x = type(x)(
            logprobs=x.logprobs,
            row_of_token=lengths.new_tensor(rows),
            num_actions=lengths.new_tensor(batch.lengths),
            reference_logprobs=x.reference_logprobs,
        )
    counts = {part: type(count)(count.tokens, len(batch.mask), count.longest) for part, count in batch.counts.items()}
    ours = batch.reduced(function_of(params)(x, params), "token-mean", x, counts)
    mean, slopes, losses = derived.dpo(batch.rows, case.init_args)
    verdict.compare("loss, derived", ours.loss, mean)
    verdict.compare("gradient, derived", ours.gradient, batch.mask * floats(slopes)[:, None])
    if case.error is not None:
        verdict.require(f"a listed difference covers {case.error[:60]!r}", False)
        return verdict
    mean_there, slopes_there, _ = derived.dpo(batch.rows, case.init_args, of_that_system=True)
    verdict.compare("loss", mean_there, case.outputs["loss"])
    verdict.compare("gradient", batch.mask * floats(slopes_there)[:, None], _gradient(case, batch))
    num_pairs, own = len(batch.mask) // 2, ours.metrics
    chosen, rejected = num_pairs * own["dpo/chosen_reward"], num_pairs * own["dpo/rejected_reward"]
    metrics = {"chosen_reward": chosen, "rejected_reward": rejected, "accuracy_mean": float(chosen > rejected)}
    verdict.compare_metrics(case.outputs["metrics"], metrics | {"dpo_loss": mean_there}, set())
    if (pairs := case.extra.get("per_pair_reference")) is not None:
        verdict.compare("loss, per pair", ours.loss, pairs["mean_loss"])
        verdict.compare("losses of the pairs", losses, pairs["losses"])
        verdict.compare("chosen rewards of the pairs", chosen, sum(pairs["chosen_rewards"]))
        verdict.compare("rejected rewards of the pairs", rejected, sum(pairs["rejected_rewards"]))
        verdict.compare("accuracy of the pairs", own["dpo/accuracy"], pairs["accuracy"])
    return verdict


def _mixed(name: str, case: Case) -> Verdict:
    """Difference 9: that system multiplies the parts with what their rows are in relation to configured numbers."""
    steps = set(case.inputs.get("step") or [0])
    if len(steps) > 1:
        raise Unreadable(f"rows of several steps: {sorted(steps)}")
    verdict, batch = Verdict(), Batch.of(case.inputs, step=int(steps.pop()))
    params, mode = _parameters(name, case, MIX_ARGS)
    assert isinstance(params, Mix)
    factors = _factors(case.init_args, batch)
    is_chord = isinstance(params, MixChord)
    mu = chord_mu(batch.inputs.step, params) if is_chord else params.mu
    expert_loss = ("sft_phi" if params.enable_phi_function else "sft") if is_chord else "sft"
    parts = {Part.SAMPLED: ("ppo", 1 - mu), Part.EXPERT: (expert_loss, mu)}
    if any(batch.members(part) and factors[part] != 1 for part in parts):
        verdict.differences.add(9)
    undefined = [part for part in parts if is_chord and batch.lacks_all(mode, part)]
    if undefined or batch.skips_rows(mode, list(parts)):
        verdict.differences.add(4)
    loss = function_of(params)
    ours = batch.reduced(loss(batch.inputs, params), mode, batch.inputs, batch.counts)
    wanted, gradient, size = 0.0, batch.mask * 0.0, 0.0
    for part, (of_part, share) in parts.items():
        tokens = {row: derived.LOSSES[of_part](batch.rows[row], case.init_args) for row in batch.members(part)}
        value, slopes, sizes = batch.derived(tokens, mode)
        wanted, gradient, size = wanted + share * value, gradient + share * slopes, size + share * sizes
    verdict.compare("loss, derived", ours.loss, wanted, atol=1e-14 * max(1, size))
    verdict.compare("gradient, derived", ours.gradient, gradient)
    if case.error is not None:
        _explain_error(verdict, params, case)
        return verdict
    x = batch.inputs_there()
    there = batch.reduced(loss(x, params), mode, x, batch.counts_there(), factors)
    scale = 1e-14 * max(1, size * max(factors.values()))
    verdict.compare("loss", float("nan") if undefined else there.loss, case.outputs["loss"], atol=scale)
    verdict.compare("gradient", there.gradient, _gradient(case, batch))
    metrics = {"loss": float("nan") if undefined else there.loss, "mu": mu}
    for key, own in METRICS.items():
        metrics[f"usual/{key}"] = factors[Part.SAMPLED] * there.metrics.get(own, 0.0)
    if mu < 1:
        metrics["usual/pg_loss"] = there.shares[Part.SAMPLED] / (1 - mu)
    if mu > 0:
        metrics[f"expert/{expert_loss}_loss"] = there.shares[Part.EXPERT] / mu
    metrics |= {f"expert/{expert_loss}_loss": float("nan") for part in undefined if part is Part.EXPERT}
    metrics |= {f"usual/{key}": float("nan") for part in undefined if part is Part.SAMPLED for key in ("pg_loss",)}
    verdict.compare_metrics(case.outputs["metrics"], metrics, {"usual/pg_loss", f"expert/{expert_loss}_loss"})
    return verdict


def _factors(args: dict[str, Any], batch: Batch) -> dict[Part, float]:
    """What that system multiplies the loss of a part with."""
    mini, micro = args.get("ppo_mini_batch_size", 1), args.get("ppo_micro_batch_size_per_gpu", 1)
    num_gpus, factors = args.get("ngpus_trainer", 1), dict[Part, float]()
    for part, key in ((Part.SAMPLED, "train_batch_size_usual"), (Part.EXPERT, "train_batch_size_expert")):
        per_gpu = args.get(key, 1) // num_gpus
        if args.get("use_dynamic_bsz"):
            weight = (mini // num_gpus) / (len(batch.mask) * per_gpu)
        else:
            weight = (mini // micro) / per_gpu
        factors[part] = len(batch.members(part)) * weight
    return factors
