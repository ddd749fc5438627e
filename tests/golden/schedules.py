"""Evaluates chord_mu_schedule, lr_schedules and algorithm_*: what changes with the step, and the presets."""

from __future__ import annotations

from typing import Any

from engines.algorithms.mixing import chord_mu
from engines.algorithms.presets import PRESETS, resolve
from engines.algorithms.spec import Gspo, MixChord, Params, PpoClip, name_of
from engines.config import AlgorithmConfig
from engines.errors import ConfigError
from engines.hf.optim import lr_factor
from tests.golden import derived_losses as derived
from tests.golden.checks import Verdict
from tests.golden.format import Case, Unreadable

MU = ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
NOT_CARRIED_OVER = "grpo_verl"
"""A second name of grpo that crashes there, as an advantage for lists is given a padded batch."""


def chord_mu_schedule(case: Case) -> Verdict:
    """The share of the expert by step."""
    verdict, args = Verdict(), {key: case.inputs[key] for key in MU}
    ours = [chord_mu(step, MixChord(**args)) for step in case.inputs["steps"]]
    wanted = [derived.chord_mu(step, *(args[key] for key in MU)) for step in case.inputs["steps"]]
    verdict.compare("mu, derived", ours, wanted)
    verdict.compare("mu", ours, case.outputs)
    return verdict


def lr_schedules(case: Case) -> Verdict:
    """Factors of the learning rate, by name: system_kind/W=warm-up,N=total,min=floor.

    Ours are those of verl. The other engine's warm-up begins at the floor and not at 0, and past the end it stays.
    """
    verdict = Verdict()
    system, kind, settings = _schedule(case.name)
    warmup, total, floor = int(settings.get("W", 0)), settings.get("N"), settings.get("min", 0.0)
    ours = [lr_factor(kind, t, warmup, None if total is None else int(total), floor) for t in range(len(case.outputs))]
    if system == "tinker":
        for t in range(len(ours)):
            if t < warmup:
                ours[t] = floor + (1 - floor) * ours[t]
            elif kind == "cosine" and total is not None and t > total:
                ours[t] = floor
    verdict.compare("factors", ours, case.outputs, atol=1e-15)
    return verdict


def _schedule(name: str) -> tuple[str, str, dict[str, float]]:
    try:
        kind, settings = name.split("/")
        numbers = {key: float(value) for key, value in (part.split("=") for part in settings.split(","))}
        system, kind = kind.split("_")
    except ValueError as error:
        raise Unreadable(f"{name!r} is not system_kind/W=..,N=..,min=..") from error
    if system not in ("verl", "tinker") or kind not in ("constant", "cosine") or numbers.keys() - {"W", "N", "min"}:
        raise Unreadable(f"{name!r} is a schedule that we do not know")
    return system, kind, numbers


def algorithm_defaults(case: Case) -> Verdict:
    """Our preset against what an algorithm declares there, and what becomes of it.

    Difference 8: declared group sizes are not applied there, and GSPO's aggregation is overwritten. What an algorithm
    does not declare is filled in there from defaults that it does not use; that is not compared.
    """
    verdict, there = Verdict(), case.outputs
    if case.name == NOT_CARRIED_OVER:
        _refused(verdict)
        return verdict
    if case.name not in PRESETS:
        raise Unreadable(f"there is no preset {case.name!r}")
    ours, declared = PRESETS[case.name], there["declared_default_config"]
    if (group := declared.get("repeat_times")) is not None:
        verdict.compare("group size, declared", ours.group_size, group)
        if group != 1:
            verdict.differences.add(8)
        verdict.compare("group size there", 1, there["repeat_times"])
    by_row = isinstance(ours.loss, Gspo)
    if by_row:
        verdict.differences.add(8)
    verdict.require("aggregation", ours.aggregation == ("seq-mean-token-mean" if by_row else there["loss_agg_mode"]))
    verdict.require("aggregation there", there["loss_agg_mode"] == "token-mean", there["loss_agg_mode"])
    parts: dict[str, Params | None] = {
        "advantage_fn": ours.advantage,
        "policy_loss_fn": ours.loss,
        "kl_loss_fn": ours.kl,
        "kl_penalty_fn": ours.kl_penalty,
        "entropy_loss_fn": ours.entropy,
    }
    for key, params in parts.items():
        if key == "advantage_fn" and key not in declared:
            verdict.require("no advantage", params is None)
            continue
        verdict.require(f"{key} is {there[key]}", params is not None and name_of(params) == there[key])
        if params is not None and there[key] != "none":
            _compare_args(verdict, key, params, there[f"{key}_args"])
    for need, flag in (("values", "use_critic"), ("reference", "use_reference")):
        verdict.require(flag, (need in ours.needs) == there["flags"][flag])
    return verdict


def _compare_args(verdict: Verdict, key: str, params: Params, args: dict[str, Any]) -> None:
    """Every parameter that is named there."""
    values: dict[str, Any] = params.model_dump()
    if isinstance(params, PpoClip):
        values |= {"clip_range_low": params.low, "clip_range_high": params.high}
    for name, value in args.items():
        if name == "loss_agg_mode":
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            verdict.compare(f"{key}.{name}", values.get(name, float("nan")), value)
        else:
            verdict.require(f"{key}.{name} is {value}", name in values and values[name] == value)


def algorithm_grpo_verl_quirk(case: Case) -> Verdict:
    """The same second name, run there: it crashes. Here it is refused before the start."""
    verdict = Verdict()
    verdict.require("crashes there", case.error is not None)
    _refused(verdict)
    return verdict


def _refused(verdict: Verdict) -> None:
    """Difference 7."""
    verdict.differences.add(7)
    try:
        resolve(AlgorithmConfig(algorithm_type=NOT_CARRIED_OVER))
        refused = False
    except ConfigError:
        refused = True
    verdict.require("refused with a ConfigError", refused)
