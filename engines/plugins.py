"""Things that a config chooses by name: the hint for a wrong name, and what other distributions provide.

Owns: entry points, `module:attribute`, "did you mean", where a function of theirs failed. Does not own: which names are
built in.
"""

from __future__ import annotations

import difflib
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from engines.errors import ConfigError

MAX_NAMES = 40
"""Names that a message lists."""


def installed(group: str) -> dict[str, str]:
    """Name -> module:attribute of every entry point of this group."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def target(key: str, name: str, group: str | None, known: Iterable[str]) -> str:
    """module:attribute of a name that is not built in: itself, or that of an entry point of the group.

    key: where the name is set. known: the names that are built in, for the hint. Raises ConfigError if nothing has it.
    """
    if ":" in name:
        return name
    targets = installed(group) if group else {}
    if name not in targets:
        raise ConfigError(f"{key} = {name!r} is not known; {hint(name, targets.keys() | set(known))}")
    return targets[name]


def load(what: str, target: str) -> object:
    """The object at `module:attribute`. Raises ConfigError that begins with `what` if it cannot be imported."""
    try:
        return pkgutil.resolve_name(target)
    except AttributeError as error:
        module, _, name = target.partition(":")
        near = difflib.get_close_matches(name, dir(sys.modules.get(module)), n=1)
        meant = f"did you mean {near[0]}?" if near else "is it the module that you mean?"
        raise ConfigError(f"{what} ({target}) cannot be imported: {error}; {meant}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{what} ({target}) cannot be imported: {error}; is it installed, or on PYTHONPATH?"
        ) from error


def hint(name: str, known: Iterable[str], label: str = "known") -> str:
    """The known name that was meant, else all of them, if they are not too many to read.

    Example:
        >>> hint("grop", ["grpo", "sft"]), hint("xyz", ["sft", "grpo"])
        ('did you mean grpo?', 'known: grpo, sft')
    """
    names = sorted(known)
    turned = [each for each in names if sorted(each) == sorted(name.lower())]  # letters exchanged, or in capitals
    if near := turned or difflib.get_close_matches(name, names, n=1):
        return f"did you mean {near[0]}?"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{label}: {', '.join(names[:MAX_NAMES])}{more}"


def place_of(error: BaseException) -> str:
    """File, line and function where an error was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"
