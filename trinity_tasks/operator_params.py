"""What an operator on experiences is told: its parameters, by name. Pure: nothing is imported or run.

Owns: `OperatorConfig`, the operators that are built in and their parameters, the refusal of a parameter that does not
fit. Does not own: what they do with rows (`trinity_tasks.operators`). Names and keys are those of Trinity-RFT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from engines import plugins
from engines.config import Frozen, Resume
from engines.errors import ConfigError


class OperatorConfig(Frozen):
    """An operator by name, with its parameters."""

    name: Annotated[str, Resume.FORK] = Field(min_length=1)
    """Built in, or a function of yours as module:function."""
    args: Annotated[dict[str, Any], Resume.FORK] = Field(default_factory=dict)
    """Changes only the parameters that it names; of your function, its arguments after the rows."""


class OperatorParams(Frozen):
    """Base of the parameters of the operators that are built in.

    Those that judge a row by its reward drop a row that has none, with the reason "unscored": None is never taken for
    0. They also drop a row whose reward is not a finite number. The reward of a row is the sum of its
    `token_level_reward` if it has one, as it is for the trainer.
    """


class RewardFilter(OperatorParams):
    """Drops rows with a reward below the threshold."""

    threshold: float = 0.0
    """Smallest reward that is kept."""


class InvalidRewardFilter(OperatorParams):
    """Drops rows whose reward is None, NaN or infinite."""


class RewardStdFilter(OperatorParams):
    """Drops groups of less than two scored rows, or whose rewards have a population std not above the threshold."""

    threshold: float = Field(default=0.0, ge=0)
    """Groups whose std is not above this are dropped."""


class DynamicSampling(OperatorParams):
    """Drops groups of less than two scored rows, or that are all right or all wrong.

    Right: `metrics[metric_key]`, or the reward where that is missing, is above correct_threshold. A row without either
    is unscored. Yu et al. 2025 (DAPO), arXiv:2503.14476, 3.2.
    """

    metric_key: str = "accuracy"
    """Name in `metrics` of each row."""
    correct_threshold: float = 0.0
    """A row is right above this."""


class MaskResponseTruncated(OperatorParams):
    """Responses that were cut at the limit do not train: their action masks become False. The rows stay."""


class ShapingConfig(Frozen):
    """One change of the reward: reward <op> weight * info[stats_key]."""

    stats_key: str = Field(min_length=1)
    """Name in `info` of each row. Rows without it keep their reward."""
    op_type: Literal["ADD", "SUB", "MUL", "DIV"] = "ADD"
    """What is done to the reward. Nothing is divided by 0: such a row keeps its reward."""
    weight: float = 1.0
    """Factor of the value."""


class RewardShapingMapper(OperatorParams):
    """Changes the rewards of scored rows by what stands in `info`. Unscored rows stay unscored."""

    reward_shaping_configs: tuple[ShapingConfig, ...] = Field(min_length=1)
    """Changes, one after another."""


class PassRateCalculator(OperatorParams):
    """Measures the mean reward of each task, by `info["task_index"]`, for the selector. Unscored rows do not count."""


class Deduplicate(OperatorParams):
    """Drops rows with the same prompt and response tokens as an earlier row, which stays."""

    within: Literal["group", "batch"] = "batch"
    """Where earlier rows are looked for: in the row's own group, or in all rows."""


BUILT_IN: Final[dict[str, type[OperatorParams]]] = {
    "reward_filter": RewardFilter,
    "invalid_reward_filter": InvalidRewardFilter,
    "reward_std_filter": RewardStdFilter,
    "dapo_dynamic_sampling": DynamicSampling,
    "mask_response_truncated": MaskResponseTruncated,
    "reward_shaping_mapper": RewardShapingMapper,
    "pass_rate_calculator": PassRateCalculator,
    "deduplicate": Deduplicate,
}
"""Name -> parameters."""


def params_named(place: str, name: str, args: Mapping[str, Any]) -> OperatorParams:
    """The parameters of the built-in operator of this name.

    place: where it stands in the config. Raises ConfigError that names operator, parameter and what is allowed.
    """
    params_class = BUILT_IN[name]
    try:
        return params_class.model_validate(dict(args))
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(str(part) for part in detail["loc"])
        said = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            known = params_class.model_fields if len(detail["loc"]) == 1 else ShapingConfig.model_fields
            said = no_such_parameter(str(detail["loc"][-1]), known)
        elif detail["type"] != "missing":
            said += f", got {detail['input']!r}"
        raise ConfigError(f"{place}: operator {name}, args.{field}: {said}") from None


def no_such_parameter(name: str, known: Iterable[str]) -> str:
    """What is said of an argument that an operator does not take."""
    names = list(known)
    return f"there is no such parameter; {plugins.hint(name, names) if names else 'it takes none'}"
