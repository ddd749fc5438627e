"""Evaluates kl_*, entropy_*, utils_aggregate and verl_*: what stands beside the policy loss, and sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from engines.advantage_stage import penalised
from engines.algorithms.advantages import AdvantageInputs, sample_std
from engines.algorithms.inputs import Part, TokenLoss
from engines.algorithms.kl import adapted, estimate, penalty
from engines.algorithms.objective import Objective
from engines.algorithms.presets import KINDS
from engines.algorithms.reduce import aggregate
from engines.algorithms.spec import (
    Algorithm,
    EntropyParams,
    Grpo,
    KlInReward,
    KlParams,
    PpoClip,
    ReinforcePlusPlus,
    Sft,
    function_of,
)
from engines.algorithms.token_advantages import reinforce_plus_plus
from engines.algorithms.value import clipped_value_loss
from engines.experience import EID
from engines.rows import Row, StepRows
from tests.golden import derived_losses as derived
from tests.golden.batches import Batch
from tests.golden.checks import Verdict
from tests.golden.derived_losses import EPSILON
from tests.golden.format import Case, Unreadable, floats, known_args, mask_of, padded

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ARGS = {"adaptive", "kl_coef", "target_kl", "horizon"}


def kl(name: str, case: Case) -> Verdict:
    """One case of kl_<name>: in the loss, or in the reward if its name begins with penalty/."""
    known_args(case, KL_ARGS)
    return _kl_in_reward(name, case) if case.name.startswith("penalty/") else _kl_in_loss(name, case)


def _kl_in_loss(name: str, case: Case) -> Verdict:
    verdict, batch, mode = Verdict(), Batch.of(case.inputs), case.inputs["loss_agg_mode"]
    if batch.skips_rows(mode) and name != "none":
        verdict.differences.add(4)
    coefficient = case.init_args.get("kl_coef", 0.001)
    x = batch.inputs
    assert x.reference_logprobs is not None
    if name == "none":
        _compare_with_no_term(
            verdict, case, KINDS["kl_loss_fn"][1]["none"].model_validate({"name": name} | case.init_args)
        )
        verdict.compare("kl", np.zeros(batch.mask.shape), case.outputs["kl"])
        return verdict
    divergence = estimate(name, x.logprobs, x.reference_logprobs, x.old_logprobs)
    tokens = {row: derived.kl(name, values) for row, values in enumerate(batch.rows)}
    values = [value for row in tokens.values() for value, _ in row]
    verdict.compare("kl, derived", divergence.detach().numpy(), values, atol=1e-12)
    if name in ("k1", "abs"):  # not offered in the loss, since the gradient is that of no KL
        loss = TokenLoss(coefficient * divergence)
    else:
        params = KINDS["kl_loss_fn"][1][name].model_validate({"name": name} | case.init_args)
        loss = function_of(params)(x, params)
    ours = batch.reduced(loss, mode, x, batch.counts)
    wanted, gradient, size = batch.derived(tokens, mode)
    verdict.compare("loss, derived", ours.loss, coefficient * wanted, atol=1e-14 * max(1, size))
    noise = 1e-15 * max((derived.kl_size(values) for values in batch.rows), default=0.0)
    verdict.compare("gradient, derived", ours.gradient, coefficient * gradient, atol=1e-13 + noise)
    if case.error is not None:
        verdict.require(f"a listed difference covers {case.error[:60]!r}", False)
        return verdict
    old = case.inputs.get("old_logprob")
    everywhere = estimate(
        name,
        batch.leaf.detach(),
        torch.from_numpy(padded(case.inputs, "ref_logprob")),
        None if old is None else torch.from_numpy(floats(old)),
    )
    verdict.compare("kl", everywhere.numpy(), case.outputs["kl"], atol=1e-12)
    there = batch.reduced(loss, mode, batch.inputs_there(), batch.counts_there())
    verdict.compare("loss", there.loss, case.outputs["loss"], atol=1e-14 * max(1, size))
    verdict.compare("gradient", there.gradient, case.outputs["grad_logprob"])
    without = there.loss / coefficient if coefficient else batch.derived(tokens, mode, of_that_system=True)[0]
    verdict.compare_metrics(case.outputs["metrics"], {"kl_loss": without, "kl_coef": coefficient}, set())
    return verdict


def _compare_with_no_term(verdict: Verdict, case: Case, params: Any) -> None:
    """A term named none: our objective has no such term, the file has a loss of 0."""
    is_kl = isinstance(params, KlParams)
    algorithm = Algorithm(loss=Sft(), **{"kl" if is_kl else "entropy": params})
    verdict.require("needs nothing", not algorithm.needs, str(algorithm.needs))
    batch = Batch.of(case.inputs, "logprob" if is_kl else "entropy")
    _, stats = Objective(algorithm).loss(batch.inputs, batch.counts)
    ours = stats.get("loss/kl" if is_kl else "loss/entropy")
    verdict.compare("loss", 0.0 if ours is None else float(ours.value), case.outputs["loss"])
    gradient = case.outputs.get("grad_logprob")
    verdict.compare("gradient", np.zeros(batch.mask.shape), batch.mask * 0.0 if gradient is None else gradient)
    verdict.compare_metrics(case.outputs["metrics"], {}, set())


def _kl_in_reward(name: str, case: Case) -> Verdict:
    """Difference 7: there, an adaptive coefficient crashes, and so does a penalty without a reference."""
    verdict, inputs = Verdict(), case.inputs
    mask, scores = mask_of(inputs), padded(inputs, "token_level_scores")
    try:
        params = KINDS["kl_penalty_fn"][1][name].model_validate({"name": name} | case.init_args)
    except ValidationError as error:
        verdict.require(f"both refuse {error.errors()[0]['msg']!r}", case.error is not None)
        return verdict
    assert isinstance(params, KlParams)
    missing = inputs.get("ref_log_prob") is None
    crashes = name != "none" and (missing or params.adaptive)
    if case.error is not None:
        verdict.require(f"a listed difference covers {case.error[:60]!r}", crashes)
        verdict.differences |= {7} if crashes else set()
    if name == "none" or missing:
        # ours cannot be without a reference where it is needed: the algorithm asks the engine for one before the start
        algorithm = Algorithm(advantage=Grpo(), loss=PpoClip(), kl_penalty=params)
        needed = isinstance(params, KlInReward) and params.kl_coef > 0
        verdict.require("asks for a reference if it needs one", ("reference" in algorithm.needs) == needed)
        if case.error is None:
            verdict.compare("rewards", scores, case.outputs["token_level_rewards"])
            verdict.compare_metrics(case.outputs["metrics"], {"kl": 0.0, "kl_coef": 0.0}, set())
            verdict.compare("coefficient", params.kl_coef, case.outputs.get("kl_coef_after", params.kl_coef))
        return verdict
    old, reference = padded(inputs, "old_log_probs"), padded(inputs, "ref_log_prob")
    divergence = penalty(name, torch.from_numpy(old[mask]), torch.from_numpy(reference[mask])).numpy()
    rewards = scores.copy()
    rewards[mask] = np.concatenate([*_penalised(mask, scores, divergence, params.kl_coef), np.empty(0)])
    mean = float(divergence.mean()) if len(divergence) else 0.0
    coefficient = adapted(params.kl_coef, params, mean, len(mask)) if params.adaptive else params.kl_coef
    tokens = [
        derived.kl(name, derived.Tokens(logprob=o[m].tolist(), reference=r[m].tolist()))
        for o, r, m in zip(old, reference, mask, strict=True)
    ]
    wanted = scores.copy()
    wanted[mask] -= params.kl_coef * np.array([value for row in tokens for value, _ in row])
    verdict.compare("rewards, derived", rewards, wanted, atol=1e-12)
    verdict.compare("coefficient, derived", coefficient, _derived_coefficient(params, tokens))
    if case.error is None:
        verdict.compare("rewards", rewards, case.outputs["token_level_rewards"], atol=1e-12)
        of_rows = [sum(value for value, _ in row) / (len(row) + EPSILON) for row in tokens]
        own = {"kl": float(np.mean(of_rows)), "kl_coef": params.kl_coef}
        verdict.compare_metrics(case.outputs["metrics"], own, set())
        verdict.compare("coefficient after", coefficient, case.outputs["kl_coef_after"])
    return verdict


def _derived_coefficient(params: KlParams, tokens: list[list[derived.Token]]) -> float:
    """Ziegler et al. 2019, arXiv:1909.08593, 2.2: by at most a fifth of the share of the horizon that a batch is."""
    if not params.adaptive or params.target_kl is None or params.horizon is None:
        return params.kl_coef
    values = [value for row in tokens for value, _ in row]
    error = derived.within(sum(values) / max(len(values), 1) / params.target_kl - 1, -0.2, 0.2)
    return params.kl_coef * (1 + error * len(tokens) / params.horizon)


def _penalised(mask: Any, scores: Any, divergence: Any, coefficient: float) -> list[Any]:
    """Per row [A] rewards of the action tokens, as our engine lowers them."""
    num_rows = len(mask)
    rows = StepRows(
        rows=[Row.of(np.zeros(len(m) + 1), np.flatnonzero(m) + 1) for m in mask],
        eids=[EID()] * num_rows,
        infos=[{}] * num_rows,
        groups=list(range(num_rows)),
        response_lengths=[len(m) for m in mask],
        is_expert=[False] * num_rows,
        is_truncated=[False] * num_rows,
        rewards=scores.sum(1),
        columns={"token_rewards": [s[m] for s, m in zip(scores, mask, strict=True)]},
    )
    lowered = penalised(rows, divergence, coefficient)
    assert lowered.rewards is not None
    return lowered.columns["token_rewards"]


def entropy(name: str, case: Case) -> Verdict:
    """One case of entropy_<name>. The file's loss is what its engine subtracts, ours is added."""
    known_args(case, {"entropy_coef"})
    verdict, mode = Verdict(), case.inputs["loss_agg_mode"]
    params = KINDS["entropy_loss_fn"][1][name].model_validate({"name": name} | case.init_args)
    assert isinstance(params, EntropyParams)
    if name == "none":
        _compare_with_no_term(verdict, case, params)
        return verdict
    batch = Batch.of(case.inputs, "entropy")
    part = Part.SAMPLED if name == "mix" else Part.ALL
    undefined = batch.lacks_all(mode, part)
    if undefined or batch.skips_rows(mode, [part]):
        verdict.differences.add(4)
    coefficient, loss = params.entropy_coef, function_of(params)(batch.inputs, params)
    ours = batch.reduced(loss, mode, batch.inputs, batch.counts)
    tokens = {row: [(value, 1.0) for value in batch.rows[row].logprob] for row in batch.members(part)}
    wanted, gradient, size = batch.derived(tokens, mode)
    verdict.compare("loss, derived", -ours.loss, coefficient * wanted, atol=1e-14 * max(1, size))
    verdict.compare("gradient, derived", -ours.gradient, coefficient * gradient)
    there = batch.reduced(loss, mode, batch.inputs_there(), batch.counts_there())
    value = float("nan") if undefined else -there.loss
    verdict.compare("loss", value, case.outputs["loss"], atol=1e-14 * max(1, size))
    if case.outputs.get("grad_entropy") is not None:
        verdict.compare("gradient", -there.gradient, case.outputs["grad_entropy"])
    without = value / coefficient if coefficient else batch.derived(tokens, mode, of_that_system=True)[0]
    verdict.compare_metrics(case.outputs["metrics"], {"entropy_loss": without}, set())
    return verdict


def utils_aggregate(case: Case) -> Verdict:
    """One case of utils_aggregate: the four means, and what whitening is made of."""
    verdict, batch = Verdict(), Batch.of(case.inputs, "values")
    num_tokens, values = int(batch.mask.sum()), batch.leaf.detach().numpy()[batch.mask]
    loss, wanted = TokenLoss(batch.inputs.logprobs), dict[str, Any]()
    for mode in MODES:
        if batch.skips_rows(mode):
            verdict.differences.add(4)
        tokens = {row: [(value, 1.0) for value in of_row.logprob] for row, of_row in enumerate(batch.rows)}
        ours = batch.reduced(loss, mode, batch.inputs, batch.counts).loss  # type: ignore[arg-type]
        verdict.compare(f"{mode}, derived", ours, batch.derived(tokens, mode)[0], atol=1e-12)
        there = batch.reduced(loss, mode, batch.inputs_there(), batch.counts_there())  # type: ignore[arg-type]
        wanted[mode] = there.loss
    longer = dataclasses.replace(batch.counts[Part.ALL], longest=128)
    norm = float(aggregate(loss, batch.inputs, "seq-mean-token-sum-norm", longer).detach())
    wanted["seq-mean-token-sum-norm(normalizer=128)"] = norm * 128 / (128 + EPSILON)
    means = np.zeros(len(batch.mask))
    means[batch.mask.any(1)] = batch.inputs_there().sequence_mean(batch.inputs.logprobs).detach().numpy()
    wanted |= {"masked_mean": wanted["token-mean"], "masked_mean_axis-1": means}
    wanted["masked_sum"] = norm * 128
    wanted["masked_var"], wanted["masked_var_biased"] = sample_std(values) ** 2, sample_std(values, ddof=0) ** 2
    whitened = np.zeros(batch.mask.shape)
    whitened[batch.mask] = _whitened(values)
    if case.error is not None:
        crashes = num_tokens < 2
        verdict.require(f"a listed difference covers {case.error[:60]!r}", crashes)
        verdict.compare("whitened, derived", whitened, np.zeros(batch.mask.shape))
        verdict.differences |= {4} if crashes else set()
        return verdict
    for key, value in case.outputs.items():
        if isinstance(value, dict) and "error" in value:
            verdict.require(f"a listed difference covers the error of {key}", num_tokens < 2)
            verdict.differences.add(4)
        elif key == "masked_whiten":
            shift = 0.0 if case.inputs.get("shift_mean", True) else wanted["masked_mean"]
            verdict.compare(key, whitened[batch.mask] + shift, floats(value)[batch.mask], rtol=1e-7, atol=1e-8)
            verdict.compare(f"{key} of that system", _whitened_there(case, batch, wanted), value, atol=1e-12)
        elif key.startswith("masked_var"):
            there = _variance_there(batch, wanted["masked_mean"], biased=key.endswith("_biased"))
            verdict.compare(f"{key} of that system", there, value)
            verdict.compare(key, wanted[key], value, rtol=1e-7)
        else:
            verdict.require(f"output {key} is known", key in wanted)
            verdict.compare(key, wanted.get(key, np.nan), value, atol=1e-12)
    return verdict


def _whitened(values: Any) -> Any:
    """Ours: what REINFORCE++ does to rewards that nothing follows."""
    lengths, zero = np.array([len(values)], np.int64), np.zeros(1)
    x = AdvantageInputs(np.asarray(values), zero, lengths, groups=())
    return reinforce_plus_plus(x, ReinforcePlusPlus(gamma=0.0)).values


def _variance_there(batch: Batch, mean: float, biased: bool) -> float:
    """Difference 4: 1e-8 in the mean, in the mean of squares, and then M / (M - 1) of the biased one."""
    values = [value for row in batch.rows for value in row.logprob]
    variance = sum((value - mean) ** 2 for value in values) / (len(values) + EPSILON)
    return variance if biased else variance * len(values) / (len(values) - 1)


def _whitened_there(case: Case, batch: Batch, wanted: dict[str, Any]) -> Any:
    """Of every token, masked ones included."""
    mean = wanted["masked_mean"]
    whitened = (batch.leaf.detach().numpy() - mean) / np.sqrt(_variance_there(batch, mean, biased=False) + EPSILON)
    return whitened if case.inputs.get("shift_mean", True) else whitened + mean


def verl_agg_loss(case: Case) -> Verdict:
    """One case of verl_agg_loss. Its mode is the second part of its name.

    verl leaves out rows without tokens and adds nothing, as we do. Its token-sum is our token-mean times the tokens,
    its sum-norm ours over the number of rows.
    """
    verdict, batch = Verdict(), Batch.of(case.inputs, "loss_mat")
    mode = case.name.split("/")[1] if "/" in case.name else ""
    counts = batch.counts[Part.ALL]
    ours_mode = "token-mean" if mode == "token-sum" else mode
    if ours_mode not in MODES:
        raise Unreadable(f"{mode!r} is no aggregation that we know")
    scale = counts.tokens if mode == "token-sum" else 1.0
    if mode == "seq-mean-token-sum-norm":
        scale = 1 / max(counts.sequences, 1)
    loss, x = TokenLoss(batch.inputs.logprobs), batch.inputs
    ours = batch.reduced(loss, ours_mode, x, batch.counts).loss * scale  # type: ignore[arg-type]
    tokens = {row: [(value, 1.0) for value in of_row.logprob] for row, of_row in enumerate(batch.rows)}
    verdict.compare("loss, derived", ours, batch.derived(tokens, ours_mode)[0] * scale, atol=1e-12)
    if not counts.tokens and mode != "token-sum":
        verdict.differences.add(4)
        verdict.require("loss is 0 / 0 there", _nothing(case.outputs))
        return verdict
    verdict.compare("loss", ours, case.outputs, atol=1e-12)
    return verdict


def _nothing(value: Any) -> bool:
    return bool(np.isnan(floats(value)) or floats(value) == 0)


def verl_value_loss(case: Case) -> Verdict:
    """One case of verl_value_loss: the critic's. Schulman's PPO2 baseline: half the larger of both squares."""
    args, verdict = known_args(case, {"cliprange_value", "loss_agg_mode"}), Verdict()
    mode, clip = args.get("loss_agg_mode", "token-mean"), args["cliprange_value"]
    if mode not in MODES:
        raise Unreadable(f"{mode!r} is no aggregation that we know")
    batch = Batch.of(case.inputs, "vpreds")
    returns, values = padded(case.inputs, "returns")[batch.mask], padded(case.inputs, "values")[batch.mask]
    predicted = batch.inputs.logprobs
    loss = clipped_value_loss(predicted, torch.from_numpy(values), torch.from_numpy(returns), clip)
    ours = batch.reduced(loss, mode, batch.inputs, batch.counts)
    flat, tokens = iter(zip(predicted.tolist(), values.tolist(), returns.tolist(), strict=True)), dict[int, Any]()
    clipped_tokens = 0
    for row, length in enumerate(batch.lengths):
        tokens[row] = []
        for v, old, target in (next(flat) for _ in range(length)):
            plain, clipped = (v - target) ** 2, (derived.within(v, old - clip, old + clip) - target) ** 2
            tokens[row].append((clipped / 2, 0.0) if clipped > plain else (plain / 2, v - target))
            clipped_tokens += clipped > plain
    wanted, gradient, size = batch.derived(tokens, mode)
    verdict.compare("loss, derived", ours.loss, wanted, atol=1e-14 * max(1, size))
    verdict.compare("gradient, derived", ours.gradient, gradient)
    verdict.compare(
        "clipped share, derived", ours.metrics["critic/clip_fraction"], clipped_tokens / max(len(values), 1)
    )
    if not batch.mask.any():
        verdict.differences.add(4)
        verdict.require("loss is 0 / 0 there", _nothing(case.outputs["loss"]))
        return verdict
    norm = 1 / batch.counts[Part.ALL].sequences if mode == "seq-mean-token-sum-norm" else 1.0
    verdict.compare("loss", ours.loss * norm, case.outputs["loss"], atol=1e-14 * max(1, size))
    verdict.compare("gradient", ours.gradient * norm, case.outputs["grad_vpreds"])
    verdict.compare("clipped share", ours.metrics["critic/clip_fraction"], case.outputs["clipfrac"], rtol=1e-7)
    return verdict
