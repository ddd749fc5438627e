"""Operators: what happens to scored experiences before they are written. One after another, in the config's order.

Owns: the pipeline, a user's own operators, the account of every row that is dropped. Does not own: what the built-in
ones do (`trinity_tasks.operator_functions`) and are told (`trinity_tasks.operator_params`), writing
(`trinity_tasks.buffer`), the filters of an algorithm, which see what is left.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from engines import plugins
from engines.errors import ConfigError, DataError
from engines.experience import Experience
from trinity_tasks.operator_functions import OPERATORS, Outcome
from trinity_tasks.operator_params import BUILT_IN, OperatorConfig, no_such_parameter, params_named

ENTRY_POINT_GROUP: Final = "trinity_flows.operators"

Operate = Callable[[list[Experience]], Outcome]
"""Changes rows in place, and may put another in the place of one, but the list keeps its length."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that an operator took out."""

    uid: str
    """Its `eid.uid`."""
    operator: str
    """Name of the operator, as in `Pipeline.names`."""
    reason: str
    """Why; in the same words for all rows that went for the same reason."""
    num_tokens: int
    """Response tokens; of a pair, those of both responses."""


@dataclass(slots=True)
class Processed:
    """What a pipeline made of the rows. Every row that came in is in `rows` or in `dropped`, once."""

    rows: list[Experience]
    """Those that stay, in the order in which they came."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """operator/<name>/num_dropped of every operator, and what each measures, if there was something to measure."""
    dropped: list[Dropped] = field(default_factory=list[Dropped])
    """Those that do not, operator by operator."""
    pass_rates: dict[int, float] = field(default_factory=dict[int, float])
    """Task index -> mean reward, if there is a pass_rate_calculator."""


class Pipeline:
    """Operators in their order. It owns the rows that it is given, and changes them.

    Example:
        >>> Pipeline([OperatorConfig(name="reward_filter", args={"threshold": 0.5})]).names
        ('reward_filter',)
    """

    def __init__(self, configs: Sequence[OperatorConfig], key: str = "operators") -> None:
        """key: where the operators stand in the config, for messages.

        Raises ConfigError for an operator that is not known or cannot be imported, and for arguments that do not fit.
        """
        self._operators: dict[str, Operate] = {}
        for index, config in enumerate(configs):
            operate = _operate(f"{key}[{index}]", config)
            self._operators[_unused_name(config.name.rpartition(":")[2], self._operators)] = operate

    @property
    def names(self) -> tuple[str, ...]:
        """One for each operator, all different: of a function its own, of the second of two alike with _2 behind."""
        return tuple(self._operators)

    def process(self, rows: Sequence[Experience]) -> Processed:
        """Run every operator on what the one before it has left.

        Raises DataError for a row that an operator cannot use, two rows of one identity, and a user's function that
        fails or returns what it must not.
        """
        _check_distinct(rows)
        done = Processed(list(rows))
        for name, operate in self._operators.items():
            outcome = operate(done.rows)
            for index, reason in sorted(outcome.drops.items()):
                row = done.rows[index]
                done.dropped.append(Dropped(row.eid.uid, name, reason, _num_response_tokens(row)))
            done.rows = [row for index, row in enumerate(done.rows) if index not in outcome.drops]
            measured = {"num_dropped": float(len(outcome.drops))} | outcome.measured
            done.metrics |= {f"operator/{name}/{key}": value for key, value in measured.items()}
            done.pass_rates |= outcome.pass_rates
        return done


def _unused_name(name: str, used: Mapping[str, Any]) -> str:
    number, unused = 1, name
    while unused in used:
        number += 1
        unused = f"{name}_{number}"
    return unused


def _check_distinct(rows: Sequence[Experience]) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.eid.uid in seen:
            raise DataError(f"two experiences are {row.eid.uid}; operators tell rows apart by eid, which must differ")
        seen.add(row.eid.uid)


def _num_response_tokens(row: Experience) -> int:
    return row.response_length + sum(len(each) for each in (row.chosen, row.rejected) if each is not None)


def _operate(place: str, config: OperatorConfig) -> Operate:
    """The operator with its parameters. Raises ConfigError."""
    if config.name not in BUILT_IN:
        return _own(place, config)
    params = params_named(place, config.name, config.args)
    function = OPERATORS[type(params)]
    return lambda rows: function(rows, params)


def _own(place: str, config: OperatorConfig) -> Operate:
    """A user's function (rows, **args) -> the rows that stay. It is not called without rows. Raises ConfigError."""
    target = plugins.target(f"{place}.name", config.name, ENTRY_POINT_GROUP, BUILT_IN)
    function = plugins.load(f"{place}: operator {config.name}", target)
    if not inspect.isroutine(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.isroutine(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{place}: operator {config.name} is {kind}, not a function of (rows, **args)")
    own = cast("Callable[..., object]", function)
    _check_args(f"{place}: operator {config.name}", own, config.args)

    def operate(rows: list[Experience]) -> Outcome:
        if not rows:
            return Outcome()
        uids = [row.eid.uid for row in rows]
        try:
            returned = own(list(rows), **copy.deepcopy(config.args))
        except (Exception, SystemExit) as error:  # the user's code: whatever it does, the run says where and why
            raise DataError(
                f"operator {config.name} failed with {type(error).__name__}: {error} ({plugins.place_of(error)}), "
                f"given {len(rows)} rows; correct it, or take it out of the config"
            ) from error
        kept = _by_uid(config.name, returned, uids)
        for index, uid in enumerate(uids):
            rows[index] = kept.get(uid, rows[index])
        return Outcome({index: f"left out by {config.name}" for index, uid in enumerate(uids) if uid not in kept})

    return operate


def _check_args(what: str, function: Callable[..., object], args: Mapping[str, Any]) -> None:
    """Raises ConfigError if the function cannot be called with rows and these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}; wrap it in a function of (rows, **args)") from error
    parameters = signature.parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in args:
        if not takes_any and name not in parameters:
            raise ConfigError(f"{what}, args.{name}: {no_such_parameter(name, list(parameters)[1:])}")
    try:
        signature.bind([], **args)
    except TypeError as error:
        raise ConfigError(f"{what}: args do not fit, {error}; it is called with (rows, **args)") from error


def _by_uid(name: str, returned: object, uids: Sequence[str]) -> dict[str, Experience]:
    """The rows that a user's function returned. Raises DataError if they are not some of those that it was given."""
    remedy = "it must return a list of those of its rows that stay"
    if not isinstance(returned, list):
        raise DataError(f"operator {name} returned a {type(returned).__name__}; {remedy}")
    known, kept = set(uids), dict[str, Experience]()
    for row in cast("list[object]", returned):
        if not isinstance(row, Experience):
            raise DataError(f"operator {name} returned a list with a {type(row).__name__}; {remedy}")
        if (uid := row.eid.uid) not in known:
            raise DataError(
                f"operator {name} returned experience {uid}, which it was not given; {remedy}, eids unchanged"
            )
        if uid in kept:
            raise DataError(f"operator {name} returned experience {uid} twice; {remedy}, each once")
        kept[uid] = row
    return kept
