"""What every part of an algorithm is: frozen parameters, and the name of the function that they parametrise.

To add a loss or an advantage: a class with its parameters, and one function. The class names the function, so nothing
is registered; a class of another distribution is named in a config by `module:Class`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

from engines import plugins
from engines.config import Frozen
from engines.errors import ConfigError, EngineError

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

Need = Literal[
    "rewards",
    "rollout_logprobs",
    "old_logprobs",
    "reference",
    "entropy",
    "distribution",
    "values",
    "teacher_logprobs",
    "greedy_baseline",
    "pairs",
    "expert_rows",
]
"""What an algorithm asks for beyond the logprobs of the policy that is trained.

rewards: of every row that is no expert's. rollout_logprobs: the sampler's, of the tokens that train. old_logprobs: of
the policy before the step. reference: a frozen copy of the first policy. entropy: of the distributions that tokens are
drawn from. distribution: entropy and expected score of the same, before the step. values: a critic. teacher_logprobs:
of a better model, on the same tokens. greedy_baseline: the reward of the greedy answer to each task. pairs: preferred
and refused responses. expert_rows: rows whose `info.is_expert` is true, beside the others."""

Needs = frozenset[Need]
NOTHING: Needs = frozenset()


class Params(Frozen):
    """Parameters of one part of an algorithm. The docstring of a subclass is its formula and its source.

    One that is built in has a field `name`, a Literal with the name by default. Sources are written "Author et al.
    2025, arXiv:2501.00001": `engines.algorithms.describe` finds them, and shows these docstrings to the user.
    """

    function: ClassVar[str]
    """module:name of the function that takes (inputs, these parameters)."""
    requires: ClassVar[Needs] = NOTHING
    """What the function reads. A subclass whose parameters decide overrides `needs`."""
    differs: ClassVar[tuple[str, ...]] = ()
    """Where the number is another one than Trinity-RFT 0.6.0 would give, on purpose: sentences for the user."""

    @property
    def needs(self) -> Needs:
        """What the function reads, with these parameters."""
        return self.requires


def name_of(params: Params) -> str:
    """The name under which a config chooses these parameters; of a class of another distribution, the class's."""
    return str(getattr(params, "name", type(params).__name__))


def names_of(params_class: type[Params]) -> tuple[str, ...]:
    """All names that a built-in class goes by."""
    return get_args(params_class.model_fields["name"].annotation)


def function_of(params: Params) -> Callable[..., Any]:
    """The function that a params class names. Raises ConfigError if it names none, or none that can be imported."""
    what, target = f"the function of {name_of(params)!r}", getattr(params, "function", None)
    if not isinstance(target, str):
        where = f"{type(params).__module__}:{type(params).__name__}"
        raise ConfigError(f'{what} is not named; write `function = "module:name"` in the class {where}')
    return imported(what, target)


def imported(what: str, target: str) -> Callable[..., Any]:
    """The function at module:name. Raises ConfigError that begins with `what`."""
    function = plugins.load(what, target)
    if not callable(function):
        raise ConfigError(f"{what} ({target}) is a {type(function).__name__}, not a function")
    return function


def failure(params: Params, inputs: Any, error: Exception) -> EngineError:
    """What to raise if the function of these params failed on these inputs, a dataclass: perhaps it lacks a need."""
    absent = [each.name for each in dataclasses.fields(inputs) if getattr(inputs, each.name) is None]
    return EngineError(
        f"{params.function} failed: {error}; not given to it: {', '.join(absent) or 'nothing'}; what it reads must be "
        f"in `requires` of {type(params).__name__}, which has {', '.join(sorted(params.needs)) or 'nothing'}"
    )
