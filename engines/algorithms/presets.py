"""Algorithms by name. Torch-free. Owns: which composition a name means, what it is and whose in one line, and how a
user's config changes it.

Names are those of Trinity-RFT. Differences: the declared group size is really applied, and a partial `*_args` changes
only what it names. Others' algorithms are entry points of the group `trinity_flows.algorithms`, or are named in full as
module:ALGORITHM; each is an `Algorithm`. Others' losses, advantages and filters are entry points too, or module:Class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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
    names_of,
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


class About(NamedTuple):
    """What `trinity-flows algorithms` says of a preset that its parts do not say."""

    meaning: str
    """At most 39 characters: it shares a line with name and source."""
    source: str
    """Author et al. 2025, arXiv:2501.00001."""
    differs: tuple[str, ...] = ()
    """As `Params.differs`, of the composition."""


NO_PRESET = ("Trinity-RFT has no preset of this name.",)
ABOUT: dict[str, About] = {
    "sft": About("imitates the responses of the data", "Ouyang et al. 2022, arXiv:2203.02155"),
    "cpt": About("continues pretraining on plain text", "Gururangan et al. 2020, arXiv:2004.10964"),
    "ppo": About("clipped ratio, advantages from a critic", "Schulman et al. 2017, arXiv:1707.06347"),
    "grpo": About("clipped ratio, compares within groups", "Shao et al. 2024, arXiv:2402.03300"),
    "dapo": About(
        "grpo, clips higher, dynamic sampling",
        "Yu et al. 2025, arXiv:2503.14476",
        ("The preset has the paper's upper clip range 0.28 and its dynamic sampling; Trinity-RFT's has neither.",),
    ),
    "dr_grpo": About("grpo without bias by length and std", "Liu et al. 2025, arXiv:2503.20783", NO_PRESET),
    "reinforceplusplus": About("clipped ratio, whitened returns", "Hu 2025, arXiv:2501.03262"),
    "rloo": About("clipped ratio, less the others' mean", "Ahmadian et al. 2024, arXiv:2402.14740"),
    "remax": About(
        "clipped ratio, less the greedy reward",
        "Li et al. 2023, arXiv:2310.10505",
        ("Trinity-RFT has the advantage, but no preset of this name.",),
    ),
    "opmd": About("mirror descent without a ratio", "Kimi 2025, arXiv:2501.12599"),
    "asymre": About("off-policy REINFORCE, baseline set low", "Arnal et al. 2025, arXiv:2506.20520"),
    "dpo": About("learns from preferred and refused pairs", "Rafailov et al. 2023, arXiv:2305.18290"),
    "topr": About("REINFORCE that tapers failures", "Le Roux et al. 2025, arXiv:2503.14286"),
    "cispo": About("weights are clipped, gradients are not", "MiniMax 2025, arXiv:2506.13585"),
    "gspo": About("clips the ratio of the whole sequence", "Zheng et al. 2025, arXiv:2507.18071"),
    "sapo": About("a soft gate in place of the clip", "Gao et al. 2025, arXiv:2511.20347"),
    "mix": About("grpo beside imitation of an expert", "Zhang et al. 2025, arXiv:2508.11408"),
    "mix_chord": About("mix on a schedule, tokens weighted", "Zhang et al. 2025, arXiv:2508.11408"),
    "raft": About(
        "imitates the best sample of each group",
        "Dong et al. 2023, arXiv:2304.06767",
        ("The best of each group are chosen here; Trinity-RFT's preset trains on whatever rows it is given.",),
    ),
    "sppo": About("log ratio within bounds", "Vaswani et al. 2021, arXiv:2108.05828"),
    "rec": About("REINFORCE, clipped and regularised", "Yao et al. 2025, arXiv:2509.24203"),
    "multi_step_grpo": About("grpo over runs of several steps", "Pan et al. 2025, arXiv:2505.17826"),
    "gigpo": About("grpo over runs and over equal states", "Feng et al. 2025, arXiv:2505.10978"),
    "on_policy_distill": About("towards a teacher, on own samples", "Agarwal et al. 2023, arXiv:2306.13649"),
    "jsd": About("towards a teacher, by Jensen-Shannon", "Agarwal et al. 2023, arXiv:2306.13649"),
    "importance_sampling": About(
        "unclipped ratio, grpo's advantages", "Degris et al. 2012, arXiv:1205.4839", NO_PRESET
    ),
}

ENTRY_POINT_GROUP = "trinity_flows.algorithms"

OWN_KEYS = {
    "group_size": "repeat_times",
    "aggregation": "loss_agg_mode",
    "bypass_old_logprobs": "bypass_old_logprobs",
    "mask_truncated": "mask_truncated",
}
"""Field of `Algorithm` that is no part -> key of the config."""
PART_KEYS = {
    "advantage": "advantage_fn",
    "loss": "policy_loss_fn",
    "kl": "kl_loss_fn",
    "kl_penalty": "kl_penalty_fn",
    "entropy": "entropy_loss_fn",
}
"""Part of `Algorithm` that is chosen by `<key>` and changed by `<key>_args`."""
OPTIONAL_PART_KEYS = {"correction": "rollout_correction", "shaping": "overlong_shaping"}
"""Part of `Algorithm` that is given as {name: ..., args: ...}, as each of `filters` is."""


def by_name(classes: Iterable[type[Params]]) -> dict[str, type[Params]]:
    """Every name that these classes go by."""
    return {name: each for each in classes for name in names_of(each)}


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
    preset = preset_named(config.algorithm_type)
    values: dict[str, Any] = {
        field: getattr(preset, field) if (value := getattr(config, key)) is None else value
        for field, key in OWN_KEYS.items()
    }
    values |= {field: _part(key, getattr(preset, field), config) for field, key in PART_KEYS.items()}
    values |= {
        field: _optional(key, getattr(preset, field), getattr(config, key)) for field, key in OPTIONAL_PART_KEYS.items()
    }
    values["filters"] = preset.filters
    if config.filters is not None:
        values["filters"] = tuple(part_named("filters", part.name, part.args) for part in config.filters)
    try:
        return Algorithm(**values)
    except ValidationError as error:
        raise ConfigError(f"algorithm {config.algorithm_type}: {_first(error)}") from None


def _part(field: str, preset: Params | None, config: AlgorithmConfig) -> Params | None:
    """The preset's params, or those of another name, with `<field>_args` laid over them."""
    name: str | None = getattr(config, field)
    args: Mapping[str, Any] = getattr(config, f"{field}_args")
    if preset is not None and name in (None, name_of(preset)):
        return _checked(field, type(preset), preset.model_dump() | dict(args)) if args else preset
    if name is not None:
        return part_named(field, name, args)
    if args:
        raise ConfigError(f"algorithm.{field}_args is given, but {config.algorithm_type} has no {field}; name one")
    return None


def _optional(field: str, preset: Params | None, part: PartConfig | None) -> Params | None:
    if part is None:
        return preset
    return None if part.name == "none" else part_named(field, part.name, part.args)


def part_named(field: str, name: str, args: Mapping[str, Any]) -> Params:
    """Params of this name for a key of `KINDS`: built in, or of another distribution by entry point or as module:Class.

    Raises ConfigError.
    """
    base, known = KINDS[field]
    if name in known:
        return _checked(field, known[name], {"name": name} | dict(args))
    target = plugins.target(f"algorithm.{field}", name, PART_GROUPS.get(field), known)
    found = plugins.load(f"algorithm.{field} = {name!r}", target)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"algorithm.{field} = {name!r} ({target}) is no subclass of {base.__name__}")
    return _checked(field, found, args)


def _checked(field: str, params: type[Params], values: Mapping[str, Any]) -> Params:
    try:
        return params.model_validate(dict(values))
    except ValidationError as error:
        named, detail = values.get("name", params.__name__), error.errors()[0]
        meant = ""
        if detail["type"] == "extra_forbidden":
            meant = f"; {plugins.hint(str(detail['loc'][0]), params.model_fields.keys() - {'name'})}"
        below = f"{field}_args." if field in PART_KEYS.values() else "args."
        said = _first(error, below)
        raise ConfigError(f"algorithm.{field} = {named!r}: {said}{meant}") from None


def _first(error: ValidationError, below: str = "") -> str:
    """The first complaint, with its place `below` a key and the value."""
    detail = error.errors()[0]
    place = ".".join(str(part) for part in detail["loc"])
    place = place and f"{below}{place}"
    shown = f", got {detail['input']!r}" if place else ""
    said = "there is no such parameter" if detail["type"] == "extra_forbidden" else detail["msg"]
    return f"{place + ': ' if place else ''}{said.removeprefix('Value error, ')}{shown}"


def preset_named(name: str) -> Algorithm:
    """Built in, installed as an entry point, or module:ALGORITHM. Raises ConfigError."""
    if name in PRESETS:
        return PRESETS[name]
    target = plugins.target("algorithm.algorithm_type", name, ENTRY_POINT_GROUP, PRESETS)
    preset = plugins.load(f"algorithm {name!r}", target)
    if not isinstance(preset, Algorithm):
        raise ConfigError(f"algorithm {name!r} ({target}) is a {type(preset).__name__}, not an Algorithm")
    return preset
