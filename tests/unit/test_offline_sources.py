"""Files of a path and the records in them: order, splits, layouts, places in messages, damage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engines.errors import ConfigError, DataError
from trinity_tasks.offline import sources
from trinity_tasks.offline.config import Format
from trinity_tasks.offline.files import DataFiles, NoData, content_sha256
from trinity_tasks.offline.sources import Record, read_records
from trinity_tasks.storage import Storage

Rows = Sequence[dict[str, Any]]


def records(path: Path | str, format: Format = "auto", split: str = "train") -> list[Record]:
    with DataFiles(str(path), format, split) as files:
        return list(read_records(files))


def numbers(path: Path | str, format: Format = "auto", split: str = "train") -> list[int]:
    return [record.content["n"] for record in records(path, format, split)]


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows, row_group_size: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)


def write_arrow(path: Path, rows: Rows, batch_rows: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch_rows)


def save_dataset(folder: Path, parts: Sequence[Rows]) -> None:
    """The layout of `Dataset.save_to_disk`."""
    names = [f"data-{index:05d}-of-{len(parts):05d}.arrow" for index in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        write_arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def n(*values: int) -> list[dict[str, int]]:
    return [{"n": value} for value in values]


def test_jsonl_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n  \r\n{"n": 2, "t": "a\\u2028b"}\r\n{"n": 3}')
    found = records(path)
    assert [record.where for record in found] == ["chats.jsonl line 1", "chats.jsonl line 4", "chats.jsonl line 5"]
    assert [record.content["n"] for record in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"n": 1', "line 2 is not JSON"),
        (b'{"n": "\xff"}', "line 2 is not JSON: .*utf-8"),
        (b"[1]", "line 2 is a JSON list, not an object"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"chats\.jsonl {message}"):
        records(path)


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "' + b"a" * 200 + b'"}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl line 2 is longer than 100 bytes"):
        records(path)


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_rows_of_column_files_keep_their_number_over_groups(tmp_path: Path, write: Any) -> None:
    path = tmp_path / f"part.{'parquet' if write is write_parquet else 'arrow'}"
    write(path, n(*range(600)))
    found = records(path)
    assert [record.content["n"] for record in found] == list(range(600))
    assert found[257].where == f"{path.name} row 257"


def test_random_access_arrow_files_are_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(n(1, 2, 3))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as opened:
        opened.write_table(table, max_chunksize=2)
    assert numbers(tmp_path / "a.arrow") == [1, 2, 3]


def test_a_null_within_a_structure_is_an_absent_key(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}]
    write_parquet(tmp_path / "a.parquet", [{"messages": talk, "tools": None}])
    assert records(tmp_path / "a.parquet")[0].content == {"messages": talk, "tools": None}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_column_file_is_named(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_arrow
    write(tmp_path / name, n(*range(100)))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read: .*cut or damaged"):
        records(tmp_path / name)


def test_a_folder_is_its_data_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", n(3))
    write_jsonl(tmp_path / "a.jsonl", n(1, 2))
    write_jsonl(tmp_path / "deep" / "a.jsonl", n(4))
    write_jsonl(tmp_path / ".cache" / "x.jsonl", n(9))
    (tmp_path / "README.md").write_text("about")
    assert numbers(tmp_path) == [1, 2, 3, 4]
    assert records(tmp_path)[3].where == "deep/a.jsonl line 1"


def test_files_of_another_split_are_left_out(tmp_path: Path) -> None:
    for split, value in (("train", 1), ("test", 2), ("validation", 3)):
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", n(value))
    assert [numbers(tmp_path, "auto", split) for split in ("train", "test", "dev")] == [[1], [2], [3]]
    with pytest.raises(ConfigError, match="no files of split 'more'; by their names they are of test, train, valid"):
        records(tmp_path, split="more")


def test_a_folder_of_one_split_is_taken_whatever_its_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", n(1))
    assert numbers(tmp_path) == [1]


def test_a_saved_dataset_is_what_its_state_names(tmp_path: Path) -> None:
    save_dataset(tmp_path, [n(1, 2, 3), n(4)])
    write_arrow(tmp_path / "cache-12ab.arrow", n(9))
    assert numbers(tmp_path) == numbers(tmp_path, "datasets") == [1, 2, 3, 4]


def test_a_saved_dict_of_datasets_has_splits(tmp_path: Path) -> None:
    save_dataset(tmp_path / "train", [n(1)])
    save_dataset(tmp_path / "heldout", [n(2)])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "heldout"]}')
    assert (numbers(tmp_path), numbers(tmp_path, "datasets", "heldout")) == ([1], [2])
    with pytest.raises(ConfigError, match=r"no split 'test'; its splits are \['train', 'heldout'\]"):
        records(tmp_path, split="test")


def test_a_saved_dataset_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path, [n(1), n(2)])
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow is missing, and state.json names it"):
        records(tmp_path)


def test_a_path_that_is_unclear_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="nowhere is neither a file nor a folder"):
        records(tmp_path / "nowhere")
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(ConfigError, match="has no jsonl files; check path and format"):
        records(tmp_path, "jsonl")
    write_jsonl(tmp_path / "a.jsonl", n(1))
    write_parquet(tmp_path / "a.parquet", n(2))
    with pytest.raises(ConfigError, match=r"several kinds \(jsonl, parquet\); set format"):
        records(tmp_path)
    assert numbers(tmp_path, "parquet") == [2]
    with pytest.raises(DataError, match=r"a.jsonl is jsonl; format: parquet reads parquet"):
        records(tmp_path / "a.jsonl", "parquet")


def test_a_name_that_says_nothing_is_judged_by_its_first_bytes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data", n(1))
    write_jsonl(tmp_path / "more", n(2))
    (tmp_path / "other").write_text('[{"n": 1}]')
    assert (numbers(tmp_path / "data"), numbers(tmp_path / "more")) == ([1], [2])
    with pytest.raises(DataError, match="other is of no kind that is known"):
        records(tmp_path / "other")


def test_remote_files_are_fetched_once_and_their_copies_go(s3_url: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", n(1, 2))
    write_parquet(tmp_path / "b.parquet", n(3))
    store = Storage(s3_url)
    for name in ("a.parquet", "b.parquet"):
        store.put_file(tmp_path / name, f"data/{name}")
    with DataFiles(f"{s3_url}/data", "auto", "train") as files:
        identity = content_sha256(files.records())
        store.remove_tree("data")
        assert [record.content["n"] for record in read_records(files)] == [1, 2, 3]
        copies = [files.local(file) for file in files.listed]
    assert not any(copy.exists() for copy in copies)
    with DataFiles(str(tmp_path), "parquet", "train") as local:
        assert content_sha256(local.records()) == identity


def test_identity_is_the_content_in_order(tmp_path: Path) -> None:
    def identity(*parts: str) -> str:
        folder = tmp_path / "-".join(parts)
        for index, part in enumerate(parts):
            write_jsonl(folder / f"{index}.jsonl", [{"text": part}])
        with DataFiles(str(folder), "auto", "train") as files:
            return content_sha256(files.records())

    assert len({identity("a", "b"), identity("b", "a"), identity("a"), identity("a", "c")}) == 4
    with DataFiles(str(tmp_path / "a" / "0.jsonl"), "auto", "train") as files:
        assert content_sha256(files.records()) == identity("a")
