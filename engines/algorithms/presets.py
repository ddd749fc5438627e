"""Algorithms by name. Torch-free. Owns: which composition a name means, and how a user's config changes it.

Names are those of Trinity-RFT. Differences: the declared group size is really applied, and a partial `*_args` changes
only what it names.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

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

Params = TypeVar("Params")


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset of this name with the config's changes.

    Raises ConfigError for an unknown name or a bad parameter, saying which and what is allowed.
    """
    preset = PRESETS.get(config.algorithm_type)
    if preset is None:
        raise ConfigError(_unknown("algorithm.algorithm_type", config.algorithm_type, PRESETS))
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


def _unknown(field: str, name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{field} = {name!r} is not known{hint} Known: {', '.join(sorted(known))}"
