"""Algorithms by name. Torch-free. Owns: which composition a name means, and how a user's config changes it.

Names are those of Trinity-RFT. Differences: the declared group size is really applied, and a partial `*_args` changes
only what it names. Others' algorithms are entry points of the group `trinity_flows.algorithms`, or are named in full as
module:ALGORITHM; each is an `Algorithm`. Others' losses, advantages and filters are entry points too, or module:Class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from engines import plugins
from engines.algorithms.spec import (
    ADVANTAGES,
    FILTERS,
    LOSSES,
    AdvantageParams,
    Algorithm,
    Asymre,
    BestOfGroup,
    Cispo,
    Dpo,
    DynamicSampling,
    EntropyBonus,
    EntropyBonusOfSamples,
    EntropyParams,
    FilterParams,
    Gae,
    Gigpo,
    Grpo,
    Gspo,
    ImportanceSampling,
    Jsd,
    KlInLoss,
    KlInReward,
    KlParams,
    LossParams,
    Mix,
    MixChord,
    NoEntropy,
    NoKl,
    OnPolicyDistill,
    Opmd,
    OpmdLoss,
    OverlongShaping,
    Params,
    PpoClip,
    Rec,
    RecLoss,
    Reinforce,
    ReinforcePlusPlus,
    Remax,
    Rloo,
    RolloutCorrection,
    Sapo,
    Sft,
    Sppo,
    StepWiseGrpo,
    Topr,
    name_of,
)
from engines.config import AlgorithmConfig, PartConfig
from engines.errors import ConfigError

REFERENCE: dict[str, Any] = {"kl": KlInLoss(), "entropy": EntropyBonus()}
"""What most of Trinity-RFT's algorithms have beside the policy loss: KL estimator k2, and an entropy bonus of 0."""

PRESETS: dict[str, Algorithm] = {
    "sft": Algorithm(loss=Sft()),
    "cpt": Algorithm(loss=Sft()),
    "ppo": Algorithm(advantage=Gae(), loss=PpoClip(), **REFERENCE),
    # The paper's KL estimator is k3.
    "grpo": Algorithm(advantage=Grpo(), loss=PpoClip(), group_size=2, **REFERENCE),
    "dapo": Algorithm(
        advantage=Grpo(),
        loss=PpoClip(clip_range_low=0.2, clip_range_high=0.28),
        entropy=EntropyBonus(),
        filters=(DynamicSampling(),),
        group_size=16,
    ),
    "dr_grpo": Algorithm(
        advantage=Grpo(normalize=False), loss=PpoClip(), aggregation="seq-mean-token-sum-norm", group_size=8
    ),
    "reinforceplusplus": Algorithm(advantage=ReinforcePlusPlus(), loss=PpoClip(), group_size=2, **REFERENCE),
    "rloo": Algorithm(advantage=Rloo(), loss=PpoClip(), group_size=2, **REFERENCE),
    "remax": Algorithm(advantage=Remax(), loss=PpoClip(), **REFERENCE),
    "opmd": Algorithm(advantage=Opmd(), loss=OpmdLoss(), group_size=2, **REFERENCE),
    "asymre": Algorithm(advantage=Asymre(), loss=OpmdLoss(), group_size=2),
    "dpo": Algorithm(loss=Dpo(), **REFERENCE),
    "topr": Algorithm(advantage=Reinforce(), loss=Topr(), group_size=2, **REFERENCE),
    "cispo": Algorithm(advantage=Grpo(), loss=Cispo(), group_size=2, **REFERENCE),
    "gspo": Algorithm(advantage=Grpo(), loss=Gspo(), aggregation="seq-mean-token-mean", group_size=2, **REFERENCE),
    "sapo": Algorithm(advantage=Grpo(), loss=Sapo(), group_size=2, **REFERENCE),
    "mix": Algorithm(advantage=Grpo(), loss=Mix(), kl=KlInLoss(), entropy=EntropyBonusOfSamples(), group_size=8),
    "mix_chord": Algorithm(
        advantage=Grpo(), loss=MixChord(), kl=KlInLoss(), entropy=EntropyBonusOfSamples(), group_size=8
    ),
    "raft": Algorithm(loss=Sft(), filters=(BestOfGroup(),), group_size=4),
    "sppo": Algorithm(advantage=Opmd(), loss=Sppo(), group_size=2),
    "rec": Algorithm(advantage=Rec(), loss=RecLoss(), group_size=2, **REFERENCE),
    "multi_step_grpo": Algorithm(advantage=StepWiseGrpo(), loss=PpoClip(), group_size=8, **REFERENCE),
    "gigpo": Algorithm(advantage=Gigpo(), loss=PpoClip(), group_size=8, **REFERENCE),
    "on_policy_distill": Algorithm(advantage=OnPolicyDistill(), loss=PpoClip(), group_size=8),
    "jsd": Algorithm(advantage=Jsd(), loss=PpoClip(), group_size=8),
    "importance_sampling": Algorithm(advantage=Grpo(), loss=ImportanceSampling(), group_size=2, **REFERENCE),
}

ENTRY_POINT_GROUP = "trinity_flows.algorithms"


def by_name(classes: Iterable[type[Params]]) -> dict[str, type[Params]]:
    """Every name that these classes go by."""
    return {name: each for each in classes for name in _names(each)}


def _names(params: type[Params]) -> tuple[str, ...]:
    annotation: Any = params.model_fields["name"].annotation
    return tuple(annotation.__args__)


KINDS: dict[str, tuple[type[Params], dict[str, type[Params]]]] = {
    "advantage_fn": (AdvantageParams, by_name(ADVANTAGES)),
    "policy_loss_fn": (LossParams, by_name(LOSSES)),
    "kl_loss_fn": (KlParams, by_name((NoKl, KlInLoss)) | {"k1": KlInLoss, "abs": KlInLoss}),
    "kl_penalty_fn": (KlParams, by_name((NoKl, KlInReward))),
    "entropy_loss_fn": (EntropyParams, by_name((NoEntropy, EntropyBonus, EntropyBonusOfSamples))),
    "rollout_correction": (RolloutCorrection, by_name((RolloutCorrection,))),
    "overlong_shaping": (OverlongShaping, by_name((OverlongShaping,))),
    "filters": (FilterParams, by_name(FILTERS)),
}
"""Key of the config -> what its parts are, and those that are built in."""

PART_GROUPS = {
    "advantage_fn": "trinity_flows.advantages",
    "policy_loss_fn": "trinity_flows.losses",
    "filters": "trinity_flows.filters",
}
"""Key of the config -> entry points of other distributions: each a params class."""


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset of this name with the config's changes.

    Raises ConfigError for an unknown name or a bad parameter, saying which and what is allowed.
    """
    preset = PRESETS.get(config.algorithm_type) or _plugged_in(config.algorithm_type)
    filters = preset.filters
    if config.filters is not None:
        filters = tuple(_made("filters", part.name, part.args) for part in config.filters)
    parts: dict[str, Any] = {
        "advantage": _part("advantage_fn", preset.advantage, config),
        "loss": _part("policy_loss_fn", preset.loss, config),
        "kl": _part("kl_loss_fn", preset.kl, config),
        "kl_penalty": _part("kl_penalty_fn", preset.kl_penalty, config),
        "entropy": _part("entropy_loss_fn", preset.entropy, config),
        "correction": _optional("rollout_correction", preset.correction, config.rollout_correction),
        "shaping": _optional("overlong_shaping", preset.shaping, config.overlong_shaping),
        "filters": filters,
        "mask_truncated": preset.mask_truncated if config.mask_truncated is None else config.mask_truncated,
        "aggregation": config.loss_agg_mode or preset.aggregation,
        "group_size": config.repeat_times or preset.group_size,
        "bypass_old_logprobs": preset.bypass_old_logprobs
        if config.bypass_old_logprobs is None
        else config.bypass_old_logprobs,
    }
    try:
        return Algorithm(**parts)
    except ValidationError as error:
        raise ConfigError(f"algorithm {config.algorithm_type}: {_first(error)}") from None


def _part(field: str, preset: Params | None, config: AlgorithmConfig) -> Params | None:
    """The preset's params, or those of another name, with `<field>_args` laid over them."""
    name: str | None = getattr(config, field)
    args: Mapping[str, Any] = getattr(config, f"{field}_args")
    if preset is not None and name in (None, name_of(preset)):
        return _checked(field, type(preset), preset.model_dump() | dict(args)) if args else preset
    if name is not None:
        return _made(field, name, args)
    if args:
        raise ConfigError(f"algorithm.{field}_args is given, but {config.algorithm_type} has no {field}; name one")
    return None


def _optional(field: str, preset: Params | None, part: PartConfig | None) -> Params | None:
    if part is None:
        return preset
    return None if part.name == "none" else _made(field, part.name, part.args)


def _made(field: str, name: str, args: Mapping[str, Any]) -> Params:
    """Params of this name: built in, or of another distribution by entry point or as module:Class."""
    base, known = KINDS[field]
    if name in known:
        return _checked(field, known[name], {"name": name} | dict(args))
    targets = plugins.installed(PART_GROUPS[field]) if field in PART_GROUPS else {}
    if ":" in name:
        targets[name] = name
    if name not in targets:
        raise ConfigError(f"algorithm.{field} = {name!r} is not known; {plugins.hint(name, known.keys() | targets)}")
    found = plugins.load(f"algorithm.{field} = {name!r}", targets[name])
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"algorithm.{field} = {name!r} ({targets[name]}) is no subclass of {base.__name__}")
    return _checked(field, found, args)


def _checked(field: str, params: type[Params], values: Mapping[str, Any]) -> Params:
    try:
        return params.model_validate(dict(values))
    except ValidationError as error:
        named, detail = values.get("name", params.__name__), error.errors()[0]
        meant = ""
        if detail["type"] == "extra_forbidden":
            meant = f"; {plugins.hint(str(detail['loc'][0]), params.model_fields.keys() - {'name'})}"
        raise ConfigError(f"algorithm.{field} = {named!r}: {_first(error)}{meant}") from None


def _first(error: ValidationError) -> str:
    """The first complaint, with its place and the value."""
    detail = error.errors()[0]
    place = ".".join(str(part) for part in detail["loc"])
    shown = f", got {detail['input']!r}" if place else ""
    return f"{place + ': ' if place else ''}{detail['msg']}{shown}"


def _plugged_in(name: str) -> Algorithm:
    targets = plugins.installed(ENTRY_POINT_GROUP)
    if ":" in name:
        targets[name] = name
    if name not in targets:
        known = PRESETS.keys() | targets
        raise ConfigError(f"algorithm.algorithm_type = {name!r} is not known; {plugins.hint(name, known)}")
    preset = plugins.load(f"algorithm {name!r}", targets[name])
    if not isinstance(preset, Algorithm):
        raise ConfigError(f"algorithm {name!r} ({targets[name]}) is a {type(preset).__name__}, not an Algorithm")
    return preset
