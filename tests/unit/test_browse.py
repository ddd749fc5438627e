"""What lies in a buffer is counted right, by hand; a copy is a shard again; what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.errors import ConfigError, DataError
from engines.experience import EID, Experience
from tests.unit.test_shards import assert_same_rows
from trinity_tasks.browse.export import NewFile, export, export_file
from trinity_tasks.browse.numbers import Bar, numbers_of, versions_of
from trinity_tasks.browse.report import look_at, open_scan, pick
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.cursor import BatchRef, PassedRows, Position, RowRange
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.schema import SCHEMA
from trinity_tasks.buffer.shards import decode, read_columns
from trinity_tasks.buffer.strategies import Claim
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage


def row(batch: int | str, task: int, run: int, length: int, reward: float | None, **fields: Any) -> Experience:
    given: dict[str, Any] = {
        "info": {"model_version": 0},
        "prompt_text": f"say {batch}",
        "response_text": "ok " * length,
    }
    return Experience(
        tokens=np.arange(2 + length, dtype=np.int32),
        prompt_length=2,
        eid=EID(batch, task, run, suffix="abc"),
        reward=reward,
        **(given | fields),
    )


def pair(task: int) -> Experience:
    ids = {"chosen": [1, 2, 3, 4], "rejected": [5]}
    return Experience(tokens=[1, 2, 3], eid=EID("pairs", task, suffix="p"), **ids)  # pyright: ignore[reportArgumentType]


A = [
    [row(0, 0, 0, 1, 0.0), row(0, 0, 1, 2, 1.0), row(0, 1, 0, 3, 0.5), row(0, 1, 1, 4, None)],
    [
        row(1, 0, 0, 5, 0.25, info={"model_version": 3, "is.expert": True, "tags": ["x"]}),
        row(1, 0, 1, 6, 1.0, info={"model_version": 3}, truncate_status="response_truncated", metrics={"hops": 2.0}),
    ],
]
"""Shards of writer a."""
B = [[row(0, 0, 0, 2, 0.75, info={"model_version": 8}), row(0, 0, 1, 2, 0.75, info={"is.expert": False})]]
"""The shard of writer b."""


@pytest.fixture
def job(tmp_path: Path) -> Storage:
    """A job whose main buffer has 8 rows in 3 shards, and another buffer a pair."""
    store = Storage(str(tmp_path / "job"))
    reads = {"trainer_input": {"experience_buffer": {"name": "main"}}}
    record = {
        "job_id": "j",
        "created_at": "",
        "config": {"buffer": reads},
        "config_fingerprint": "",
        "code_version": "",
    }
    store.write_json("job.json", record)  # pyright: ignore[reportArgumentType]
    for writer, shards in (("a", A), ("b", B)):
        for rows in shards:
            ExperienceWriter(store, "main", writer).write(rows)
    ExperienceWriter(store, "pairs", "a").write([pair(0)])
    return store


def uids_of(job: Storage, where: str, buffer: str | None = None) -> list[str]:
    return [uid for shard in open_scan(job.url, buffer, where) for uid in shard.frame(["uid"])["uid"].tolist()]


# -- counting ---------------------------------------------------------------------------------------------------------


def test_everything_is_counted(job: Storage) -> None:
    report = look_at(open_scan(job.url), 3)
    assert (report.buffer, report.buffers, report.where, report.damaged) == ("main", ("main", "pairs"), None, ())
    assert (report.num_shards, report.num_rows, report.num_groups) == (3, 8, 4)
    assert (report.num_unscored, report.num_truncated, report.num_unsampled) == (1, 1, 1)
    assert report.rows_by_writer == {"a": 6, "b": 2}
    assert report.rows_by_type == {"single_turn": 8}
    assert report.standing.model_dump() == {"trained": 0, "recorded": 0, "passed": 0, "waiting": 8}
    assert report.policy_versions is not None
    assert report.policy_versions.model_dump() == {"min": 0, "median": 0.0, "max": 8, "num_rows": {0: 4, 3: 2, 8: 1}}


def test_rewards_and_lengths_by_hand(job: Storage) -> None:
    """Rewards 0, 0.25, 0.5, 0.75, 0.75, 1, 1; lengths 1, 2, 2, 2, 3, 4, 5, 6."""
    report = look_at(open_scan(job.url), 0)
    assert report.reward is not None
    assert report.response_length is not None
    assert (report.reward.count, report.reward.min, report.reward.max) == (7, 0.0, 1.0)
    assert report.reward.mean == pytest.approx(4.25 / 7)
    squares = 0.0625 + 0.25 + 2 * 0.5625 + 2
    assert report.reward.std == pytest.approx((squares / 7 - (4.25 / 7) ** 2) ** 0.5)
    assert report.reward.quantiles == pytest.approx(
        {"0.05": 0.075, "0.25": 0.375, "0.5": 0.75, "0.75": 0.875, "0.95": 1.0}
    )
    assert [(bar.low, bar.high, bar.count) for bar in report.reward.bars] == [
        (0.0, 0.0, 1), (0.25, 0.25, 1), (0.5, 0.5, 1), (0.75, 0.75, 2), (1.0, 1.0, 2),
    ]  # fmt: skip
    assert (report.response_length.mean, report.response_length.quantiles["0.5"]) == (25 / 8, 2.5)
    assert [bar.count for bar in report.response_length.bars] == [1, 3, 1, 1, 1, 1]


def test_a_condition_filters_whatever_is_shown(job: Storage) -> None:
    report = look_at(open_scan(job.url, where="reward > 0.5 and response_length >= 2"), 9)
    assert (report.num_shards, report.num_rows, report.num_groups) == (3, 4, 3)
    assert (report.num_unscored, report.num_truncated, report.rows_by_writer) == (0, 1, {"a": 2, "b": 2})
    assert report.standing.waiting == 4
    assert [(sample.uid, sample.reward) for sample in report.samples] == [
        ("0/0/0/0/abc", 0.75), ("0/0/1/0/abc", 0.75), ("0/0/1/0/abc", 1.0), ("1/0/1/0/abc", 1.0),
    ]  # fmt: skip
    nothing = look_at(open_scan(job.url, where="reward > 5"), 9)
    assert (nothing.num_rows, nothing.num_groups, nothing.reward, nothing.response_length) == (0, 0, None, None)
    assert (nothing.samples, nothing.policy_versions) == ((), None)


@pytest.mark.parametrize(
    ("where", "uids"),
    [
        ("writer == 'b' and row == 1", ["0/0/1/0/abc"]),
        ("shard == 1", ["1/0/0/0/abc", "1/0/1/0/abc"]),
        ("batch == 1 and task == 0 and run == 1 and step == 0", ["1/0/1/0/abc"]),
        ("uid == '0/1/1/0/abc'", ["0/1/1/0/abc"]),
        ("reward is None", ["0/1/1/0/abc"]),
        ("model_version is None", ["0/0/1/0/abc"]),
        ("model_version == 8 and prompt_length == 2", ["0/0/0/0/abc"]),
        ("truncated", ["1/0/1/0/abc"]),
        ("type == 'dpo'", []),
        ("'say 1' in prompt and response == 'ok ok ok ok ok '", ["1/0/0/0/abc"]),
        ("info_is_expert == True", ["1/0/0/0/abc"]),
        ("info_is_expert is not None", ["1/0/0/0/abc", "0/0/1/0/abc"]),
        ("""info_tags == '["x"]'""", ["1/0/0/0/abc"]),
        ("metrics_hops > 1.5", ["1/0/1/0/abc"]),
    ],
)
def test_every_column_has_its_values(job: Storage, where: str, uids: list[str]) -> None:
    assert sorted(uids_of(job, where)) == sorted(uids)


def test_the_response_of_a_pair_is_its_longer_answer(job: Storage) -> None:
    report = look_at(open_scan(job.url, "pairs"), 1)
    assert (report.num_rows, report.rows_by_type, report.reward, report.num_unscored) == (1, {"dpo": 1}, None, 1)
    (sample,) = report.samples
    assert (sample.prompt_length, sample.response_length, sample.reward, sample.prompt) == (3, 4, None, None)
    assert uids_of(job, "batch == 'pairs' and response_length == 4", "pairs") == ["pairs/0/0/0/p"]


def test_a_key_that_no_row_has_is_refused_with_those_that_are_there(job: Storage) -> None:
    with pytest.raises(ConfigError, match=r"no column info_is_exprt; did you mean info_is_expert\?.* info_tags"):
        look_at(open_scan(job.url, where="info_is_exprt == True"), 1)


def test_how_far_the_trainer_has_come(job: Storage, tmp_path: Path) -> None:
    """The commit covers step 1, with a's first group and b's shard; step 2 has taken three more rows and passed one."""
    lease = Lease.acquire(job, ttl_s=60)
    (staged := tmp_path / "staged").mkdir()
    (staged / "weights").write_bytes(b"w")
    CheckpointStore(job, lease).commit(staged, step=1, num_experiences=4)
    first, second = (f"experiences/main/a-0000000{index}.parquet" for index in (0, 1))
    steps = (
        (
            RowRange(first, 0, 2),
            RowRange("experiences/main/b-00000000.parquet", 0, 2),
            RowRange("experiences/pairs/a-00000000.parquet", 0, 1),
        ),
        (RowRange(first, 2, 4), RowRange(second, 0, 1)),
    )
    passed = ((), (PassedRows(second, 1, 2, "stale"),))
    for step, (ranges, left) in enumerate(zip(steps, passed, strict=True), 1):
        claim = Claim(BatchRef(ranges, 5), Position(), left)
        Ledger(job).record(LedgerEntry.of(step, claim, A[0], before=Position(), attempt=1))
    lease.release()
    assert look_at(open_scan(job.url), 0).standing.model_dump() == {
        "trained": 4,
        "recorded": 3,
        "passed": 1,
        "waiting": 0,
    }
    half = look_at(open_scan(job.url, where="reward == 1"), 0)
    assert half.standing.model_dump() == {"trained": 1, "recorded": 0, "passed": 1, "waiting": 0}
    pairs = look_at(open_scan(job.url, "pairs"), 0)
    assert pairs.standing.model_dump() == {"trained": 1, "recorded": 0, "passed": 0, "waiting": 0}


def test_numbers_of_many_values_are_in_equal_bars() -> None:
    numbers = numbers_of(np.arange(24.0) / 2)
    assert numbers is not None
    assert len(numbers.bars) == 12
    assert {bar.count for bar in numbers.bars} == {2}
    assert (numbers.bars[0].low, numbers.bars[-1].high) == (0.0, 11.5)
    assert numbers_of(np.array([np.nan, np.inf])) is None
    finite = numbers_of(np.array([2.0, np.nan, 4.0]))
    assert finite is not None
    assert (finite.count, finite.mean, finite.std) == (2, 3.0, 1.0)
    assert finite.bars == (Bar(low=2.0, high=2.0, count=1), Bar(low=4.0, high=4.0, count=1))


@pytest.mark.parametrize(
    ("counts", "median"),
    [({4: 1}, 4.0), ({4: 1, 6: 1}, 5.0), ({6: 3, 1: 2}, 6.0), ({1: 2, 5: 2}, 3.0), ({9: 1, 1: 2}, 1.0)],
)
def test_the_median_version_is_that_of_the_rows(counts: dict[int, int], median: float) -> None:
    versions = versions_of(counts)
    assert versions is not None
    assert versions.median == median == float(np.median([v for v, count in counts.items() for _ in range(count)]))
    assert list(versions.num_rows) == sorted(counts)


def test_samples_go_from_the_lowest_to_the_highest_reward() -> None:
    rewards = np.array([0.5, 0.1, np.nan, 0.9, 0.7, 0.1, np.nan])
    assert pick(rewards, 3) == [1, 0, 3]
    assert pick(rewards, 2) == [1, 3]
    assert pick(rewards, 1) == [1]
    assert pick(rewards, 0) == []
    assert pick(rewards, 6) == [1, 5, 0, 4, 3, 2]
    assert pick(rewards, 99) == [1, 5, 0, 4, 3, 2, 6]
    assert pick(np.array([]), 5) == []


# -- what cannot be read ----------------------------------------------------------------------------------------------


def test_damaged_and_missing_shards_are_named_and_the_others_counted(job: Storage) -> None:
    ExperienceWriter(job, "main", "a").write(A[0])
    ExperienceWriter(job, "main", "a").write(A[0])
    job.remove("experiences/main/a-00000002.parquet")
    damaged = Path(job.url, "experiences/main/a-00000000.parquet")
    data = bytearray(damaged.read_bytes())
    data[60] ^= 1
    damaged.write_bytes(data)
    report = look_at(open_scan(job.url), 9)
    assert [shard.name for shard in report.damaged] == [
        "experiences/main/a-00000000.parquet",
        "experiences/main/a-00000002.parquet",
    ]
    assert "CRC-32" in report.damaged[0].reason
    assert "is missing, its writer has written later ones" in report.damaged[1].reason
    assert (report.num_shards, report.num_rows, len(report.samples)) == (4, 8, 8)


def test_a_buffer_that_is_not_there_is_refused_and_an_empty_one_is_empty(job: Storage) -> None:
    with pytest.raises(ConfigError, match=r"buffer 'mai' has no shards; did you mean main\?"):
        open_scan(job.url, "mai")
    with pytest.raises(ConfigError, match=r"buffer 'x' has no shards; those that have: main, pairs"):
        open_scan(job.url, "x")
    with pytest.raises(ConfigError, match=r"buffer name '\.\./main'"):
        open_scan(job.url, "../main")
    job.remove_tree("experiences")
    report = look_at(open_scan(job.url), 5)
    assert (report.num_shards, report.num_rows, report.buffers) == (0, 0, ())


def test_chosen_columns_are_checked_as_all_are(job: Storage) -> None:
    data = job.read_bytes("experiences/main/a-00000000.parquet")
    table = read_columns(data, ["reward", "chosen", "tokens"], "shard")
    assert table.column_names == ["reward", "chosen", "tokens"]
    assert table.schema.field("chosen").type == SCHEMA.field("chosen").type
    assert table.column("chosen").null_count == table.num_rows == 4
    assert table.column("reward").to_pylist() == [0.0, 1.0, 0.5, None]
    for position in range(4, len(data), 97):
        flipped = bytearray(data)
        flipped[position] ^= 4
        with pytest.raises(DataError, match="shard x cannot be read"):
            read_columns(bytes(flipped), ["reward"], "x")


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_parquet_copy_is_a_shard_again(job: Storage, tmp_path: Path) -> None:
    target = tmp_path / "new" / "good.parquet"
    scan = open_scan(job.url, where="reward != 0.5 and reward is not None")
    assert export(scan, export_file(str(target))) == 6
    shard = decode(target.read_bytes(), "copy")
    expected = [A[0][0], A[0][1], *B[0], *A[1]]
    assert_same_rows(shard.rows(0, 6), expected)
    assert [path.name for path in target.parent.iterdir()] == ["good.parquet"]
    whole = target.read_bytes()
    for position in range(0, len(whole), 101):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        with pytest.raises(DataError):
            decode(bytes(flipped), "flipped")


def test_a_copy_of_nothing_is_an_empty_shard(job: Storage, tmp_path: Path) -> None:
    for name in ("none.parquet", "none.jsonl"):
        assert export(open_scan(job.url, where="reward > 9"), export_file(str(tmp_path / name))) == 0
    assert decode((tmp_path / "none.parquet").read_bytes(), "copy").num_rows == 0
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_a_line_of_json_holds_the_row(job: Storage, tmp_path: Path) -> None:
    assert export(open_scan(job.url, where="shard == 1"), export_file(str(tmp_path / "rows.jsonl"))) == 2
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (first["uid"], first["writer"], first["shard"], first["row"]) == ("1/0/0/0/abc", "a", 1, 0)
    assert first["eid"] == {"batch": 1, "task": 0, "run": 0, "step": 0, "suffix": "abc"}
    assert first["tokens"] == [0, 1, 2, 3, 4, 5, 6]
    assert first["action_mask"] == [True] * 5
    assert first["info"] == {"model_version": 3, "is.expert": True, "tags": ["x"]}
    assert (first["reward"], first["logprobs"], second["metrics"]) == (0.25, None, {"hops": 2.0})


def test_a_number_that_json_has_not_leaves_no_file(job: Storage, tmp_path: Path) -> None:
    bad = row(5, 0, 0, 1, 1.0)
    bad.logprobs = np.array([np.nan], np.float32)
    job.create("experiences/main/other-00000000.parquet", encode([bad]))
    with pytest.raises(DataError, match="row 0, experience 5/0/0/0/abc: it holds NaN or infinity"):
        export(open_scan(job.url), export_file(str(tmp_path / "rows.jsonl")))
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
    assert export(open_scan(job.url), export_file(str(tmp_path / "rows.parquet"))) == 9


def test_nothing_is_overwritten(job: Storage, tmp_path: Path) -> None:
    target = tmp_path / "rows.parquet"
    file = export_file(str(target))
    target.write_bytes(b"mine")  # since we looked
    with pytest.raises(ConfigError, match=r"rows\.parquet exists, and nothing is overwritten"):
        export(open_scan(job.url), file)
    assert target.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "rows.parquet"]
    for name, words in (("job", "exists"), ("rows.csv", "an export is .parquet or .jsonl"), ("", "names no file")):
        with pytest.raises(ConfigError, match=words):
            export_file(f"{tmp_path}/{name}")
    with pytest.raises(ConfigError, match="names no file"):
        NewFile("s3://rows.parquet")


def test_a_copy_goes_to_any_store(job: Storage, store_url: str) -> None:
    file = export_file(f"{store_url}/copies/rows.jsonl")
    assert export(open_scan(job.url), file) == 8
    assert len(Storage(store_url).read_bytes("copies/rows.jsonl").splitlines()) == 8
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export_file(f"{store_url}/copies/rows.jsonl")
