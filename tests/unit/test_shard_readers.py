"""A shard is plain Parquet: pandas, DuckDB and `datasets` read it, and what they or others write can be read back."""

from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engines.experience import Experience
from tests.experience_rows import FifoReader, make_rows, uids
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.cursor import Cursor
from trinity_tasks.storage import Storage


@pytest.fixture
def rows() -> list[Experience]:
    return make_rows(300, 2, version=7)  # more than one row group


@pytest.fixture
def shard(tmp_path: Path, rows: list[Experience]) -> Path:
    record = ExperienceWriter(str(tmp_path / "job"), writer="agent").write(rows)
    return tmp_path / "job" / record.name


def test_pandas(shard: Path, rows: list[Experience]) -> None:
    frame = pd.read_parquet(shard)
    assert len(frame) == 600
    assert frame["reward"].tolist() == [row.reward for row in rows]
    assert frame["model_version"].tolist() == [7] * 600
    assert all(np.array_equal(a, b.tokens) for a, b in zip(frame["tokens"], rows, strict=True))
    assert (frame["eid_task"] == [str(row.eid.task) for row in rows]).all()


def test_duckdb(shard: Path, rows: list[Experience]) -> None:
    """A query over all shards of a buffer, as the README shows it."""
    relation = duckdb.sql(
        f"SELECT count(*), avg(reward), sum(len(tokens) - prompt_length) FROM '{shard.parent}/*.parquet'"
    )
    assert relation is not None
    rewards = [row.reward or 0.0 for row in rows]
    assert relation.fetchall() == [(600, pytest.approx(np.mean(rewards)), sum(row.response_length for row in rows))]


def test_datasets(shard: Path, rows: list[Experience], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import datasets  # only now: it reads HF_HOME when it is imported

    found = datasets.Dataset.from_parquet(str(shard), cache_dir=str(tmp_path / "cache"))
    assert found.num_rows == 600
    assert found[599]["tokens"] == rows[599].tokens.tolist()
    assert found[0]["reward"] == rows[0].reward


def test_a_shard_by_another_program_trains(tmp_path: Path) -> None:
    """What the README tells a producer in another language: these columns, this metadata, this name."""
    table = pa.table(
        {
            "eid_batch": pa.array(["7", "7"]),
            "eid_batch_is_int": pa.array([True, True]),
            "eid_task": pa.array(["0", "0"]),
            "eid_task_is_int": pa.array([True, True]),
            "eid_run": pa.array([0, 1], pa.int64()),
            "eid_step": pa.array([0, 0], pa.int64()),
            "eid_suffix": pa.array(["aaaaaa", "bbbbbb"]),
            "experience_type": pa.array(["single_turn", "single_turn"]),
            "prompt_length": pa.array([2, 2], pa.int32()),
            "reward": pa.array([1.0, 0.0]),
            "model_version": pa.array([3, 3], pa.int64()),
            "tokens": pa.array([[5, 6, 7], [5, 6, 8, 9]], pa.list_(pa.field("element", pa.int32()))),
            "logprobs": pa.array([[-0.5], [-0.25, -1.0]], pa.list_(pa.field("element", pa.float32()))),
        }
    )
    store = Storage(str(tmp_path / "job"))
    folder = tmp_path / "job" / "experiences" / "main"
    folder.mkdir(parents=True)
    metadata = {"trinity_flows.schema": "1"}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "rust-agent-00000000.parquet")
    reader = FifoReader(store)
    claimed = reader.claim(Cursor.start(), 2)
    assert claimed is not None
    first, second = reader.read(claimed[0])
    assert uids([first, second]) == ["7/0/0/0/aaaaaa", "7/0/1/0/bbbbbb"]
    assert (first.reward, first.model_version, second.tokens.tolist()) == (1.0, 3, [5, 6, 8, 9])
    assert second.logprobs is not None
    assert second.logprobs.tolist() == [-0.25, -1.0]
    assert second.action_mask is not None
    assert second.action_mask.tolist() == [True, True]
