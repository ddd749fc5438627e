"""How much memory a shard may take, by what it says of itself and by what comes out of it.

Owns: the refusal of what says that it is too large, reading the table of another program piece by piece. Does not own:
the limits (`schema.py`), what a row must be (`row_checks.py`).

A few bytes of Parquet may hold gigabytes: repeated values cost nothing there. So the rows and values that the footer
names are counted before anything is decoded, and a table that no `ExperienceWriter` has made is decoded in pieces,
until it is whole or too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from trinity_tasks.buffer.row_checks import DTYPES
from trinity_tasks.buffer.schema import MAX_SHARD_BYTES, MAX_SHARD_ROWS

PIECE_BYTES: Final = 2**27
"""Of one column, at most, as a text is no longer than its column is; unless `MIN_PIECE_ROWS` of them are."""
MIN_PIECE_ROWS: Final = 4
MAX_PIECE_ROWS: Final = 1024


def too_large(metadata: Any, *, is_foreign: bool) -> str | None:
    """What is too large in a shard with this footer, in words; None if it is not."""
    size = _encoded_bytes(metadata)
    if is_foreign:
        size = max(size, _list_bytes(metadata))
    if metadata.num_rows <= MAX_SHARD_ROWS and size <= MAX_SHARD_BYTES:
        return None
    return (
        f"it says it has {metadata.num_rows} rows of {size} bytes together, and a shard has at most "
        f"{MAX_SHARD_ROWS} rows and {MAX_SHARD_BYTES} bytes"
    )


def _encoded_bytes(metadata: Any) -> int:
    return sum(int(metadata.row_group(group).total_byte_size) for group in range(metadata.num_row_groups))


def _list_bytes(metadata: Any) -> int:
    """Of the arrays of all rows, once they are decoded."""
    sizes = {f"{name}.list.element": dtype.itemsize for name, dtype in DTYPES.items()}
    return sum(sizes.get(chunk.path_in_schema, 0) * int(chunk.num_values) for chunk in _chunks(metadata))


def _chunks(metadata: Any) -> list[Any]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [group.column(number) for group in groups for number in range(group.num_columns)]


def read_in_pieces(file: Any, columns: Sequence[str]) -> Any:
    """The columns of a `ParquetFile` as an Arrow table. Raises ValueError as soon as it is too large."""
    if not file.metadata.num_rows:
        return file.read(columns=list(columns), use_threads=False)
    longest = max(int(chunk.total_uncompressed_size) for chunk in _chunks(file.metadata))
    num_rows = min(max(PIECE_BYTES // max(longest, 1), MIN_PIECE_ROWS), MAX_PIECE_ROWS)
    pieces: list[Any] = []
    size = 0
    for piece in file.iter_batches(batch_size=num_rows, columns=list(columns), use_threads=False):
        size += piece.nbytes
        if size > MAX_SHARD_BYTES:
            raise ValueError(f"its first rows have {size} bytes already, a shard has at most {MAX_SHARD_BYTES}")
        pieces.append(piece)
    return pa.Table.from_batches(pieces)
