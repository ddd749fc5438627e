"""The scalar columns of a shard's rows as a pandas frame, made of only those Parquet columns that they need.

Does not own: names and meanings (`names.py`), which rows are wanted (`where.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from trinity_tasks.browse.names import FLATTENED, flat_name, flattened_field


@dataclass(frozen=True, slots=True)
class Place:
    """One shard of a buffer."""

    name: str
    """Path below the job's folder."""
    writer: str
    index: int


@dataclass(frozen=True, slots=True)
class _Recipe:
    sources: tuple[str, ...]
    """Columns of the shard."""
    make: Callable[[Any, Place], Any]
    """Values of the column, from a table with these columns."""


def _renamed(source: str) -> _Recipe:
    return _Recipe((source,), lambda table, _: table.column(source).to_pandas())


def _of_place(value: Callable[[Place], str | int]) -> _Recipe:
    return _Recipe((), lambda table, place: np.full(table.num_rows, value(place)))


_IDENTITY: Final = ("eid_batch", "eid_task", "eid_run", "eid_step", "eid_suffix")
_LENGTHS: Final = ("prompt_length", "tokens", "chosen", "rejected")


def _rows(table: Any, _: Place) -> Any:
    return np.arange(cast("int", table.num_rows))


def _uids(table: Any, _: Place) -> Any:
    parts = [table.column(name).cast(pa.string()) for name in _IDENTITY]
    return pc.binary_join_element_wise(*parts, "/").to_pandas()


def _id_of(source: str) -> _Recipe:
    """An identity is a number or a text; a column of numbers only is one of numbers."""

    def make(table: Any, _: Place) -> Any:
        texts, are_int = table.column(source).to_pylist(), table.column(f"{source}_is_int").to_pylist()
        return _series(int(text) if is_int else text for text, is_int in zip(texts, are_int, strict=True))

    return _Recipe((source, f"{source}_is_int"), make)


def response_lengths(table: Any) -> npt.NDArray[np.int64]:
    """Tokens of each row's response, from a table with `_LENGTHS`; of a pair, those of the longer answer."""
    tokens, chosen, rejected = (_sizes(table.column(name)) for name in ("tokens", "chosen", "rejected"))
    return np.max([tokens - table.column("prompt_length").to_numpy(), chosen, rejected, np.zeros_like(tokens)], axis=0)


def _sizes(column: Any) -> npt.NDArray[np.int64]:
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


_RECIPES: Final[dict[str, _Recipe]] = {
    "uid": _Recipe(_IDENTITY, _uids),
    "batch": _id_of("eid_batch"),
    "task": _id_of("eid_task"),
    "run": _renamed("eid_run"),
    "step": _renamed("eid_step"),
    "writer": _of_place(lambda place: place.writer),
    "shard": _of_place(lambda place: place.index),
    "row": _Recipe((), _rows),
    "reward": _Recipe(("reward",), lambda table, _: table.column("reward").to_pandas().astype(np.float64)),
    "model_version": _renamed("model_version"),
    "prompt_length": _renamed("prompt_length"),
    "response_length": _Recipe(_LENGTHS, lambda table, _: response_lengths(table)),
    "truncated": _Recipe(("truncate_status",), lambda table, _: table.column("truncate_status").is_valid().to_numpy()),
    "type": _renamed("experience_type"),
    "prompt": _renamed("prompt_text"),
    "response": _renamed("response_text"),
}


def sources_of(names: Iterable[str]) -> list[str]:
    """Columns of a shard that these columns are made of; never none, so that a table of them knows its rows."""
    found = {"eid_task"}
    for name in names:
        field = flattened_field(name)
        found.update((field,) if field else _RECIPES[name].sources)
    return sorted(found)


def frame_of(table: Any, names: Collection[str], place: Place) -> Any:
    """A pandas frame of these columns, indexed 0, 1, ...; the table has what `sources_of` names."""
    columns = {name: _RECIPES[name].make(table, place) for name in names if not flattened_field(name)}
    for field in FLATTENED:
        wanted = [name for name in names if flattened_field(name) == field]
        if wanted:
            rows = _flattened(table, field)
            columns.update({name: _series(row.get(name) for row in rows) for name in wanted})
    return pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))


def keys_of(table: Any, names: Collection[str]) -> set[str]:
    """Columns of `info` and `metrics` that any row has, for the fields of which the names take some."""
    fields = {field for name in names if (field := flattened_field(name))}
    return {key for field in fields for row in _flattened(table, field) for key in row}


def _flattened(table: Any, field: str) -> list[dict[str, Any]]:
    """For each row, its keys of `info` or `metrics` under their flat names."""
    texts: list[str | None] = table.column(field).to_pylist()
    return [{flat_name(field, key): value for key, value in json.loads(text or "{}").items()} for text in texts]


def _series(values: Iterable[Any]) -> Any:
    """Numbers, truths or texts as such; lists and objects as their JSON; a column without any value is of numbers."""
    plain = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
    if all(value is None for value in plain):
        return pd.Series(plain, dtype=np.float64)
    return pd.Series(plain)
