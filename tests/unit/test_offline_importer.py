"""Data becomes shards once: streamed, in order, deterministic, resumed after a kill, refused when it has changed."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.experience import Experience
from engines.text import build_tokenizer
from tests.experience_rows import FifoReader
from trinity_tasks.buffer.cursor import Cursor
from trinity_tasks.buffer.row_checks import RowLimits
from trinity_tasks.offline import importer, sources
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.offline.importer import Imported, import_experiences
from trinity_tasks.storage import Storage

TOKENIZER = build_tokenizer(TokenizerConfig(kind="char"))


def write_pairs(path: Path, num_rows: int, answer: str = "yes") -> Path:
    lines = [json.dumps({"prompt": f"q{index}", "response": answer * (1 + index % 3)}) for index in range(num_rows)]
    path.write_text("\n".join(lines))
    return path


def run_import(store: Storage, path: Path | str, limits: RowLimits | None = None, **config: Any) -> Imported:
    options = {"prompt_type": "plaintext", "rows_per_shard": 4, **config}
    return import_experiences(store, "main", OfflineConfig(path=str(path), **options), TOKENIZER, limits or RowLimits())


def rows_in(store: Storage) -> list[Experience]:
    """All rows, as a trainer takes them: batches of three, the last one smaller."""
    reader, cursor, rows = FifoReader(store), Cursor.start(), []
    while claimed := reader.claim(cursor, 3, partial=True):
        ref, cursor = claimed
        rows += reader.read(ref)
    return rows


def objects(store: Storage) -> dict[str, bytes]:
    return {info.name: store.read_bytes(info.name) for info in store.list("experiences/main")}


def test_rows_reach_a_trainer_in_their_order(store_url: str, tmp_path: Path) -> None:
    store = Storage(store_url)
    done = run_import(store, write_pairs(tmp_path / "a.jsonl", 10))
    assert (done.num_rows, done.num_dropped, done.num_shards) == (10, 0, 3)
    rows = rows_in(store)
    assert [row.prompt_text for row in rows] == [f"q{index}" for index in range(10)]
    assert [row.eid.tid for row in rows] == [f"import-{index // 4}/{index}" for index in range(10)]
    assert rows[9].info == {"is_expert": True, "source": "a.jsonl line 10"}
    assert sorted(name.rsplit("/", 1)[-1] for name in objects(store)) == [
        *(f"import-{index:08d}.parquet" for index in range(3)),
        "import.done.json",
        "import.end",
        "import.json",
    ]


def test_equal_data_gives_equal_bytes_wherever_it_lies(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", 10)
    (tmp_path / "copy").mkdir()
    shutil.copy(path, tmp_path / "copy" / "a.jsonl")
    first, second = Storage(str(tmp_path / "one")), Storage(str(tmp_path / "two"))
    assert run_import(first, path) == run_import(second, tmp_path / "copy" / "a.jsonl")
    assert objects(first) == objects(second)


def test_data_on_s3_is_imported_as_local_data_is(s3_url: str, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", 10)
    Storage(s3_url).put_file(path, "data/a.jsonl")
    local, remote = Storage(str(tmp_path / "one")), Storage(f"{s3_url}/job")
    done = run_import(remote, f"{s3_url}/data/a.jsonl")
    assert done == run_import(local, path)
    assert objects(remote) == objects(local)
    assert run_import(remote, f"{s3_url}/data/a.jsonl") == done
    Storage(s3_url).write("data/a.jsonl", b"{}")
    with pytest.raises(ConfigError, match="is not what was imported"):
        run_import(remote, f"{s3_url}/data/a.jsonl")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_offline_importer import SHORT, run_import
from trinity_tasks.storage import Storage

class Dying(Storage):
    def create(self, path, data, *, durable=True):
        if path.endswith(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().create(path, data, durable=durable)

run_import(Dying(sys.argv[1]), Path(sys.argv[2]), SHORT, too_long="drop")
"""
SHORT = RowLimits(max_response_tokens=9)


@pytest.mark.parametrize(
    "dies_at", ["import.json", "import-00000000.parquet", "import-00000002.parquet", "import.done.json", "import.end"]
)
def test_a_killed_import_goes_on_where_it_was(
    dies_at: str, tmp_path: Path, python_environment: dict[str, str], repository_root: Path
) -> None:
    path = write_pairs(tmp_path / "a.jsonl", 18)  # every third response has 10 tokens, and is dropped
    whole, killed = Storage(str(tmp_path / "whole")), Storage(str(tmp_path / "killed"))
    expected = run_import(whole, path, SHORT, too_long="drop")
    assert (expected.num_rows, expected.num_dropped, expected.num_shards) == (12, 6, 5)
    command = [sys.executable, "-c", KILLED, killed.url, str(path), dies_at]
    done = subprocess.run(command, env=python_environment, cwd=repository_root, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    before = objects(killed)
    assert not any(name.endswith(dies_at) for name in before)
    assert run_import(killed, path, SHORT, too_long="drop") == expected
    assert objects(killed) == objects(whole)
    assert before.items() <= objects(killed).items()


def test_shards_that_exist_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    run_import(store, path)
    for name in ("import.end", "import.done.json", "import-00000002.parquet"):
        store.remove(f"experiences/main/{name}")
    made: list[int] = []
    original = importer.RecordFormat.row

    def counting(self: Any, record: Any, index: int) -> Any:
        made.append(index)
        return original(self, record, index)

    monkeypatch.setattr(importer.RecordFormat, "row", counting)
    assert run_import(store, path).num_rows == 10
    assert made == [8, 9]


def test_a_finished_import_reads_no_record_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    done = run_import(store, path)

    def never(files: Any) -> Iterator[Any]:
        raise AssertionError("records were read again")

    monkeypatch.setattr(importer, "read_records", never)
    assert run_import(store, path) == done
    path.unlink()
    assert run_import(store, path) == done


def test_no_more_than_a_shard_of_records_is_taken_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]
    seen: list[int] = []
    original = sources.read_records

    def counting(files: Any) -> Iterator[Any]:
        for record in original(files):
            taken[0] += 1
            yield record

    class Watching(Storage):
        def create(self, path: str, data: bytes, *, durable: bool = True) -> None:
            if path.endswith(".parquet"):
                seen.append(taken[0])
            super().create(path, data, durable=durable)

    monkeypatch.setattr(importer, "read_records", counting)
    run_import(Watching(str(tmp_path / "job")), write_pairs(tmp_path / "a.jsonl", 10))
    assert seen == [4, 8, 10]


@pytest.mark.parametrize("finished", [True, False])
def test_changed_data_is_refused(finished: bool, tmp_path: Path) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    run_import(store, path)
    if not finished:
        store.remove("experiences/main/import.done.json")
        store.remove("experiences/main/import.end")
    before = objects(store)
    write_pairs(path, 10, answer="yep")
    with pytest.raises(ConfigError, match=r"a\.jsonl is not what was imported: .*another name"):
        run_import(store, path)
    assert objects(store) == before


def test_changed_settings_are_refused_and_a_moved_file_is_not(tmp_path: Path) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    done = run_import(store, path)
    moved = path.rename(tmp_path / "b.jsonl")
    assert run_import(store, moved) == done
    with pytest.raises(ConfigError, match="imported with rows_per_shard = 4, now it is 5"):
        run_import(store, moved, rows_per_shard=5)
    with pytest.raises(ConfigError, match="imported with max_model_len = None, now it is 99"):
        run_import(store, moved, RowLimits(max_model_len=99))


def test_a_bad_record_stops_the_import_and_corrected_data_does_not_mix_with_it(tmp_path: Path) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    good = path.read_text()
    path.write_text(good.replace('"response": "yesyes"}\n{"prompt": "q8"', '"answer": "no"}\n{"prompt": "q8"'))
    with pytest.raises(DataError, match=r"a\.jsonl line 8: response is missing; the record has prompt, answer"):
        run_import(store, path)
    assert "experiences/main/import.end" not in objects(store)
    path.write_text(good)
    with pytest.raises(ConfigError, match=r"or, if no step has trained on them yet, remove .*experiences/main"):
        run_import(store, path)


def test_no_records_and_nothing_that_fits_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl holds no records"):
        run_import(Storage(str(tmp_path / "one")), tmp_path / "a.jsonl")
    path, store = write_pairs(tmp_path / "b.jsonl", 5), Storage(str(tmp_path / "two"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"all 5 rows of .*b\.jsonl are beyond the model's limits"):
            run_import(store, path, RowLimits(max_model_len=5), too_long="drop")
    with pytest.raises(ConfigError, match="nowhere is neither a file nor a folder"):
        run_import(Storage(str(tmp_path / "three")), tmp_path / "nowhere")


def test_a_lost_shard_of_a_finished_import_is_noticed(tmp_path: Path) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 10), Storage(str(tmp_path / "job"))
    run_import(store, path)
    store.remove("experiences/main/import-00000002.parquet")
    with pytest.raises(DataError, match="has 2 shards of writer 'import', its import made 3"):
        run_import(store, path)


def test_foreign_records_of_an_import_are_refused(tmp_path: Path) -> None:
    path, store = write_pairs(tmp_path / "a.jsonl", 3), Storage(str(tmp_path / "job"))
    store.write_json("experiences/main/import.json", {"content": "mine"})
    with pytest.raises(DataError, match=r"import\.json is no record of an import"):
        run_import(store, path)


def test_parquet_is_imported_by_slices(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"q{index}", "response": "yes"} for index in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    done = run_import(Storage(str(tmp_path / "job")), tmp_path / "a.parquet", rows_per_shard=256)
    assert (done.num_rows, done.num_shards) == (700, 3)
    assert rows_in(Storage(str(tmp_path / "job")))[699].info["source"] == "a.parquet row 699"
