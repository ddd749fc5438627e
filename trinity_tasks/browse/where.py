"""`Where`: which rows are wanted, in the words of a pandas query. Refuses everything that could do more than compare.

pandas evaluates calls, attributes and, behind "@", every name of the caller: `@pd.io.common.os.system("...")` runs a
command. So the text is parsed here, each node must be one of the few that a comparison needs, and pandas is given what
was made of them, never the text. Texts do not reach it at all: what compares with one becomes a column of truths.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from engines.errors import ConfigError
from trinity_tasks.browse.names import Kind, kind_of, unknown

MAX_LENGTH: Final = 4000
"""Characters of an expression."""

_ARITHMETIC: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_EQUAL: Final = (ast.Eq, ast.NotEq)
_ORDER: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MEMBER: Final = (ast.In, ast.NotIn)
_NEGATED: Final = (ast.NotEq, ast.NotIn, ast.IsNot)
_ALLOWED: Final = (
    "columns, numbers, texts in quotes, lists after `in`, == != < <= > >= in, not in, is None, and or not, + - * / // %"
)

_Test = Callable[[Any], Any]
"""Makes a column of truths of a column."""


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """A condition on rows.

    A missing value equals nothing and is in no list: beside `is None`, only != and not in find it.

    Example:
        >>> sorted(Where.parse("reward > 0.5 and 'sun' in prompt").columns)
        ['prompt', 'reward']
    """

    text: str
    """As the user wrote it."""
    columns: frozenset[str]
    """Names of the columns that it needs."""
    _query: str
    """What pandas evaluates: columns, numbers, operators."""
    _tests: tuple[tuple[str, str, _Test], ...]
    """(name in the query, column, test) for what is decided outside of it."""
    _numbers: frozenset[str]
    """Columns that must hold numbers, as far as they hold anything."""

    @classmethod
    def parse(cls, text: str) -> Where:
        """Raises ConfigError that says what is not allowed, or which column there is not."""
        try:
            if len(text) > MAX_LENGTH:
                raise ConfigError(f"--where has {len(text)} characters, {MAX_LENGTH} are allowed")
            with warnings.catch_warnings(action="ignore"):  # the user's text is no program to be warned of
                tree = ast.parse(text.strip(), mode="eval")
            grammar = _Grammar(text)
            query = ast.unparse(ast.fix_missing_locations(grammar.condition(tree.body)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--where {text!r} cannot be understood ({error}); allowed are {_ALLOWED}") from error
        return cls(text, frozenset(grammar.columns), query, tuple(grammar.tests), frozenset(grammar.numbers))

    def rows(self, frame: Any, place: str) -> npt.NDArray[np.int64]:
        """Which rows of a frame with these columns, indexed 0, 1, ..., are wanted; ascending. place: for messages.

        Raises ConfigError if a column that is compared with a number does not hold numbers.
        """
        for name in sorted(self._numbers):
            if frame[name].dtype.kind not in "iuf":
                raise ConfigError(
                    f"--where {self.text!r} takes {name} for a number; in {place} it has other values: "
                    f"{', '.join(repr(value) for value in frame[name].dropna().unique()[:3])}"
                )
        tests = {name: test(frame[column]) for name, column, test in self._tests}
        try:
            wanted = frame.assign(**tests).query(self._query, engine="python", local_dict={}, global_dict={})
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"--where {self.text!r} cannot be evaluated in {place}: {error}") from error
        return wanted.index.to_numpy()


class _Grammar:
    """Walks an expression: what it needs is collected, what is not allowed raises ConfigError."""

    def __init__(self, text: str) -> None:
        self.columns: set[str] = set()
        self.numbers: set[str] = set()
        self.tests: list[tuple[str, str, _Test]] = []
        self._text = text

    def condition(self, node: ast.expr) -> ast.expr:
        """An expression that is true or false for each row."""
        match node:
            case ast.BoolOp():
                return ast.BoolOp(node.op, [self.condition(value) for value in node.values])
            case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as operator, right):
                joined = ast.And() if isinstance(operator, ast.BitAnd) else ast.Or()
                return ast.BoolOp(joined, [self.condition(left), self.condition(right)])
            case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
                return ast.UnaryOp(ast.Not(), self.condition(operand))
            case ast.Compare():
                return self._comparison(node)
            case ast.Name(name) if self._column(name) == "truth":
                return node
            case _:
                raise self._refused(node, "is no condition; compare it with something")

    def _comparison(self, node: ast.Compare) -> ast.expr:
        operands = [node.left, *node.comparators]
        if len(node.ops) == 1 and (test := self._test(node.left, node.ops[0], node.comparators[0])):
            return test
        if not any(isinstance(part, ast.Name) for operand in operands for part in ast.walk(operand)):
            raise self._refused(node, "names no column")
        kinds: list[Kind] = [self._operand(operand) for operand in operands]
        for operator, left, right in zip(node.ops, range(len(operands) - 1), range(1, len(operands)), strict=True):
            if not isinstance(operator, (*_EQUAL, *_ORDER)):
                raise self._refused(node, "has an operator that is not allowed here")
            if isinstance(operator, _ORDER):
                for position in (left, right):
                    self._require_number(operands[position], kinds[position])
            self._require_alike(node, kinds[left], kinds[right])
        return node

    def _test(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> ast.expr | None:
        """A comparison with a text, a list or None, decided outside of the query; None if it is another one."""
        if isinstance(left, ast.Constant) and isinstance(right, ast.Name) and isinstance(operator, (*_EQUAL, *_MEMBER)):
            if isinstance(left.value, str) and isinstance(operator, _MEMBER):
                return self._contains(left.value, operator, right)
            if isinstance(operator, _EQUAL):
                left, right = right, left
        is_none = isinstance(right, ast.Constant) and right.value is None
        is_text = isinstance(right, ast.Constant) and isinstance(right.value, str)
        if isinstance(operator, (ast.Is, ast.IsNot)) and not is_none:
            raise self._refused(right, "cannot stand after `is`; only None can")
        if is_none and isinstance(operator, (ast.Is, ast.IsNot, *_EQUAL)):
            return self._flag(left, operator, lambda column: column.isna())
        if is_text and isinstance(operator, _EQUAL):
            values = [self._value(right, left)]
        elif isinstance(operator, _MEMBER) and isinstance(right, ast.List | ast.Tuple | ast.Set):
            values = [self._value(element, left) for element in right.elts]
        elif isinstance(operator, _MEMBER):
            raise self._refused(right, "cannot stand after `in`; give a list of values, or 'a text' in a column")
        else:
            return None
        return self._flag(left, operator, lambda column: column.isin(values))

    def _contains(self, text: str, operator: ast.cmpop, right: ast.Name) -> ast.expr:
        if self._column(right.id) not in ("text", "any"):
            raise self._refused(right, "is no text that could hold one")
        return self._flag(right, operator, lambda column: _contains(column, text))

    def _flag(self, column: ast.expr, operator: ast.cmpop, test: _Test) -> ast.expr:
        if not isinstance(column, ast.Name):
            raise self._refused(column, "is not a column, which is what can be compared with a text, a list or None")
        self._column(column.id)
        name = f"_{len(self.tests)}"
        self.tests.append((name, column.id, test))
        flag = ast.Name(name, ast.Load())
        return ast.UnaryOp(ast.Not(), flag) if isinstance(operator, _NEGATED) else flag

    def _value(self, node: ast.expr, column: ast.expr) -> str | float | bool:
        """A constant that a column is compared with."""
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        if not isinstance(node, ast.Constant):
            raise self._refused(node, "must be a number or a text")
        kind = self._constant(node)
        if sign < 0:
            self._require_number(node, kind)
        if isinstance(column, ast.Name):
            self._require_alike(column, self._column(column.id), kind)
        value = cast("str | float | bool", node.value)
        return -value if sign < 0 and not isinstance(value, str) else value

    def _operand(self, node: ast.expr) -> Kind:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name(name):
                return self._column(name)
            case ast.UnaryOp(ast.USub() | ast.UAdd(), operand):
                self._require_number(operand, self._operand(operand))
                return "number"
            case ast.BinOp(left, operator, right) if isinstance(operator, _ARITHMETIC):
                for side in (left, right):
                    self._require_number(side, self._operand(side))
                return "number"
            case _:
                raise self._refused(node, "is not allowed")

    def _constant(self, node: ast.Constant) -> Kind:
        value: object = node.value
        if isinstance(value, bool):
            return "truth"
        if isinstance(value, str):
            return "text"
        if (isinstance(value, int) and value < 2**63) or (isinstance(value, float) and math.isfinite(value)):
            return "number"
        raise self._refused(node, "is not allowed")

    def _column(self, name: str) -> Kind:
        kind = kind_of(name)
        if kind is None:
            raise ConfigError(f"--where {self._text!r}: {unknown(name)}")
        self.columns.add(name)
        return kind

    def _require_number(self, node: ast.expr, kind: Kind) -> None:
        if kind not in ("number", "any"):
            raise self._refused(node, "is not a number, which is what can be calculated with or ordered")
        if isinstance(node, ast.Name) and kind == "any":
            self.numbers.add(node.id)

    def _require_alike(self, node: ast.expr, left: Kind, right: Kind) -> None:
        if left != right and "any" not in (left, right):
            raise self._refused(node, f"compares a {left} with a {right}")

    def _refused(self, node: ast.expr, reason: str) -> ConfigError:
        return ConfigError(f"--where {self._text!r}: {ast.unparse(node)} {reason}; allowed are {_ALLOWED}")


def _contains(column: Any, text: str) -> Any:
    values: list[object] = column.tolist()
    return [isinstance(value, str) and text in value for value in values]
