"""Trinity-RFT's side of writing and reading experiences: SQLite, a row of columns to search by and a blob for each.

A blob is a pickle of the plain fields and the tensors as safetensors, as in 0.6.0. Written in one transaction for 1,024
rows; read 512 at a time, those that were consumed least first, and counted as consumed. In its favour: statements are
plain, where Trinity-RFT builds them with SQLAlchemy, and no file is waited for (it keeps SQLite's default, which does).
"""

from __future__ import annotations

import json
import pickle
import sqlite3
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from engines.experience import Experience
from tests import trinity_database as trinity
from tests.benchmarks.buffer_rows import BATCH_ROWS, SHARD_ROWS, make_rows
from tests.benchmarks.pairs import Commands

PICKLED_FIELDS = ("prompt_length", "reward", "info", "metrics")
SCHEMA = """
CREATE TABLE exps (id INTEGER PRIMARY KEY, timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, task_id VARCHAR(64),
    run_id INTEGER, msg_id VARCHAR(64), model_version INTEGER, reward FLOAT, consumed INTEGER DEFAULT 0);
CREATE TABLE exps_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB NOT NULL);
CREATE INDEX exps_consumed ON exps (consumed);
"""
INSERT = "INSERT INTO exps (id, task_id, run_id, msg_id, model_version, reward) VALUES (?, ?, ?, ?, ?, ?)"
NEXT = """SELECT id, experience_bytes FROM exps JOIN exps_blob USING (id) WHERE id IN
    (SELECT id FROM exps WHERE consumed = 0 ORDER BY id LIMIT ?) ORDER BY id"""
CONSUME = "UPDATE exps SET consumed = consumed + 1 WHERE id BETWEEN ? AND ?"


def main() -> None:
    """Serve steps of argv[1], JSON: action ("write" or "read"), file, num_shards (of 1,024 rows)."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rows = [[_theirs(row) for row in make_rows(SHARD_ROWS, index)] for index in range(spec["num_shards"])]
    {"write": _serve_writes, "read": _serve_reads}[spec["action"]](Path(spec["file"]), rows, Commands())


def _serve_writes(file: Path, rows: list[list[trinity.Experience]], commands: Commands) -> None:
    commands.ready()
    while commands.wait():
        with closing(_create(file)) as database:
            commands.begin()
            _write(database, rows)
            commands.end()
        commands.report(rows=sum(map(len, rows)), bytes=file.stat().st_size)
        file.unlink()


def _serve_reads(file: Path, rows: list[list[trinity.Experience]], commands: Commands) -> None:
    with closing(_create(file)) as database:
        _write(database, rows)
        rows.clear()
        commands.ready()
        while commands.wait():
            commands.begin()
            num_rows, num_tokens = _read_all(database)
            commands.end()
            commands.report(rows=num_rows, tokens=num_tokens)
            with database:
                database.execute("UPDATE exps SET consumed = 0")


def _create(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file)
    database.executescript(SCHEMA)
    database.execute("PRAGMA synchronous = OFF")
    return database


def _write(database: sqlite3.Connection, shards: list[list[trinity.Experience]]) -> None:
    first = 1
    for rows in shards:
        with database:
            database.executemany(INSERT, [(index, *trinity.about(row)) for index, row in enumerate(rows, first)])
            blobs = [(index, trinity.blob(row)) for index, row in enumerate(rows, first)]
            database.executemany("INSERT INTO exps_blob VALUES (?, ?)", blobs)
        first += len(rows)


def _read_all(database: sqlite3.Connection) -> tuple[int, int]:
    """(rows, tokens)."""
    num_rows = num_tokens = 0
    while found := database.execute(NEXT, (BATCH_ROWS,)).fetchall():
        with database:
            database.execute(CONSUME, (found[0][0], found[-1][0]))
        rows = [_from_blob(blob) for _, blob in found]
        num_rows += len(rows)
        num_tokens += sum(len(row.tokens) for row in rows)
    return num_rows, num_tokens


def _from_blob(blob: bytes) -> trinity.Experience:
    num_pickled, _ = struct.unpack_from("<QQ", blob, 5)
    fields: dict[str, Any] = pickle.loads(memoryview(blob)[21 : 21 + num_pickled])["items"][0]
    fields |= {name.removeprefix("0:"): tensor for name, tensor in load(blob[21 + num_pickled :]).items()}
    del fields["multi_modal_input_keys"]
    fields["eid"] = trinity.EID(**fields["eid"])
    return trinity.Experience(**fields)


def _theirs(row: Experience) -> trinity.Experience:
    fields: dict[str, Any] = {name: getattr(row, name) for name in PICKLED_FIELDS}
    fields |= {name: torch.from_numpy(getattr(row, name)) for name in ("tokens", "logprobs", "action_mask")}
    eid = trinity.EID(row.eid.batch, row.eid.task, row.eid.run, row.eid.step, row.eid.suffix)
    return trinity.Experience(eid, **fields)


if __name__ == "__main__":
    main()
