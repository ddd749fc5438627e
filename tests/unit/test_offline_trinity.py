"""Trinity-RFT's experience databases become the same rows, whole groups together, or are refused by row."""

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.experience import Experience
from engines.text import build_tokenizer
from tests.experience_rows import FifoReader
from tests.trinity_database import EID, blob, old_blob, sampled, write_database, write_old_database
from tests.trinity_database import Experience as Theirs
from trinity_tasks.buffer.cursor import Cursor
from trinity_tasks.buffer.row_checks import DTYPES, RowLimits
from trinity_tasks.offline import trinity_db
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.offline.importer import Imported, import_experiences
from trinity_tasks.storage import Storage

TOKENIZER = build_tokenizer(TokenizerConfig(kind="char"))
Blob = Callable[[Theirs], bytes]


def run_import(store: Storage, path: Path | str, limits: RowLimits | None = None, **config: Any) -> Imported:
    options = {"rows_per_shard": 4, **config}
    return import_experiences(store, "main", OfflineConfig(path=str(path), **options), TOKENIZER, limits or RowLimits())


def rows_in(store: Storage) -> list[Experience]:
    reader, rows = FifoReader(store), []
    claimed = reader.claim(Cursor.start(), 10**6, partial=True)
    if claimed:
        rows = reader.read(claimed[0])
    return rows


def imported(tmp_path: Path, path: Path | str, **config: Any) -> list[Experience]:
    store = Storage(str(tmp_path / "job"))
    run_import(store, path, **config)
    return rows_in(store)


@pytest.mark.parametrize("make", [blob, old_blob], ids=["TRXP", "object"])
def test_every_field_comes_back_bit_for_bit(make: Blob, tmp_path: Path) -> None:
    theirs = sampled(
        4,
        "t9",
        1,
        token_level_reward=torch.tensor([0.1, 0.0, 1e-30]),
        advantages=torch.tensor([0.25, -0.5, 3.0]),
        returns=torch.tensor([1.0, 2.0, 3.0]),
        teacher_logprobs=torch.tensor([-0.7, -1.0, -2.0]),
        truncate_status="response_truncated",
        prompt_text="p",
        tools=[{"name": "f"}],
    )
    (row,) = imported(tmp_path, write_old_database(tmp_path / "a.db", [make(theirs)]))
    for name in DTYPES:
        value, expected = getattr(row, name), getattr(theirs, name)
        assert (value is None) == (expected is None), name
        if value is not None:
            assert value.tobytes() == expected.numpy().tobytes(), name
    for name in ("prompt_length", "reward", "truncate_status", "info", "metrics", "response_text", "prompt_text"):
        assert getattr(row, name) == getattr(theirs, name), name
    assert (row.messages, row.tools) == (theirs.messages, theirs.tools)
    assert vars(theirs.eid) == {name: getattr(row.eid, name) for name in vars(theirs.eid)}


@pytest.mark.parametrize("make", [blob, old_blob], ids=["TRXP", "object"])
def test_pairs_come_back_as_pairs(make: Blob, tmp_path: Path) -> None:
    theirs = Theirs(
        tokens=torch.tensor([1, 2], dtype=torch.int32),
        prompt_length=2,
        chosen=torch.tensor([3, 4]),
        rejected=torch.tensor([5], dtype=torch.int32),
        experience_type="dpo",
    )
    one, two = imported(tmp_path, write_old_database(tmp_path / "a.db", [make(theirs), make(theirs)]))
    assert (one.experience_type, one.prompt_length, one.tokens.tolist()) == ("dpo", 2, [1, 2])
    assert one.chosen is not None
    assert one.rejected is not None
    assert (one.chosen.tolist(), one.rejected.tolist()) == ([3, 4], [5])
    assert (one.eid.tid, two.eid.tid) == ("import/1", "import/2")


def test_groups_are_put_together_and_never_cut(tmp_path: Path) -> None:
    order = [(1, "a"), (1, "b"), (1, "a"), (2, "a"), (1, "b"), (1, "a"), (2, "a"), (1, "a"), (1, "a"), (3, 0)]
    theirs = [sampled(batch, task, run) for run, (batch, task) in enumerate(order)]
    store = Storage(str(tmp_path / "job"))
    done = run_import(store, write_database(tmp_path / "a.db", theirs), rows_per_shard=4)
    assert (done.num_rows, done.num_dropped, done.num_shards) == (10, 0, 3)
    rows = rows_in(store)
    assert [row.eid.tid for row in rows] == ["1/a"] * 5 + ["1/b"] * 2 + ["2/a"] * 2 + ["3/0"]
    assert [row.eid.run for row in rows] == [0, 2, 5, 7, 8, 1, 4, 3, 6, 9]
    assert (rows[0].eid.batch, rows[9].eid.task) == (1, 0)


def test_a_killed_import_of_groups_goes_on(tmp_path: Path) -> None:
    path = write_database(tmp_path / "a.db", [sampled(1, run // 3, run) for run in range(12)])
    whole, cut = Storage(str(tmp_path / "whole")), Storage(str(tmp_path / "cut"))
    assert run_import(whole, path) == run_import(cut, f"sqlite:///{path}", format="auto")
    shards = {info.name: whole.read_bytes(info.name) for info in whole.list("experiences/main")}
    for name in ("import.end", "import.done.json", "import-00000001.parquet"):
        cut.remove(f"experiences/main/{name}")
    assert run_import(cut, path).num_shards == 2
    assert {info.name: cut.read_bytes(info.name) for info in cut.list("experiences/main")} == shards


def test_a_group_with_a_row_that_is_too_long_is_dropped_whole(tmp_path: Path) -> None:
    long: dict[str, Any] = {
        "tokens": torch.arange(9),
        "logprobs": torch.zeros(7),
        "action_mask": torch.ones(7, dtype=torch.bool),
    }
    theirs = [sampled(1, "a", 0), sampled(1, "a", 1, **long), sampled(1, "b", 2)]
    path, limits = write_database(tmp_path / "a.db", theirs), RowLimits(max_model_len=8)
    with pytest.raises(DataError, match=r"a\.db table exps_blob id 2: .* 9 tokens, .*drops the whole group"):
        run_import(Storage(str(tmp_path / "one")), path, limits)
    store = Storage(str(tmp_path / "two"))
    done = run_import(store, path, limits, too_long="drop")
    assert (done.num_rows, done.num_dropped) == (1, 2)
    assert [row.eid.tid for row in rows_in(store)] == ["1/b"]
    with pytest.raises(ValueError, match="truncate would change experiences"):
        OfflineConfig(path="a.db", format="trinity", too_long="truncate")


def test_numbers_of_numpy_and_torch_are_plain_ones(tmp_path: Path) -> None:
    theirs = [sampled(1, "a", 1, reward=np.float32(0.1), info={"x": np.int64(3)}, metrics={"m": torch.tensor(0.5)})]
    (row,) = imported(tmp_path, write_old_database(tmp_path / "a.db", [blob(each) for each in theirs]))
    assert (row.reward, row.info, row.metrics) == (float(np.float32(0.1)), {"x": 3}, {"m": 0.5})


@pytest.mark.parametrize("make", [blob, old_blob], ids=["TRXP", "object"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routed_experts": torch.zeros(2, 1, 1, dtype=torch.uint8)}, "routed_experts"),
        ({"custom_fields": [{"source_field": "a"}]}, "it has custom_fields, which rows here cannot hold"),
        ({"logprobs": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}, r"logprobs\[0\] is 0\.1; as float32"),
        ({"tokens": torch.tensor([1, 2, 3, 4, 2**40])}, r"tokens\[4\] is 1099511627776; as int32"),
        ({"tokens": None}, "it has no tokens"),
        ({"logprobs": torch.tensor([0.1])}, "logprobs has 1 entries, the response has 3 tokens"),
        ({"logprobs": torch.tensor([0.1, float("nan"), 0.0])}, r"logprobs\[1\] is nan; it must be finite"),
        ({"eid": EID(1, "", 0, 0, "a")}, "eid.batch and eid.task must be set"),
        ({"eid": EID(1, 2.5, 0, 0, "a")}, r"eid\.task is 2\.5; it must be int or str"),  # type: ignore[arg-type]
        ({"reward": "good"}, "reward is a str; it must be a number"),
        ({"info": {"a": (1, 2)}}, "info: a tuple is no JSON"),
        ({"info": {1: 2}}, "a key of the pickle is a int"),
        ({"metrics": {"a": "b"}}, "metrics is a dict that no experience has there"),
        ({"truncate_status": "odd"}, "truncate_status 'odd' is not known"),
        ({"prompt_length": 2.0}, "prompt_length is a float"),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_by_row(
    make: Blob, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_old_database(tmp_path / "a.db", [make(sampled(1, 1, 0)), make(sampled(1, 2, 0, **fields))])
    with pytest.raises(DataError, match=rf"^a\.db table exps id 2: .*{message}"):
        imported(tmp_path, path)


class Asks:
    """Its pickle asks for a call."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("make", [blob, old_blob], ids=["TRXP", "object"])
def test_code_in_a_blob_is_refused_by_row_and_does_not_run(make: Blob, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    hostile = make(sampled(1, 1, 0, info={"a": Asks(f"touch {canary}")}))
    path = write_old_database(tmp_path / "a.db", [make(sampled(1, 1, 1)), hostile])
    with pytest.raises(
        DataError, match=r"a\.db table exps id 2: the pickle names posix\.system.*Nothing of it was exec"
    ):
        imported(tmp_path, path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (blob(sampled(1, 1, 0))[:-3], "bytes are not those that its header tells of"),
        (b"TRXP\x02" + blob(sampled(1, 1, 0))[5:], "version 2, known is 1"),
        (b"TRXP", "its header"),
        (b"", "its blob has 0 bytes"),
        (old_blob(sampled(1, 1, 0)) + b"x", "1 bytes follow its pickle"),
        (old_blob(sampled(1, 1, 0), 1), r"copy_?reg\._reconstructor"),
        (pickle.dumps([1]), "not of one experience"),
        (b"no pickle", "Nothing of it was executed"),
    ],
)
def test_a_damaged_blob_is_refused_by_row(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^a\.db table exps id 1: .*{message}"):
        imported(tmp_path, write_old_database(tmp_path / "a.db", [data]))


@pytest.mark.parametrize(
    ("column", "value"), [("reward", 0.75), ("task_id", "z"), ("run_id", 9), ("msg_id", "z"), ("model_version", 8)]
)
def test_a_column_that_differs_from_its_blob_is_refused(column: str, value: Any, tmp_path: Path) -> None:
    path = write_database(tmp_path / "a.db", [sampled(1, 1, 0), sampled(1, 1, 1)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE exps SET {column} = ? WHERE id = 2", (value,))
    with pytest.raises(
        DataError, match=rf"exps_blob id 2: column {column} of table exps is .*{value}.*, the experience"
    ):
        imported(tmp_path, path)


@pytest.mark.parametrize(("lost", "message"), [("exps_blob", "id 2 has no experience"), ("exps", "no row of that id")])
def test_half_a_row_is_refused(lost: str, message: str, tmp_path: Path) -> None:
    path = write_database(tmp_path / "a.db", [sampled(1, 1, 0), sampled(1, 1, 1)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"DELETE FROM {lost} WHERE id = 2")
    with pytest.raises(DataError, match=message):
        imported(tmp_path, path)


def test_the_table_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = write_database(tmp_path / "a.db", [sampled(1, 1, 0)])
    write_database(path, [sampled(1, 1, 0), sampled(1, 1, 1)], table="others")
    with pytest.raises(ConfigError, match=r"tables of experiences are exps, others; set table"):
        imported(tmp_path, path)
    assert len(imported(tmp_path / "new", path, table="others")) == 2
    with pytest.raises(ConfigError, match=r"set table to one of them \(it is third\)"):
        run_import(Storage(str(tmp_path / "third")), path, table="third")


def test_rows_that_are_not_in_the_database_yet_are_not_left_out(tmp_path: Path) -> None:
    path = write_database(tmp_path / "a.db", [sampled(1, 1, 0)])
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("UPDATE exps SET consumed = 1")
        database.commit()
        with pytest.raises(DataError, match=r"a\.db-wal holds rows .*wal_checkpoint"):
            imported(tmp_path, path)


def test_what_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    with pytest.raises(DataError, match=r"a\.db cannot be read as a database"):
        imported(tmp_path, tmp_path / "a.db")
    write_database(tmp_path / "b.db", [])
    with pytest.raises(ConfigError, match="holds no records"):
        run_import(Storage(str(tmp_path / "b")), tmp_path / "b.db")
    with pytest.raises(DataError, match=r"b\.db is sqlite; format: jsonl reads jsonl"):
        run_import(Storage(str(tmp_path / "c")), tmp_path / "b.db", format="jsonl")


def test_a_blob_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trinity_db, "MAX_BLOB_BYTES", 100)
    with pytest.raises(DataError, match=r"id 1: its blob has \d+ bytes; it must have 1 to 100"):
        imported(tmp_path, write_database(tmp_path / "a.db", [sampled(1, 1, 0)]))


# -- lines of JSON ----------------------------------------------------------------------------------------------------


def line(run: int, task: int = 1, **fields: Any) -> dict[str, Any]:
    eid = {"batch": 1, "task": task, "run": run, "step": 0, "suffix": f"{run:06x}"}
    whole = {
        "eid": eid,
        "type": "multi_turn",
        "tokens": [1, 2, 3 + run],
        "prompt_length": 1,
        "action_mask": [True, False],
    }
    return {
        **whole,
        "response_length": 2,
        "logprobs": [-0.5, -0.25],
        "reward": 1.0,
        "info": {},
        "metrics": {},
        **fields,
    }


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n\n" for each in lines))
    return path


def test_lines_with_tokens_are_imported_by_group(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", line(0), line(1, 2), line(2))
    rows = imported(tmp_path, path, format="trinity")
    assert [(row.eid.tid, row.tokens.tolist()) for row in rows] == [
        ("1/1", [1, 2, 3]),
        ("1/1", [1, 2, 5]),
        ("1/2", [1, 2, 4]),
    ]
    assert rows[0].logprobs is not None
    assert rows[0].action_mask is not None
    assert (rows[0].logprobs.tolist(), rows[0].action_mask.tolist()) == ([-0.5, -0.25], [True, False])
    assert (rows[0].experience_type, rows[0].reward) == ("multi_turn", 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": None}, "there are no tokens: .* import the lines with format: jsonl"),
        ({"logprobs": [-0.1, -0.25]}, r"logprobs\[0\] is -0\.1; as float32 it would be another number"),
        ({"logprobs": [0, -0.1]}, r"logprobs\[1\] is -0\.1"),
        ({"tokens": [1, 2, 0.5]}, r"tokens\[2\] is 0\.5; as int32"),
        ({"tokens": [1, 2, "3"]}, "tokens is not a list of numbers"),
        ({"tokens": {"a": 1}}, "tokens is not a list of numbers"),
        ({"tokens": [1, 2, 2**70]}, "tokens has a number that no array has"),
        ({"eid": None}, "it has no eid"),
        ({"eid": {"batch": 1, "task": 1}}, r"eid\.suffix is missing"),
        ({"eid": {"batch": 1, "task": 1, "suffix": "a", "other": 1}}, r"eid\.other is 1"),
        ({"info": [1]}, "info is a list that no experience has there"),
        ({"type": ["dpo"]}, "experience_type is a list"),
        ({"multi_modal_inputs": {"pixels": [1]}}, "it has multi_modal_inputs"),
    ],
)
def test_lines_that_cannot_be_kept_exactly_are_refused_by_line(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", line(0), line(1, **fields))
    with pytest.raises(DataError, match=rf"^a\.jsonl line 3: .*{message}"):
        imported(tmp_path, path, format="trinity")
