"""Shards that are not what they should be, drawn from a seed: damaged bytes, other programs' tables, hostile claims.

Owns: making them, and what each must come to. Does not own: reading them (`tests/shard_fuzzer.py`).
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engines.experience import EID, Experience
from tests.experience_rows import make_rows
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.schema import SCHEMA

Verdict = Literal["refused", "equal", "either"]
"""either: what is read must be rows that can train, as nothing guards those bytes."""


class Mutation(NamedTuple):
    """One shard to read."""

    kind: str
    data: bytes
    verdict: Verdict
    original: tuple[Experience, ...]
    """The rows that it must hold if it is equal."""
    reason: str = ""
    """A part of the refusal."""


# -- where they come from ---------------------------------------------------------------------------------------------


def _ids(*values: int) -> Any:
    return np.array(values, np.int32)


def rich_rows() -> list[Experience]:
    """Rows with a value in every column."""
    rows = make_rows(2, 2, batch="rich", version=3)
    for number, row in enumerate(rows):
        length = row.response_length
        row.token_level_reward = np.full(length, 0.5, np.float32)
        row.advantages, row.returns = np.zeros(length, np.float32), np.ones(length, np.float32)
        row.teacher_logprobs = np.full(length, -1.5, np.float32)
        row.metrics = {"length": float(length)}
        row.prompt_text, row.response_text = "Gr\u00fc\u00dfe", "\u4f60\u597d" * number
        row.messages = [{"role": "user", "content": "hello"}]
        row.tools = [{"name": "search", "parameters": {"type": "object"}}]
    pair = Experience(
        tokens=np.arange(3, dtype=np.int32), chosen=_ids(1, 2), rejected=_ids(3), eid=EID("pairs", 0, suffix="0")
    )
    pair.chosen_messages = pair.rejected_messages = [{"role": "assistant", "content": "yes"}]
    return [*rows, pair]


@cache
def originals() -> tuple[tuple[Experience, ...], ...]:
    """Rows of good shards: a few, several row groups, every column, none."""
    return tuple(make_rows(3, 2)), tuple(make_rows(300, 2, version=5)), tuple(rich_rows()), ()


@cache
def _encoded(number: int) -> bytes:
    rows = originals()[number]
    return encode(rows, {"measured": {"own/size": 4.0}} if number == 2 else None)


# -- damaged bytes ----------------------------------------------------------------------------------------------------


def _span(draw: random.Random, size: int) -> tuple[int, int]:
    start = draw.randrange(size)
    return start, min(size, start + draw.choice([1, 2, 8, 64, 1024]))


def _place(draw: random.Random, data: bytes) -> int:
    """A place of any kind: the magic, the pages, our checksum, the footer, its length."""
    size = len(data)
    footer = max(size - 8 - int.from_bytes(data[-8:-4], "little"), 0)
    ranges = [(0, size), (0, 12), (max(footer - 16, 0), footer + 8), (footer, size), (size - 9, size)]
    return min(draw.randrange(*draw.choice(ranges)), size - 1)


def _cut(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] if draw.random() < 0.7 else data[at:]


def _flip(draw: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[_place(draw, data)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _number(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """A large number where there may be a size, a count or an offset of Parquet's own, which has seven bits a byte."""
    at = _place(draw, data)
    return data[:at] + draw.choice([b"\xff" * 4 + b"\x0f", b"\x80\x80\x80\x80\x10", b"\xfe\xff\x7f"]) + data[at + 3 :]


def _splice(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _place(draw, data)] + other[_place(draw, other) :]


def _double(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(draw, len(data))
    return data[:stop] + data[start:]


def _zero(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(draw, len(data))
    return data[:start] + bytes(stop - start) + data[stop:]


def _lost(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(draw, len(data))
    return data[:start] + data[stop:]


def _footer_length(draw: random.Random, data: bytes, other: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    wrong = draw.choice([0, 1, length - 1, length + 1, length + 8, len(data), 2**31 - 1, 2**31, 2**32 - 1])
    return data[:-8] + wrong.to_bytes(4, "little") + data[-4:]


def _appended(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data + draw.choice([b"\0", b"PAR1", other[-8:], other])


DAMAGES: Final = (_cut, _flip, _number, _splice, _double, _zero, _lost, _footer_length, _appended)


# -- tables of other programs -----------------------------------------------------------------------------------------


def foreign(table: Any, draw: random.Random | None = None, version: bytes | None = b"1", **options: Any) -> bytes:
    """The table as another program would write it: no checksum of ours, and any of the options of Parquet."""
    chosen: dict[str, Any] = {"write_page_checksum": True}
    if draw is not None:
        pages = draw.choice(["1.0", "2.0"])
        chosen |= {
            "compression": draw.choice(["none", "snappy", "zstd", "gzip"]),
            "use_dictionary": draw.choice([True, False]),
            "data_page_version": pages,
            # pyarrow 25 loses the rows of boolean lists in small pages of version 2, so that it refuses the table
            "data_page_size": draw.choice([64, 2**20]) if pages == "1.0" else 2**20,
            "row_group_size": draw.choice([1, 7, 2**20]) if table.num_rows < 20 else 100,
            "store_schema": draw.choice([True, False]),
            "write_statistics": draw.choice([True, False]),
        }
    sink = io.BytesIO()
    table, row_group_size = table.replace_schema_metadata(None), chosen.pop("row_group_size", None)
    with pq.ParquetWriter(sink, table.schema, **(chosen | options)) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        if version is not None:
            writer.add_key_value_metadata({b"trinity_flows.schema": version})
    return sink.getvalue()


@cache
def _table(number: int) -> Any:
    return pq.read_table(io.BytesIO(_encoded(number)))


def _with(table: Any, name: str, values: Any, kind: Any = None) -> Any:
    if not isinstance(values, pa.Array):
        values = pa.array(values, SCHEMA.field(name).type if kind is None else kind)
    index = table.schema.get_field_index(name)
    return table.append_column(name, values) if index < 0 else table.set_column(index, name, values)


def _first(table: Any, name: str, value: Any) -> Any:
    """Another value in the first row of a column."""
    values = [None] * table.num_rows if name not in table.column_names else table.column(name).to_pylist()
    return _with(table, name, [value, *values[1:]])


def not_utf8(num_rows: int) -> Any:
    """A text column whose bytes are none."""
    return pa.Array.from_buffers(pa.string(), num_rows, pa.array([b"\xff\xfe"] * num_rows, pa.binary()).buffers())


DEEP: Final = '{"a":' * 100_000 + "1" + "}" * 100_000
BAD_VALUES: Final[tuple[tuple[str, Any], ...]] = (
    *(("prompt_length", value) for value in (-(2**31), -1, 0, 2**31 - 1)),
    *(("reward", value) for value in (float("nan"), float("inf"))),
    *(("logprobs", value) for value in ([], [float("nan")] * 3, [None] * 3, [0.5] * 1000)),
    *(("tokens", value) for value in ([], [-1] * 5, [None] * 5)),
    *(("action_mask", value) for value in ([], [None], [True] * 1000)),
    *(("experience_type", value) for value in ("", "dpo", "else")),
    ("truncate_status", "else"),
    ("eid_batch", ""),
    *((name, value) for name in ("info", "metrics") for value in ("", "{", "[1]", "3", '"x"', DEEP, "1" * 5000)),
    *((name, value) for name in ("messages", "tools") for value in ("{", "3", '{"a": 1}', DEEP)),
    *(("metrics", value) for value in ('{"a": "x"}', '{"a": null}', '{"a": [1]}')),
    *(("info", value) for value in ('{"model_version": "x"}', '{"model_version": null}', '{"model_version": 1.5}')),
)
"""(column, what stands in its first row)."""
OTHER_TYPES: Final = (pa.int8(), pa.float32(), pa.timestamp("s"), pa.binary(), pa.list_(pa.int64()), pa.date32())
VERSIONS: Final = (None, b"", b"2", b"x", b"-1", b"1.0", b"\xff\xfe", b"9" * 5000, "\u0662".encode())


def _bad_value(draw: random.Random, table: Any) -> Any:
    return _first(table, *draw.choice(BAD_VALUES))


def _bad_type(draw: random.Random, table: Any) -> Any:
    name = draw.choice(table.column_names)
    others = [kind for kind in OTHER_TYPES if kind != SCHEMA.field(name).type]
    return _with(table, name, [None] * table.num_rows, draw.choice(others))


def _missing(draw: random.Random, table: Any) -> Any:
    return table.drop([draw.choice([name for name in table.column_names if not SCHEMA.field(name).nullable])])


def _null(draw: random.Random, table: Any) -> Any:
    return _first(table, draw.choice([name for name in table.column_names if not SCHEMA.field(name).nullable]), None)


def _twice(draw: random.Random, table: Any) -> Any:
    name = draw.choice(table.column_names)
    return table.append_column(name, table.column(name))


def _no_text(draw: random.Random, table: Any) -> Any:
    names = [field.name for field in SCHEMA if field.type == pa.string()]
    return _with(table, draw.choice(names), not_utf8(table.num_rows))


def _apart(draw: random.Random, table: Any) -> Any:
    """A group whose rows are no neighbours."""
    first = {"eid_batch": "0", "eid_batch_is_int": True, "eid_task": "0", "eid_task_is_int": True}
    for name, value in first.items():
        values = table.column(name).to_pylist()
        table = _with(table, name, [value, *values[1:-1], value])
    return table


SPOILERS: Final = (_bad_value, _bad_value, _bad_value, _bad_type, _missing, _null, _twice, _no_text, _apart)


def _harmless(draw: random.Random, table: Any) -> Any:
    """More columns, columns of nulls, another order of columns."""
    absent = [name for name in SCHEMA.names if name not in table.column_names]
    for name in draw.sample(absent, draw.randint(0, len(absent))):
        table = _with(table, name, [None] * table.num_rows)
    if draw.random() < 0.5:
        table = table.append_column("extra", pa.array([{"deep": [1]}] * table.num_rows))
    names = list(table.column_names)
    draw.shuffle(names)
    return table.select(names)


# -- drawing ----------------------------------------------------------------------------------------------------------


def mutation(seed: int) -> Mutation:
    """The shard of a seed."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return _damaged(draw)
    number = draw.choice([0, 0, 2])
    rows, table = originals()[number], _table(number)
    what = draw.random()
    if what < 0.15:
        return Mutation("harmless", foreign(_harmless(draw, table), draw), "equal", rows)
    if what < 0.2:
        return Mutation("version", foreign(table, draw, draw.choice(VERSIONS)), "refused", rows)
    if what < 0.6:
        damage = draw.choice(DAMAGES)
        data = damage(draw, foreign(table, draw), _encoded(0))
        return Mutation(f"foreign {damage.__name__}", data, "either", rows)
    spoil = draw.choice(SPOILERS)
    return Mutation(spoil.__name__, foreign(spoil(draw, table), draw), "refused", rows)


def _damaged(draw: random.Random) -> Mutation:
    number, other = draw.choice([0, 0, 1, 2, 3]), draw.choice([0, 1, 2, 3])
    data = _encoded(number)
    damage = draw.choice(DAMAGES)
    changed = damage(draw, data, _encoded(other))
    verdict = "equal" if changed in (data, _encoded(other)) else "refused"
    rows = originals()[number if changed == data else other]
    return Mutation(damage.__name__, changed, verdict, rows)


# -- few bytes that claim, or are, a great many -----------------------------------------------------------------------


def one_text(num_rows: int, length: int) -> bytes:
    """Rows that share one text, which Parquet stores once."""
    table = _table(0).slice(0, 1).take(pa.array(np.zeros(num_rows, np.int32)))
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array(["x" * length]))
    return foreign(table.append_column("prompt_text", texts), store_schema=False, compression="zstd")


def one_token(num_pieces: int, length: int) -> bytes:
    """Row groups of 100 rows with the same token again and again."""
    table = _table(0).slice(0, 1).take(pa.array(np.zeros(100, np.int32))).drop(["logprobs", "action_mask"])
    offsets, tokens = np.arange(101, dtype=np.int32) * length, np.full(100 * length, 7, np.int32)
    table = _with(
        table, "tokens", pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), SCHEMA.field("tokens").type)
    )
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema.remove_metadata(), compression="zstd") as writer:
        for _ in range(num_pieces):
            writer.write_table(table.replace_schema_metadata(None))
        writer.add_key_value_metadata({b"trinity_flows.schema": b"1"})
    return sink.getvalue()


def many_columns(number: int) -> bytes:
    """More columns than anybody has."""
    table = _table(0)
    extra = {f"extra {index}": pa.nulls(table.num_rows, pa.bool_()) for index in range(number)}
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return foreign(pa.table({**columns, **extra}))


def _long_text() -> Mutation:
    row = make_rows(1, 1)[0]
    row.response_text = "x" * 100_000_000
    return Mutation("100 MB in one text", encode([row]), "equal", (row,))


def _bomb(kind: str, data: bytes, verdict: Verdict = "refused") -> Mutation:
    assert len(data) < 20e6, "few bytes"
    return Mutation(kind, data, verdict, originals()[0], "a shard has at most")


BOMBS: Final[dict[str, Callable[[], Mutation]]] = {
    "rows": lambda: _bomb("a million rows", one_text(1_000_000, 1)),
    "texts": lambda: _bomb("60 GB in texts", one_text(60_000, 1_000_000)),
    "long-texts": lambda: _bomb("4 GB in long texts", one_text(40, 100_000_000)),
    "tokens": lambda: _bomb("2 GB in lists", one_token(250, 20_000)),
    "columns": lambda: _bomb("10,000 columns", many_columns(10_000), "equal"),
    "long-text": _long_text,
}
"""Name -> what makes it; each takes seconds."""
