"""The columns of a shard, and what stands beside them: version, checksum, notes.

Owns: the schema and its version, limits of size, the form of JSON columns. Does not own: writing (`encoding.py`),
reading (`shards.py`).

A shard is plain Parquet (zstd, page checksums), readable by pandas, pyarrow, DuckDB and `datasets`. Parquet's checksums
leave its footer uncovered, so eight bytes stand between the last page and the footer, where every reader skips them:
b"TFC1" and the CRC-32 of all other bytes. A shard of another program may lack them; then its rows are checked one by
one when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from trinity_tasks.buffer.row_checks import DTYPES, MESSAGES

SCHEMA_VERSION: Final = 1
ROW_GROUP_ROWS: Final = 1024
MAX_SHARD_ROWS: Final = 65_536
"""More in one write are refused, and a shard that says it has more is not decoded."""
MAX_SHARD_BYTES: Final = 2**30
"""Of the decoded columns; a few bytes of Parquet may claim any number."""
MAX_WRITTEN_BYTES: Final = MAX_SHARD_BYTES // 2
"""Of the rows of one write. Half, so that what is written can be read however it is encoded."""

VERSION_KEY: Final = "trinity_flows.schema"
CHECKSUM_KEY: Final = "trinity_flows.checksum"
NOTES_KEY: Final = "trinity_flows.notes"
CHECKSUM_MARK: Final = b"TFC1"
PARQUET_MAGIC: Final = b"PAR1"
TAIL_BYTES: Final = 8
"""Length of the footer (4) and the Parquet magic (4)."""

TEXT: Final = ("prompt_text", "response_text")
DICTS: Final = ("info", "metrics")
"""JSON, null when empty."""


def _column(name: str, kind: Any, *, nullable: bool = False) -> Any:
    return pa.field(name, kind, nullable=nullable)


def _list_of(dtype: np.dtype[Any]) -> Any:
    return pa.list_(pa.field("element", pa.from_numpy_dtype(dtype)))


SCHEMA: Final[Any] = pa.schema(
    [
        _column("eid_batch", pa.string()),
        _column("eid_batch_is_int", pa.bool_()),
        _column("eid_task", pa.string()),
        _column("eid_task_is_int", pa.bool_()),
        _column("eid_run", pa.int64()),
        _column("eid_step", pa.int64()),
        _column("eid_suffix", pa.string()),
        _column("experience_type", pa.string()),
        _column("truncate_status", pa.string(), nullable=True),
        _column("prompt_length", pa.int32()),
        _column("reward", pa.float64(), nullable=True),
        _column("model_version", pa.int64(), nullable=True),
        *(_column(name, _list_of(dtype), nullable=name != "tokens") for name, dtype in DTYPES.items()),
        *(_column(name, pa.string(), nullable=True) for name in (*DICTS, *TEXT, *MESSAGES)),
    ]
)
"""Columns of a shard. `model_version` is `info["model_version"]`, taken out of that JSON so that readers can filter."""

NAMES: Final = cast("list[str]", SCHEMA.names)


def footer_bytes(data: bytes | memoryview) -> int:
    return int.from_bytes(data[-TAIL_BYTES:-4], "little")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return cast("Any", value).tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


to_text: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=_plain).encode
from_text: Final = json.JSONDecoder().decode


def from_texts(texts: Sequence[str | None]) -> list[Any]:
    """`from_text` of each, in one call; None where there is none. Raises ValueError."""
    values = from_text(f"[{','.join('null' if text is None else text for text in texts)}]")
    if len(values) != len(texts):
        raise ValueError(f"{len(texts)} texts hold {len(values)} JSON values")
    return values
