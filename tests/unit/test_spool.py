"""`Spool`: first in, first out, across memory, disk and processes."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import DataError
from trinity_tasks.spool import Point, Spool


def point(step: int, num_values: int = 1, stream: str = "train") -> Point:
    return Point(stream, step, 1000 + step, {f"m{index}": float(step) for index in range(num_values)}, ("bad",))


def steps(points: list[Point]) -> list[int]:
    return [each.step for each in points]


def drain(spool: Spool, max_metrics: int = 50) -> list[int]:
    found: list[int] = []
    spool.balance()
    while head := spool.head(max_metrics):
        found += steps(head)
        spool.acknowledge(len(head))
        spool.balance()
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["append", "balance", "acknowledge"]), max_size=60), st.integers(1, 40))
def test_order_is_kept_whatever_is_on_disk(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str], limit: int
) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool") / "s", max_metrics=limit)
    appended = 0
    acknowledged: list[int] = []
    for call in calls:
        if call == "append":
            appended += 1
            spool.append(point(appended))
        elif call == "balance":
            spool.balance()
        elif head := spool.head(7):
            acknowledged += steps(head)
            spool.acknowledge(len(head))
        assert acknowledged + steps(spool.snapshot()) == list(range(1, appended + 1))
        assert spool.num_metrics == 3 * (appended - len(acknowledged))
    assert acknowledged + drain(spool) == list(range(1, appended + 1))
    assert spool.num_metrics == spool.num_overflow_metrics == 0
    spool.remove_if_empty()
    assert not spool.folder.exists()


def test_memory_is_bounded_and_the_disk_is_read_in_pieces(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_metrics=30)
    for step in range(1, 101):
        spool.append(point(step))
        spool.balance()
    assert len(spool._memory) == 10
    assert spool.num_overflow_metrics == 3 * 90
    assert drain(spool) == list(range(1, 101))


def test_what_a_killed_process_left_comes_first_and_once(tmp_path: Path) -> None:
    killed = Spool(tmp_path / "spool", max_metrics=9)
    for step in range(3, 21):
        killed.append(point(step))
    killed.balance()
    with (tmp_path / "spool/overflow.jsonl").open("a") as file:
        file.write('{"stream": "train", "st')  # cut by the kill
    resumed = Spool(tmp_path / "spool", pending=[point(step) for step in range(3, 8)])
    resumed.append(point(21))
    assert drain(resumed) == [*range(3, 8), *range(8, 22)]
    assert not list((tmp_path / "spool").glob("*.jsonl"))


def test_persisted_points_survive_until_they_are_acknowledged(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool")
    for step in (1, 2, 3):
        first.append(point(step))
    first.persist()
    assert steps(Spool(tmp_path / "spool").snapshot()) == [1, 2, 3]  # this one is killed
    third = Spool(tmp_path / "spool")
    assert drain(third) == [1, 2, 3]
    assert Spool(tmp_path / "spool").snapshot() == []


def test_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path / "spool", max_metrics=6)
    for step in range(1, 5):
        spool.append(point(step))
    spool.balance()
    before = (tmp_path / "spool/overflow.jsonl").read_bytes()
    spool.append(point(5))
    real = json.dumps

    def full(value: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trinity_tasks.spool.json.dumps", full)
    with pytest.raises(OSError, match="No space left"):
        spool.balance()
    assert (tmp_path / "spool/overflow.jsonl").read_bytes() == before
    monkeypatch.setattr("trinity_tasks.spool.json.dumps", real)
    assert drain(spool) == [1, 2, 3, 4, 5]


def test_large_point_is_split_into_streams_that_fit() -> None:
    whole = point(1, num_values=10)
    parts = whole.split(5)
    assert [part.stream for part in parts] == ["train", "train.1", "train.2"]
    assert all(part.num_metrics <= 5 for part in parts)
    assert {key: value for part in parts for key, value in part.values.items()} == whole.values
    assert [name for part in parts for name in part.nonfinite] == ["bad"]
    assert whole.split(12) == [whole]


def test_point_survives_json_and_refuses_nonsense(tmp_path: Path) -> None:
    assert Point.from_json(json.loads(json.dumps(point(3).to_json()))) == point(3)
    with pytest.raises(DataError, match="is not a point"):
        Point.from_json({"stream": "train"})
    (tmp_path / "unsent.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match="cannot be read, delete the folder"):
        Spool(tmp_path)


def test_staged_files_survive_the_process_in_order(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool")
    first.stage_bytes(b"1", "a/one.txt")
    first.stage_bytes(b"2", "two.json", label="table")
    second = Spool(tmp_path / "spool")
    second.stage_bytes(b"3", "three.txt")
    assert [path.name for path in second.artifacts()] == ["00000001-file", "00000002-table", "00000003-file"]
    assert (second.artifacts()[0] / "a/one.txt").read_bytes() == b"1"
