"""Algorithms by name. Torch-free. Owns: which composition a name means, and how a user's config changes it.

Names are those of Trinity-RFT. Differences: the declared group size is really applied, and a partial `*_args` changes
only what it names. Others' algorithms are entry points of the group `trinity_flows.algorithms`, or are named in full as
module:ALGORITHM; each is an `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from engines import plugins
from engines.algorithms.spec import (
    AdvantageParams,
    Algorithm,
    EntropyBonus,
    EntropyParams,
    Grpo,
    KlInLoss,
    KlParams,
    LossParams,
    PpoClip,
    Sft,
)
from engines.config import AlgorithmConfig
from engines.errors import ConfigError

PRESETS: dict[str, Algorithm] = {
    "sft": Algorithm(loss=Sft()),
    # Shao et al. 2024, arXiv:2402.03300; KL estimator k2 in the loss instead of the paper's k3.
    "grpo": Algorithm(advantage=Grpo(), loss=PpoClip(), kl=KlInLoss(), entropy=EntropyBonus(), group_size=2),
}

ENTRY_POINT_GROUP = "trinity_flows.algorithms"

Params = TypeVar("Params")


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset of this name with the config's changes.

    Raises ConfigError for an unknown name or a bad parameter, saying which and what is allowed.
    """
    preset = PRESETS.get(config.algorithm_type) or _plugged_in(config.algorithm_type)
    parts: dict[str, Any] = {
        "advantage": _part("advantage_fn", AdvantageParams, preset.advantage, config),
        "loss": _part("policy_loss_fn", LossParams, preset.loss, config),
        "kl": _part("kl_loss_fn", KlParams, preset.kl, config),
        "entropy": _part("entropy_loss_fn", EntropyParams, preset.entropy, config),
        "aggregation": config.loss_agg_mode or preset.aggregation,
        "group_size": config.repeat_times or preset.group_size,
        "bypass_old_logprobs": config.bypass_old_logprobs,
    }
    try:
        return Algorithm(**parts)
    except ValidationError as error:
        raise ConfigError(f"algorithm {config.algorithm_type}: {_first(error)}") from None


def _part(field: str, allowed: Any, preset: BaseModel | None, config: AlgorithmConfig) -> Any:
    """The preset's params, or those of another name, with `<field>_args` laid over them."""
    name: str | None = getattr(config, field)
    args: Mapping[str, Any] = getattr(config, f"{field}_args")
    if preset is not None and name in (None, preset.model_dump()["name"]):
        values = preset.model_dump() | dict(args)
    elif name is not None:
        values = {"name": name} | dict(args)
    elif args:
        raise ConfigError(f"algorithm.{field}_args is given, but {config.algorithm_type} has no {field}; name one")
    else:
        return None
    try:
        return TypeAdapter(allowed).validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"algorithm.{field} = {values['name']!r}: {_first(error)}") from None


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
