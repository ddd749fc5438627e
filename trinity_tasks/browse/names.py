"""The scalar columns of a row, by the names that a `--where` uses. Names and meanings only; imports nothing heavy.

Does not own: how a column is made of a shard's (`columns.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["number", "text", "truth", "any"]
"""What a column holds; any: each row what its writer has put there."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    kind: Kind
    meaning: str


COLUMNS: Final[dict[str, Column]] = {
    "uid": Column("text", "identity of the row: batch/task/run/step/suffix"),
    "batch": Column("any", "batch of tasks that it was sampled in, a number or a text"),
    "task": Column("any", "task within the batch, a number or a text; rows of one task form a group"),
    "run": Column("number", "which of the task's samples"),
    "step": Column("number", "turn within the run"),
    "writer": Column("text", "who wrote it"),
    "shard": Column("number", "index of the writer's shard"),
    "row": Column("number", "row in that shard"),
    "reward": Column("number", "reward; missing if unscored"),
    "model_version": Column("number", "train step of the weights that sampled it; missing if nobody did"),
    "prompt_length": Column("number", "tokens"),
    "response_length": Column("number", "tokens; of a pair, those of the longer answer"),
    "truncated": Column("truth", "whether prompt or response was cut"),
    "type": Column("text", "single_turn, multi_turn or dpo"),
    "prompt": Column("text", "text of the prompt; missing if the writer gave none"),
    "response": Column("text", "text of the response; missing if the writer gave none"),
}
"""Every column but those of `info` and `metrics`, which are as the writers have named them."""

FLATTENED: Final = ("info", "metrics")
"""Fields whose keys are columns: info_x is the key x of a row's info."""


def flat_name(field: str, key: str) -> str:
    """Column of a key of `info` or `metrics`.

    Example:
        >>> flat_name("info", "is.expert")
        'info_is_expert'
    """
    return f"{field}_{re.sub(r'[^0-9A-Za-z_]', '_', key)}"


def flattened_field(name: str) -> str | None:
    """The field of which a column is a key; None if it is none."""
    return next((field for field in FLATTENED if name.startswith(f"{field}_")), None)


def kind_of(name: str) -> Kind | None:
    """What a column holds; None if there is none of this name."""
    if name in COLUMNS:
        return COLUMNS[name].kind
    return "any" if flattened_field(name) else None


def unknown(name: str, more: Iterable[str] = ()) -> str:
    """What to say of a name that is no column. more: columns of `info` and `metrics` that are there."""
    known = [*COLUMNS, *sorted(more)]
    near = difflib.get_close_matches(name.lower(), known, n=1) or [each for each in known if name in each]
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no column {name}; {meant}Columns: {', '.join(known)}, info_<key>, metrics_<key>"
