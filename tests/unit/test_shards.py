"""A shard gives back exactly what was written, refuses what is damaged, and is plain Parquet to everyone else."""

import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import DataError
from engines.experience import EID, Experience
from tests.experience_rows import make_rows
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.row_checks import DTYPES, PER_TOKEN, RowLimits, validate
from trinity_tasks.buffer.schema import SCHEMA
from trinity_tasks.buffer.shards import decode

LIMITS = RowLimits(vocab_size=100, max_prompt_tokens=8, max_response_tokens=10, max_model_len=16)


def assert_same_rows(found: list[Experience], expected: list[Experience]) -> None:
    """Equal in every field, floats bit for bit."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for field in dataclasses.fields(Experience):
            left, right = getattr(a, field.name), getattr(b, field.name)
            if field.name in DTYPES and right is not None:
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes(), field.name
            elif isinstance(right, float):
                assert np.float64(left).tobytes() == np.float64(right).tobytes(), field.name
            elif isinstance(right, dict):
                assert json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True), field.name
            else:
                assert type(left) is type(right), field.name
                assert left == right, field.name


# -- round trip -------------------------------------------------------------------------------------------------------

ints = st.integers(-(2**31), 2**31 - 1)
bits = st.integers(0, 2**32 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
ids = st.one_of(st.integers(), texts)


def floats_of(size: int) -> st.SearchStrategy[np.ndarray]:
    """Any float32 bit pattern: NaN payloads, infinities, subnormals and -0.0 included."""
    return st.lists(bits, min_size=size, max_size=size).map(lambda v: np.asarray(v, np.uint32).view(np.float32))


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    """Any row that an `Experience` can be, in all three types."""
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    pair = draw(st.booleans()) and draw(st.booleans())
    tokens = np.asarray(draw(st.lists(ints, min_size=prompt + response, max_size=prompt + response)), np.int32)
    per_token = {
        name: draw(st.none() | floats_of(response)) for name in PER_TOKEN if name != "action_mask" and not pair
    }
    mask = None if pair else draw(st.none() | st.lists(st.booleans(), min_size=response, max_size=response))
    ids_of = st.lists(ints, min_size=1, max_size=3)
    info = draw(st.dictionaries(texts, json_values, max_size=2))
    if draw(st.booleans()):
        info["model_version"] = draw(st.integers(-(2**63), 2**64) | st.booleans() | st.none())
    row = Experience(
        tokens=tokens,
        prompt_length=prompt,
        eid=EID(draw(ids), draw(ids), draw(st.integers(0, 2**31)), draw(st.integers(0, 99)), draw(texts)),
        reward=draw(st.none() | st.floats()),
        action_mask=mask,  # pyright: ignore[reportArgumentType]
        truncate_status=draw(st.sampled_from([None, "response_truncated"])),
        info=info,
        metrics=draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2)),
        prompt_text=draw(st.none() | texts),
        response_text=draw(st.none() | texts),
        messages=draw(st.none() | st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2)),
        tools=draw(st.none() | st.just([])),
        chosen=draw(ids_of) if pair else None,  # pyright: ignore[reportArgumentType]
        rejected=draw(ids_of) if pair else None,  # pyright: ignore[reportArgumentType]
    )
    for name, value in per_token.items():
        setattr(row, name, value)
    if draw(st.booleans()) and row.action_mask is not None:
        row.action_mask[:] = False  # an operator may mask a single-turn row
    return row


@settings(max_examples=80, deadline=None)
@given(st.lists(experiences(), max_size=5))
def test_rows_come_back_bit_for_bit(rows: list[Experience]) -> None:
    shard = decode(encode(rows), "shard")
    assert shard.num_rows == len(rows)
    assert_same_rows(shard.rows(0, len(rows)), rows)
    for start in range(len(rows)):
        assert_same_rows(shard.rows(start, len(rows)), rows[start:])


def test_a_shard_larger_than_a_row_group_comes_back() -> None:
    rows = make_rows(num_groups=400, group_size=3, version=5)
    shard = decode(encode(rows), "shard")
    assert_same_rows(shard.rows(0, 1200), rows)
    assert_same_rows(shard.rows(1020, 1033), rows[1020:1033])
    assert shard.group_starts == tuple(range(0, 1200, 3))


def test_a_prompt_that_was_cut_comes_back() -> None:
    row = Experience(tokens=[1, 2, 3], prompt_length=3, truncate_status="prompt_truncated", eid=EID(1, 2))  # pyright: ignore[reportArgumentType]
    validate([row])
    assert_same_rows(decode(encode([row]), "shard").rows(0, 1), [row])


def test_no_rows_make_a_shard() -> None:
    shard = decode(encode([]), "shard")
    assert (shard.num_rows, shard.group_starts, shard.rows(0, 0)) == (0, (), [])


def test_a_consumer_may_change_its_rows() -> None:
    rows = make_rows(num_groups=2, group_size=2, version=5)
    shard = decode(encode(rows), "shard")
    changed = shard.rows(0, 4)
    for row in changed:
        row.tokens[:] = 0
        row.logprobs[:] = 1.0  # pyright: ignore[reportOptionalSubscript]
        row.action_mask[:] = False  # pyright: ignore[reportOptionalSubscript]
        row.info["model_version"] = 99
    assert_same_rows(shard.rows(0, 4), rows)


def test_the_schema_covers_every_field() -> None:
    columns = {name for name in SCHEMA.names if not name.startswith("eid_") and name != "model_version"}
    assert columns | {"eid"} == {field.name for field in dataclasses.fields(Experience)}


def test_numpy_scalars_in_info_become_numbers() -> None:
    (row,) = make_rows(1, 1)
    row.info = {"a": np.float32(0.5), "b": np.int64(3), "c": np.arange(2)}
    (back,) = decode(encode([row]), "shard").rows(0, 1)
    assert back.info == {"a": 0.5, "b": 3, "c": [0, 1]}


def test_what_is_not_json_or_text_is_refused_by_name() -> None:
    rows = make_rows(1, 2)
    rows[1].info["model"] = object()
    with pytest.raises(DataError, match=r"row 1 of 2, experience 0/0/1/0/000001: info cannot .* JSON \(object is not"):
        encode(rows)
    rows = make_rows(1, 2)
    rows[1].response_text = "cut in the middle: \ud83d"
    with pytest.raises(DataError, match=r"row 1 of 2, experience 0/0/1/0/000001: response_text cannot .* UTF-8"):
        encode(rows)


# -- other readers and writers ----------------------------------------------------------------------------------------


def test_pandas_and_plain_pyarrow_read_it() -> None:
    rows = make_rows(num_groups=300, group_size=4, version=5)
    data = encode(rows)
    frame = pd.read_parquet(io.BytesIO(data))
    assert frame["reward"].tolist() == [row.reward for row in rows]
    assert frame["model_version"].tolist() == [5] * 1200
    assert frame["tokens"][7].tolist() == rows[7].tokens.tolist()
    assert json.loads(str(frame["info"][0])) == {"task_index": 7}
    assert frame["eid_task"].tolist() == [str(row.eid.task) for row in rows]
    file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    assert file.metadata.num_row_groups == 2
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.metadata.metadata[b"trinity_flows.schema"] == b"1"
    assert pa.concat_arrays(file.read()["logprobs"].chunks).values.to_numpy().sum() == pytest.approx(
        sum(float(row.logprobs.sum()) for row in rows if row.logprobs is not None), rel=1e-4
    )


def foreign_shard(rows: list[Experience], change: Callable[[pa.Table], pa.Table] = lambda table: table) -> bytes:
    """The same rows, written by another program: plain pyarrow, without our checksum."""
    table = change(pq.read_table(io.BytesIO(encode(rows))))
    sink = io.BytesIO()
    table = table.replace_schema_metadata({b"trinity_flows.schema": b"1"})
    pq.write_table(table, sink, write_page_checksum=True, use_dictionary=False, compression="none")
    return sink.getvalue()


def test_a_shard_of_another_program_is_read() -> None:
    rows = make_rows(num_groups=3, group_size=2, version=5)
    optional = [name for name in SCHEMA.names if SCHEMA.field(name).nullable and name not in ("info", "logprobs")]

    def without_optional_columns(table: pa.Table) -> pa.Table:
        present = [name for name in optional if name in table.column_names]
        assert "reward" in present
        return table.drop(present).append_column("extra", pa.array(range(6)))

    (first, *_) = decode(foreign_shard(rows, without_optional_columns), "shard").rows(0, 6)
    assert first.tokens.tolist() == rows[0].tokens.tolist()
    assert first.info == {"task_index": 7}
    assert first.reward is None
    assert first.action_mask is not None
    assert first.action_mask.tolist() == [True] * first.response_length
    assert_same_rows(decode(foreign_shard(rows), "shard").rows(0, 6), rows)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["{}", "{}", "{},{}"], r"row 2: info cannot be read \(Extra data"),
        (["{}", "", "{}"], r"row 1: info cannot be read \(Expecting value"),
        (['["a', 'b"]', "1,2"], r"row 0: info cannot be read \(Unterminated string"),
        (["{}", "[1]", "{}"], r"row 1: info cannot be read \(a JSON list instead of a dict"),
    ],
)
def test_texts_that_are_not_one_json_object_each_are_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(DataError, match=f"shard shard cannot be read: {reason}"):
        decode(foreign_shard(make_rows(1, 3), replaced("info", pa.array(texts))), "shard")


def test_a_column_without_values_is_left_out() -> None:
    rows = make_rows(num_groups=2, group_size=2, version=5)
    rows[1].reward = None
    stored = pq.read_table(io.BytesIO(encode(rows))).column_names
    assert {"tokens", "reward", "logprobs"} <= set(stored)
    assert {"advantages", "teacher_logprobs", "chosen", "messages"}.isdisjoint(stored)
    for row in rows:
        row.reward = None
    assert "reward" not in pq.read_table(io.BytesIO(encode(rows))).column_names
    assert_same_rows(decode(encode(rows), "shard").rows(0, 4), rows)


def replaced(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    """Another content, and by it another type, of one column."""
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.drop(["tokens"]), "column 'tokens' is missing"),
        (replaced("reward", pa.array(["1", "0"])), "column 'reward' is string, it must be double"),
        (replaced("tokens", pa.array([[1], [2]], pa.list_(pa.int64()))), "column 'tokens' is list<element: int64>"),
        (replaced("tokens", pa.array([[1, 2], None], pa.list_(pa.int32()))), "'tokens' has 1 empty values"),
        (
            replaced("logprobs", pa.array([[0.5] * 40, None], pa.list_(pa.float32()))),
            "row 0: logprobs does not have one",
        ),
        (
            replaced("experience_type", pa.array(["single_turn", "other"])),
            "has a value that this version does not know",
        ),
        (replaced("info", pa.array([None, "{"])), "row 1: info cannot be read .*Expecting property name"),
        (
            replaced("eid_batch", pa.array(["0", "x"])),
            "rows 0 to 1: a column holds a bad value .*invalid literal for int",
        ),
    ],
)
def test_a_wrong_shard_of_another_program_is_refused(change: Callable[[pa.Table], pa.Table], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        decode(foreign_shard(make_rows(1, 2), change), "shard")


def test_page_checksums_guard_a_shard_without_ours() -> None:
    rows = make_rows(20, 4)
    data = bytearray(foreign_shard(rows))
    tokens = np.concatenate([row.tokens for row in rows]).tobytes()
    data[data.index(tokens) + 100] ^= 1
    with pytest.raises(DataError, match=r"cannot be read: .*CRC checksum verification failed"):
        decode(bytes(data), "shard")


def test_what_is_no_shard_is_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(DataError, match=r"shard s3://b/x cannot be read: it is Parquet without 'trinity_flows.schema'"):
        decode(sink.getvalue(), "x", "s3://b/x")
    with pytest.raises(DataError, match="its 5 bytes do not begin and end as Parquet does"):
        decode(b"hello", "x")
    newer = pq.read_table(io.BytesIO(encode([]))).replace_schema_metadata({b"trinity_flows.schema": b"2"})
    sink = io.BytesIO()
    pq.write_table(newer, sink)
    with pytest.raises(DataError, match="its schema is version 2, this trinity-flows knows up to 1; upgrade"):
        decode(sink.getvalue(), "x")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_detected() -> None:
    data = encode(make_rows(num_groups=100, group_size=4, version=5))
    rng = np.random.default_rng(0)
    tail = range(len(data) - 24, len(data))
    for position in [*rng.integers(0, len(data), 400).tolist(), 0, 3, *tail, *range(4, 40)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(DataError, match="cannot be read"):
            decode(bytes(damaged), "shard")


def test_our_checksum_cannot_be_lost_by_a_flip() -> None:
    data = encode(make_rows(2, 2))
    mark = data.rindex(b"TFC1")
    for position in range(mark, mark + 8):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DataError, match=r"CRC-32|its checksum is missing or misplaced"):
            decode(bytes(damaged), "shard")
    with pytest.raises(DataError, match="cannot be read"):
        decode(data[:mark] + data[mark + 8 :], "shard")


def test_every_cut_is_detected() -> None:
    data = encode(make_rows(num_groups=20, group_size=4))
    for size in [*range(0, len(data), 37), len(data) - 1]:
        with pytest.raises(DataError, match="cannot be read"):
            decode(data[:size], "shard")
    with pytest.raises(DataError, match="cannot be read"):
        decode(data + data, "shard")


# -- the door ---------------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[[Experience], None]:
    def apply(row: Experience) -> None:
        for name, value in fields.items():
            setattr(row, name, value)

    return apply


def element(name: str, position: int, value: float) -> Callable[[Experience], None]:
    def apply(row: Experience) -> None:
        getattr(row, name)[position] = value

    return apply


def good_row(run: int) -> Experience:
    return Experience(
        tokens=np.arange(8, dtype=np.int32),
        prompt_length=3,
        logprobs=np.full(5, -0.5, np.float32),
        reward=1.0,
        eid=EID(4, 2, run, suffix="abc123"),
        teacher_logprobs=np.full(5, -0.5, np.float32),
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (changed(eid=EID("", 2, 1, suffix="abc123")), "it has no group: eid.batch and eid.task must be set"),
        (changed(reward=float("nan")), "reward is nan; it must be finite, or None for unscored"),
        (changed(reward=float("inf")), "reward is inf; it must be finite"),
        (element("logprobs", 3, np.nan), r"logprobs\[3\] is nan; it must be finite"),
        (element("teacher_logprobs", 0, -np.inf), r"teacher_logprobs\[0\] is -inf; it must be finite"),
        (element("tokens", 2, 100), r"tokens\[2\] is 100; the vocabulary has ids 0 to 99"),
        (element("tokens", 7, -1), r"tokens\[7\] is -1; the vocabulary has ids 0 to 99"),
        (changed(logprobs=np.zeros(4, np.float32)), "logprobs has 4 entries, the response has 5 tokens"),
        (changed(action_mask=np.ones(6, np.bool_)), "action_mask has 6 entries, the response has 5 tokens"),
        (changed(action_mask=None), "it has no action_mask, so that no token would train"),
        (changed(logprobs=np.zeros(5)), "logprobs is 1-dimensional float64; it must be 1-dimensional float32"),
        (changed(logprobs=np.zeros((5, 1), np.float32)), "logprobs is 2-dimensional float32"),
        (changed(tokens=np.zeros(0, np.int32)), "tokens are empty"),
        (changed(prompt_length=0), "prompt_length is 0; with 8 tokens it must be 1 to 8"),
        (changed(prompt_length=9), "prompt_length is 9; with 8 tokens it must be 1 to 8"),
        (changed(tokens=np.zeros(12, np.int32), prompt_length=9), "logprobs has 5 entries, the response has 3"),
        (changed(experience_type="turn"), "experience_type 'turn' with truncate_status None is not known"),
        (changed(experience_type="dpo"), "a dpo row needs the tokens of both chosen and rejected"),
    ],
)
def test_a_bad_row_is_refused_by_name(spoil: Callable[[Experience], None], reason: str) -> None:
    rows = [good_row(0), good_row(1), good_row(2)]
    validate(rows, LIMITS)
    spoil(rows[1])
    with pytest.raises(DataError, match=rf"row 1 of 3, experience 4?/2/1/0/abc123: {reason}"):
        validate(rows, LIMITS)


def test_limits_are_inclusive() -> None:
    def row(prompt: int, response: int) -> Experience:
        return Experience(tokens=np.zeros(prompt + response, np.int32), prompt_length=prompt, eid=EID(1, 1))

    validate([row(8, 8), row(6, 10)], LIMITS)
    for bad, reason in (
        (row(9, 1), "the prompt has 9 tokens, max_prompt_tokens is 8"),
        (row(1, 11), "the response has 11 tokens, max_response_tokens is 10"),
        (row(8, 9), "prompt and response have 17 tokens, max_model_len is 16"),
    ):
        validate([bad])
        with pytest.raises(DataError, match=reason):
            validate([bad], LIMITS)


def test_pairs_are_checked_too() -> None:
    def pair(chosen: list[int], rejected: list[int]) -> Experience:
        return Experience(tokens=[1, 2], chosen=chosen, rejected=rejected, eid=EID(1, 1))  # pyright: ignore[reportArgumentType]

    validate([pair([1], [2, 3])], LIMITS)
    for bad, reason in (
        (pair([1], [2, 100]), r"rejected\[1\] is 100"),
        (pair([], [2]), "needs the tokens of both"),
        (pair([1] * 11, [2]), "the response has 11 tokens"),
    ):
        with pytest.raises(DataError, match=reason):
            validate([bad], LIMITS)


def test_unscored_stays_unscored() -> None:
    rows = [good_row(0), good_row(1)]
    rows[0].reward = None
    validate(rows, LIMITS)
    assert [row.reward for row in decode(encode(rows), "shard").rows(0, 2)] == [None, 1.0]
