"""What an algorithm or a part of one is, in words and numbers, for people who choose one. Torch-free.

Owns: that every fact comes from where it is kept: formula, source and differences from the params classes
(`engines.algorithms.spec`), meanings from their field docstrings, one line on each preset from
`engines.algorithms.presets`. Does not own: looks (`flows.algorithms_page`).
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from engines import plugins
from engines.algorithms.presets import (
    ABOUT,
    ENTRY_POINT_GROUP,
    KINDS,
    OPTIONAL_PART_KEYS,
    OWN_KEYS,
    PART_GROUPS,
    PART_KEYS,
    PRESETS,
    About,
    part_named,
    preset_named,
)
from engines.algorithms.spec import Algorithm, Need, Needs, NoEntropy, NoKl, Params, name_of, names_of
from engines.config import CriticConfig, Frozen
from engines.errors import ConfigError

SOURCE = re.compile(r"((?:[A-Z][\w-]* )+(?:et al\. )?\d{4})(?: \([^)]*\))?, (arXiv:\d{4}\.\d{4,5})")
"""Author et al. 2025 (NAME), arXiv:2501.00001."""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class NeedPage(Frozen):
    """Something that an algorithm asks for."""

    name: Need
    label: str
    """In a table. Empty: the engine computes it from the rest, nobody has to see to it."""
    meaning: str
    """What it is, what the user provides, and who writes it."""


class ParameterPage(Frozen):
    """A number, name or switch that a config can set."""

    name: str
    key: str
    """Where it is set, as `--set` takes it. An item of a list goes by its name."""
    default: Any
    """In a preset: the preset's. None for what must be given, too."""
    required: bool
    """There is no default: it must be given."""
    allowed: str
    """Bounds, or the names to choose from. Empty: anything of the default's type."""
    meaning: str


class PartPage(Frozen):
    """A params class with its function."""

    name: str
    """As `trinity-flows algorithms` takes it: policy_loss_fn.ppo, or module:Class."""
    chosen_by: str
    """The line of a config that chooses it."""
    function: str
    """module:name."""
    text: tuple[str, ...]
    """Paragraphs: formula and source first."""
    sources: tuple[str, ...]
    """Author et al. 2025, arXiv:2501.00001."""
    parameters: tuple[ParameterPage, ...]
    needs: tuple[NeedPage, ...]
    differs: tuple[str, ...]
    """From Trinity-RFT 0.6.0."""


class AlgorithmPage(Frozen):
    """A preset, or an algorithm of the user's."""

    name: str
    meaning: str
    source: str
    advantage: str
    """Its name; - if there is none."""
    policy_loss: str
    group_size: int
    aggregation: str
    kl: str
    """Estimator and coefficient; where, if not in the loss; - if there is none."""
    entropy: str
    """Name and coefficient; - if there is none."""
    needs: tuple[NeedPage, ...]
    parameters: tuple[ParameterPage, ...]
    """Those that belong to no part."""
    parts: tuple[PartPage, ...]
    differs: tuple[str, ...]
    """From Trinity-RFT 0.6.0, apart from those of the parts."""

    @property
    def needs_in_short(self) -> str:
        """What somebody has to see to."""
        return ", ".join(need.label for need in self.needs if need.label) or "-"


class Listing(Frozen):
    """All that can be chosen by name."""

    algorithms: tuple[AlgorithmPage, ...]
    parts: dict[str, tuple[str, ...]]
    """Key of the config -> names."""
    broken: dict[str, str]
    """Installed algorithm that cannot be used -> why."""


NEEDS: dict[Need, tuple[str, str]] = {
    "rewards": (
        "rewards",
        "A finite reward for every sampled row. The explorer writes what reward_fn of the task set returns; other "
        "writers give reward, or token_level_reward.",
    ),
    "rollout_logprobs": (
        "logprobs",
        "The sampler's logprob of every token that trains, at the sampling temperature. The explorer writes it; other "
        "writers give logprobs, or the config says algorithm.bypass_old_logprobs: false (not with rollout_correction).",
    ),
    "old_logprobs": (
        "",
        "Logprobs of the policy before the step: the sampler's, or with algorithm.bypass_old_logprobs: false those "
        "that the engine computes. Nothing to provide.",
    ),
    "reference": (
        "reference",
        "A frozen copy of the model that the training began with. The engine keeps it: nothing to provide but memory "
        "for one more model.",
    ),
    "entropy": ("", "Entropies of the policy. The engine computes them: nothing to provide."),
    "distribution": (
        "",
        "Entropies and expected scores of the policy before the step. The engine computes them in one more forward "
        "pass: nothing to provide.",
    ),
    "values": (
        "critic",
        "A critic. The engine trains it beside the policy, from model.critic_model_path or from the model itself, with "
        "the optimizer in algorithm.critic; trainer.critic_warmup gives it a lead. Memory for one more trained model.",
    ),
    "teacher_logprobs": (
        "teacher",
        "A teacher's logprobs of the same tokens. Set model.teacher_model_path to a model with the same tokens and the "
        "engine computes them, or rows come with teacher_logprobs.",
    ),
    "greedy_baseline": (
        "greedy baseline",
        "The reward of the greedy answer to the same task, as info.reward_baseline of every row. The explorer of "
        "mode: both writes it; other writers must.",
    ),
    "pairs": (
        "pairs",
        "Pairs in place of single responses: every row has a prompt as tokens, and chosen and rejected as tokens. "
        "Whoever fills the buffer writes them.",
    ),
    "expert_rows": (
        "expert rows",
        "Rows of an expert beside the sampled ones, with info.is_expert: true; they need no reward and no logprobs. "
        "The explorer makes them of the answers of buffer.explorer_input.expert_taskset; in mode train, whoever fills "
        "buffer.trainer_input.expert_buffer. Their share of a batch is buffer.trainer_input.expert_data_ratio.",
    ),
}
"""What is asked for -> in a table, and in words."""


def listing() -> Listing:
    """Every algorithm, those of other distributions too, and the names of all parts."""
    pages, broken = [describe_algorithm(name, preset) for name, preset in PRESETS.items()], dict[str, str]()
    for name in sorted(plugins.installed(ENTRY_POINT_GROUP).keys() - PRESETS.keys()):
        try:
            pages.append(describe_algorithm(name, preset_named(name)))
        except ConfigError as error:
            broken[name] = str(error)
    return Listing(algorithms=tuple(pages), parts=_parts(), broken=broken)


def describe(name: str) -> AlgorithmPage | PartPage:
    """The algorithm or the part of this name; module:ATTRIBUTE is an `Algorithm` or a params class.

    Raises ConfigError for an unknown name, saying what was meant.
    """
    if ":" in name:
        return _described_object(name)
    algorithms = PRESETS.keys() | plugins.installed(ENTRY_POINT_GROUP).keys()
    if name in algorithms:
        return describe_algorithm(name, preset_named(name))
    key, _, part = name.partition(".")
    if part in _installed_parts(key):
        return _described_object(_installed_parts(key)[part])
    if part and key in KINDS:
        return describe_part(key, part_named(key, part, {}))
    full_names = [f"{key}.{part}" for key, parts in _parts().items() for part in parts]
    found = [full_name for full_name in full_names if full_name.endswith(f".{name}")]
    if len(found) == 1:
        return describe(found[0])
    if found:
        raise ConfigError(f"{name!r} is the name of several parts; say which: {', '.join(found)}")
    known = {*algorithms, *full_names, *(full_name.partition(".")[2] for full_name in full_names)}
    meant = known if difflib.get_close_matches(name, known) else algorithms
    raise ConfigError(f"algorithm {name!r} is not known; {plugins.hint(name, meant)}")


def describe_algorithm(name: str, algorithm: Algorithm) -> AlgorithmPage:
    """The page of this algorithm."""
    keyed = [(key, getattr(algorithm, field)) for field, key in (PART_KEYS | OPTIONAL_PART_KEYS).items()]
    keyed += [("filters", params) for params in algorithm.filters]
    parts = tuple(
        describe_part(key, params) for key, params in keyed if params and not isinstance(params, NoKl | NoEntropy)
    )
    about = ABOUT.get(name) or _about(algorithm, parts)
    own = [
        _parameter(f"algorithm.{key}", field, Algorithm.model_fields[field], algorithm)
        for field, key in OWN_KEYS.items()
    ]
    if "values" in algorithm.needs:
        field, info = "cliprange_value", CriticConfig.model_fields["cliprange_value"]
        own.append(_parameter(f"algorithm.critic.{field}", field, info, CriticConfig()))
    return AlgorithmPage(
        name=name,
        meaning=about.meaning,
        source=about.source,
        advantage=name_of(algorithm.advantage) if algorithm.advantage else "-",
        policy_loss=algorithm.loss_name,
        group_size=algorithm.group_size,
        aggregation=algorithm.aggregation,
        kl=_kl(algorithm),
        entropy=_entropy(algorithm),
        needs=_needs(algorithm.needs),
        parameters=tuple(own),
        parts=parts,
        differs=(*about.differs, *algorithm.differs),
    )


def describe_part(key: str, params: Params | type[Params]) -> PartPage:
    """The page of a part that `algorithm.<key>` chooses; defaults are the values of `params`, if it is no class."""
    params_class = params if isinstance(params, type) else type(params)
    made = _made(params) if isinstance(params, type) else params
    name = name_of(made) if made and params_class in KINDS[key][1].values() else _path(params_class)
    chosen_by, prefix = _places(key, name)
    paragraphs = tuple(" ".join(part.split()) for part in inspect.cleandoc(params_class.__doc__ or "").split("\n\n"))
    fields = {field: info for field, info in params_class.model_fields.items() if field != "name" and not info.exclude}
    return PartPage(
        name=name if ":" in name else f"{key}.{name}",
        chosen_by=chosen_by,
        function=getattr(params_class, "function", ""),
        text=paragraphs,
        sources=sources([*paragraphs, *(info.description or "" for info in fields.values())]),
        parameters=tuple(_parameter(f"{prefix}.{field}", field, info, made) for field, info in fields.items()),
        needs=_needs(made.needs if made else params_class.requires),
        differs=params_class.differs,
    )


def sources(texts: Iterable[str]) -> tuple[str, ...]:
    """Every paper that is cited, once, in order."""
    found = (match for text in texts for match in SOURCE.finditer(" ".join(text.split())))
    return tuple(dict.fromkeys(f"{match[1]}, {match[2]}" for match in found))


def _described_object(name: str) -> AlgorithmPage | PartPage:
    found = plugins.load("algorithm", name)
    if isinstance(found, Algorithm):
        return describe_algorithm(name, found)
    if isinstance(found, type) and issubclass(found, Params):
        for key, (base, _) in KINDS.items():
            if issubclass(found, base):
                return describe_part(key, found)
    raise ConfigError(f"{name!r} is neither an Algorithm nor a params class of one of its parts")


def _parts() -> dict[str, tuple[str, ...]]:
    """Key of the config -> names of what can be chosen, but for none."""
    return {
        key: (
            *(name for name, params in known.items() if name != "none" and name in names_of(params)),
            *sorted(_installed_parts(key)),
        )
        for key, (_, known) in KINDS.items()
    }


def _installed_parts(key: str) -> dict[str, str]:
    """Name -> module:Class of what other distributions provide for this key, under a name that is not built in."""
    targets = plugins.installed(PART_GROUPS[key]) if key in PART_GROUPS else {}
    return {name: target for name, target in targets.items() if name not in KINDS[key][1]}


def _path(params_class: type[Params]) -> str:
    return f"{params_class.__module__}:{params_class.__qualname__}"


def _places(key: str, name: str) -> tuple[str, str]:
    """The line of a config that chooses a part, and the key below which its parameters are."""
    choice = f"{{name: {name}, args: {{...}}}}"
    if key in PART_KEYS.values():
        return f"algorithm.{key}: {name}", f"algorithm.{key}_args"
    if key in OPTIONAL_PART_KEYS.values():
        return f"algorithm.{key}: {choice}", f"algorithm.{key}.args"
    return f"algorithm.{key}: [{choice}]", f"algorithm.{key}.{name}.args"


def _made(params_class: type[Params]) -> Params | None:
    """With defaults; None if it has parameters without one."""
    try:
        return params_class()
    except ValidationError:
        return None


def _about(algorithm: Algorithm, parts: Iterable[PartPage]) -> About:
    """From the parts alone: of another's algorithm nothing else is known."""
    names = [name_of(part) for part in (algorithm.advantage, algorithm.loss) if part]
    cited = dict.fromkeys(source for page in parts for source in page.sources)
    return About(" + ".join(names), "; ".join(cited) or "-")


def _kl(algorithm: Algorithm) -> str:
    terms = ((algorithm.kl, ""), (algorithm.kl_penalty, " in the reward"))
    shown = [f"{name_of(kl)} {kl.kl_coef:g}{where}" for kl, where in terms if not isinstance(kl, NoKl)]
    return ", ".join(shown) or "-"


def _entropy(algorithm: Algorithm) -> str:
    if isinstance(algorithm.entropy, NoEntropy):
        return "-"
    return f"{name_of(algorithm.entropy)} {algorithm.entropy.entropy_coef:g}"


def _needs(needs: Needs) -> tuple[NeedPage, ...]:
    return tuple(
        NeedPage(name=name, label=label, meaning=meaning) for name, (label, meaning) in NEEDS.items() if name in needs
    )


def _parameter(key: str, name: str, info: FieldInfo, owner: Frozen | None) -> ParameterPage:
    """owner: has the value; None: the class's default is shown."""
    of_class = None if info.is_required() else info.get_default(call_default_factory=True)
    return ParameterPage(
        name=name,
        key=key,
        default=of_class if owner is None else getattr(owner, name),
        required=info.is_required(),
        allowed=_allowed(info),
        meaning=" ".join((info.description or "").split()),
    )


def _allowed(info: FieldInfo) -> str:
    limits = ((sign, getattr(item, name, None)) for item in info.metadata for name, sign in BOUNDS.items())
    bounds = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
    return ", ".join(bounds or _choices(info.annotation))


def _choices(annotation: Any) -> tuple[str, ...]:
    """Names of a Literal, alone or in a union."""
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))
