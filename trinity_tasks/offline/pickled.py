"""Pickles read as data: their opcodes are interpreted here, build plain values, and run nothing.

Owns: which opcodes and which names a pickle may have. Does not own: what the named things mean (`tensors.py`,
`trinity_db.py`).

Python's own unpickler calls whatever a pickle names, so a file from elsewhere can run any code. This reader knows no
calls: where a pickle wants one, it notes the name and the arguments as a `Call`, and only for names that its caller
allows. Everything else is refused when it is met, before a later opcode is looked at.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

from engines.errors import DataError

MAX_PLAIN_COST: Final = 64 * 2**20
"""Most that one value may grow to when it is written out, bytes: a pickle of a few bytes can name a part many times."""
MAX_DEPTH: Final = 64
"""Deepest nesting of a value; a pickle can hold a list that contains itself."""
MAX_BITS: Final = 63
"""Largest whole number, bits without its sign."""
_NODE_COST: Final = 16
_NOTHING_RAN: Final = "Nothing of it was executed"

_PLAIN: Final = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    }
)
"""Opcodes whose argument is the value."""
_CONSTANTS: Final[Mapping[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


@dataclass(frozen=True, slots=True)
class Global:
    """A name of something in a module, that is neither imported nor looked up."""

    path: str
    """module.name"""


@dataclass(slots=True, eq=False)
class Call:
    """A call or an instance that a pickle asks for, not made."""

    path: str
    """What would be called: module.name."""
    arguments: tuple[Any, ...]
    state: Any = None
    """Attributes that the instance would get."""


@dataclass(frozen=True, slots=True, eq=False)
class PersistentId:
    """Something that lies outside the pickle."""

    value: Any


def read_pickle(stream: BinaryIO, allowed: Set[str], *, persistent_ids: bool = False) -> Any:
    """The value of the next pickle of a stream: plain values, and a `Call` or `Global` for each allowed name.

    Raises DataError for any other name, for an opcode that plain data does not need, and for damage.
    """
    machine = _Machine(allowed, persistent_ids)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except DataError:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise DataError(f"the pickle is damaged: {type(error).__name__}: {error}. {_NOTHING_RAN}") from error
    raise DataError(f"the pickle has no end. {_NOTHING_RAN}")


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, allowed: Set[str], persistent_ids: bool) -> None:
        self._allowed = allowed
        self._persistent_ids = persistent_ids
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise DataError(f"the pickle leaves {len(self._stack)} values instead of one. {_NOTHING_RAN}")
        return self._stack[0]

    def step(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name == "BINPERSID" and self._persistent_ids:
            self._stack.append(PersistentId(self._stack.pop()))
        else:
            raise DataError(f"the pickle has the opcode {name}, which no experience needs. {_NOTHING_RAN}")

    def ignore(self, _: Any) -> None:
        """PROTO, FRAME: how the bytes are cut, not what they mean."""

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def global_(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        path = f"{module}.{name}"
        if type(module) is not str or type(name) is not str or path not in self._allowed:
            raise DataError(
                f"the pickle names {path[:200]}, which is no part of an experience; a pickle that names other things "
                f"can run code when it is loaded, so it is refused. {_NOTHING_RAN}"
            )
        self._stack.append(Global(path))

    def call(self, _: Any) -> None:
        """REDUCE and NEWOBJ: a function or a class, and a tuple."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Global or type(arguments) is not tuple:
            raise DataError(f"the pickle calls a {type(function).__name__}, not a name. {_NOTHING_RAN}")
        self._stack.append(Call(function.path, cast("tuple[Any, ...]", arguments)))

    def build(self, _: Any) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        if type(instance) is not Call or instance.state is not None:
            raise DataError(f"the pickle sets attributes of a {type(instance).__name__}. {_NOTHING_RAN}")
        instance.state = state

    def empty_list(self, _: Any) -> None:
        self._stack.append([])

    def empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def empty_tuple(self, _: Any) -> None:
        self._stack.append(())

    def list_(self, _: Any) -> None:
        self._stack.append(self._marked())

    def tuple_(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    def short_tuple(self, size: int) -> None:
        items = self._stack[-size:]
        if len(items) < size:
            raise IndexError("fewer values than the tuple has")
        self._stack[-size:] = [tuple(items)]

    def dict_(self, _: Any) -> None:
        items = self._marked()
        self._stack.append({})
        self._set(items)

    def append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        if type(target := self._stack[-1]) is not list:
            raise DataError(f"the pickle appends to a {type(target).__name__}. {_NOTHING_RAN}")
        cast("list[Any]", target).extend(items)

    def setitem(self, _: Any) -> None:
        items = self._stack[-2:]
        del self._stack[-2:]
        self._set(items)

    def setitems(self, _: Any) -> None:
        self._set(self._marked())

    def _set(self, items: list[Any]) -> None:
        if type(target := self._stack[-1]) is not dict:
            raise DataError(f"the pickle sets items of a {type(target).__name__}. {_NOTHING_RAN}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise DataError(f"a key of the pickle is a {type(key).__name__}, it must be text. {_NOTHING_RAN}")
            target[key] = value

    def _marked(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items


_STEPS: Final[Mapping[str, Callable[[_Machine, Any], None]]] = {
    "PROTO": _Machine.ignore,
    "FRAME": _Machine.ignore,
    "MARK": _Machine.mark,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.global_,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_DICT": _Machine.empty_dict,
    "EMPTY_TUPLE": _Machine.empty_tuple,
    "LIST": _Machine.list_,
    "TUPLE": _Machine.tuple_,
    "TUPLE1": lambda machine, _: machine.short_tuple(1),
    "TUPLE2": lambda machine, _: machine.short_tuple(2),
    "TUPLE3": lambda machine, _: machine.short_tuple(3),
    "DICT": _Machine.dict_,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.setitem,
    "SETITEMS": _Machine.setitems,
}
"""Opcodes that arrange values. All others are refused."""


def plain(value: Any, scalar: Callable[[Call], Any]) -> Any:
    """The value as JSON has it, every part a copy of its own; `scalar` gives the number that a `Call` stands for.

    Raises DataError for bytes, tuples, huge numbers, values that contain themselves, and growth beyond MAX_PLAIN_COST.
    """
    costs = [0]

    def visit(part: Any, depth: int) -> Any:
        costs[0] += _NODE_COST + (len(part) if type(part) is str else 0)
        if costs[0] > MAX_PLAIN_COST or depth > MAX_DEPTH:
            raise DataError(
                f"the value is nested deeper than {MAX_DEPTH}, or names its parts so often that it would fill more "
                f"than {MAX_PLAIN_COST} bytes; no experience does"
            )
        if type(part) is int and part.bit_length() > MAX_BITS:
            raise DataError(f"a number has {part.bit_length()} bits; no experience has such")
        if part is None or type(part) in (bool, int, float, str):
            return part
        if type(part) is list:
            return [visit(item, depth + 1) for item in cast("list[Any]", part)]
        if type(part) is dict:
            return {key: visit(item, depth + 1) for key, item in _pairs(part, costs)}
        if type(part) is Call:
            return scalar(part)
        raise DataError(f"a {type(part).__name__} is no JSON, so it could not be stored as it is")

    return visit(value, 0)


def _pairs(mapping: Any, costs: list[int]) -> Iterator[tuple[str, Any]]:
    for key, item in cast("dict[str, Any]", mapping).items():
        costs[0] += len(key)
        yield key, item
