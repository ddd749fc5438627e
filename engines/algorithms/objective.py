"""An algorithm's functions, found once by the names that its params carry, and the sum of its terms.

Owns: that the terms of a loss add up. Does not own: formulas, or division (`engines.algorithms.reduce`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engines.algorithms.inputs import LossInputs, Reduction, Stat, TokenLoss, Unit
from engines.algorithms.reduce import CountsByPart, aggregate
from engines.algorithms.spec import Algorithm, Params, failure, function_of
from engines.errors import EngineError

Term = Callable[[LossInputs, Any], TokenLoss | tuple[TokenLoss, ...]]


class Objective:
    """The loss of an algorithm.

    Example:
        >>> objective = Objective(algorithm)                  # doctest: +SKIP
        >>> loss, stats = objective.loss(inputs, counts)      # doctest: +SKIP
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Raises ConfigError for a function that does not exist."""
        self.algorithm = algorithm
        self._terms: dict[str, tuple[Term, Params]] = {"loss/policy": (function_of(algorithm.loss), algorithm.loss)}
        if algorithm.kl.active:
            self._terms["loss/kl"] = (function_of(algorithm.kl), algorithm.kl)
        if algorithm.entropy.active:
            self._terms["loss/entropy"] = (function_of(algorithm.entropy), algorithm.entropy)
        correction = algorithm.correction
        self._correction = None if correction is None else (function_of(correction), correction)

    def set_kl_coefficient(self, coefficient: float) -> None:
        """Use this coefficient from now on."""
        function, params = self._terms["loss/kl"]
        self._terms["loss/kl"] = (function, params.model_copy(update={"kl_coef": coefficient}))

    def loss(self, x: LossInputs, counts: CountsByPart) -> tuple[Tensor, dict[str, Stat]]:
        """This micro-batch's share of the update's loss, and its stats. Shares of all micro-batches add up.

        Raises EngineError if a function gives back what it must not.
        """
        stats: dict[str, Stat] = {}
        total = x.logprobs.new_zeros(())
        for key, (term, term_params) in self._terms.items():
            try:
                parts = term(x, term_params)
            except (TypeError, AttributeError) as error:  # of None, mostly
                raise failure(term_params, x, error) from error
            share = x.logprobs.new_zeros(())
            for part in parts if isinstance(parts, tuple) else (parts,):
                rows = _checked_rows(part, x, term_params)
                if key == "loss/policy" and self._correction is not None:
                    function, params = self._correction
                    part = function(part, rows, params)
                share = share + aggregate(part, rows, self.algorithm.aggregation, counts[part.part])
                stats |= {name: stat._replace(part=part.part) for name, stat in part.stats.items()}
            stats[key] = Stat(share.detach(), Reduction.SUM)
            total = total + share
        stats["loss/total"] = Stat(total.detach(), Reduction.SUM)
        return total, stats


def _checked_rows(loss: Any, x: LossInputs, params: Params) -> LossInputs:
    """The rows that the loss is about. Raises EngineError if it is not what a loss function must give back for them."""
    if not isinstance(loss, TokenLoss):
        raise EngineError(
            f"{params.function} gave a {type(loss).__name__}; it must return TokenLoss(value) with one number for each "
            "action token, not averaged"
        )
    rows = x.part(loss.part)
    num_rows = len(rows.num_actions)
    expected = {Unit.TOKEN: len(rows.logprobs), Unit.SEQUENCE: num_rows, Unit.PAIR: num_rows // 2}[loss.unit]
    if loss.value.shape != (expected,):
        raise EngineError(
            f"{params.function} gave a TokenLoss with a value of shape {list(loss.value.shape)}; with unit {loss.unit} "
            f"it must be [{expected}], one number for each {loss.unit} of the {loss.part} rows, not averaged"
        )
    for name, stat in loss.stats.items():
        if not isinstance(stat, Stat):
            raise EngineError(
                f"{params.function} gave a {type(stat).__name__} as stat {name!r}; use token_mean(values) or another "
                "of engines.algorithms.inputs"
            )
    return rows
