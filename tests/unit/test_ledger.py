"""A step has one ledger entry, for ever: whoever comes second gets the first one's rows."""

import threading
from datetime import UTC, datetime

import pytest

from engines.errors import DataError
from engines.experience import Experience
from tests.experience_rows import make_group, make_rows, uids
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.storage import Storage


def entry_of(step: int, attempt: int, rows: list[Experience], before: Cursor, shard: int = 0) -> LedgerEntry:
    name = f"experiences/main/a-{shard:08d}.parquet"
    ref = BatchRef((RowRange(name, 0, len(rows), "ab" * 32),), len(rows))
    return LedgerEntry.of(step, ref, rows, before=before, after=before.moved("a", shard + 1, 0), attempt=attempt)


def test_the_first_entry_of_a_step_stays(store_url: str) -> None:
    ledger = Ledger(Storage(store_url))
    assert ledger.steps() == []
    with pytest.raises(FileNotFoundError):
        ledger.read(1)
    first = entry_of(1, 1, make_rows(2, 2), Cursor.start())
    assert ledger.record(first) == first
    assert ledger.record(entry_of(1, 2, make_rows(3, 2), Cursor.start(), shard=5)) == first
    assert ledger.read(1) == first
    for step in (100, 20):
        ledger.record(entry_of(step, 1, make_rows(1, 1), Cursor.start()))
    assert ledger.steps() == [1, 20, 100]


def test_an_entry_says_what_trained() -> None:
    rows = [*make_group(7, 0, 3, version=4), *make_group(7, 1, 1, version=8)]
    before = Cursor.start().moved("a", 2, 0)
    entry = entry_of(3, 2, rows, before, shard=2)
    assert (entry.num_rows, entry.num_groups) == (4, 2)
    assert entry.policy_versions.model_dump() == {"min": 4, "max": 8, "mean": 5.0}
    assert abs((datetime.now(UTC) - entry.created_at).total_seconds()) < 60
    stored = entry.model_dump(mode="json", exclude={"created_at"})
    assert stored == {
        "step": 3,
        "attempt": 2,
        "ranges": [{"shard": "experiences/main/a-00000002.parquet", "start": 0, "stop": 4, "sha256": "ab" * 32}],
        "num_rows": 4,
        "num_groups": 2,
        "policy_versions": {"min": 4, "max": 8, "mean": 5.0},
        "cursor_before": {"a": [2, 0]},
        "cursor_after": {"a": [3, 0]},
    }


def test_a_replayed_step_takes_the_recorded_rows(tmp_path: object) -> None:
    """New shards that arrive after a crash would change what a claim gives; the ledger wins."""
    store = Storage(str(tmp_path))
    ledger = Ledger(store)
    ExperienceWriter(store, "main", "b").write(make_rows(2, 2, batch="b"))
    trained: list[list[str]] = []
    for attempt in (1, 2):
        reader = ExperienceReader(store, "main")
        claimed = reader.claim(Cursor.start(), 4)
        assert claimed is not None
        ref, after = claimed
        entry = ledger.record(
            LedgerEntry.of(1, ref, reader.read(ref), before=Cursor.start(), after=after, attempt=attempt)
        )
        trained.append(uids(reader.read(entry.ref)))
        assert (entry.attempt, entry.cursor_after.to_json()) == (1, {"b": [1, 0]})
        ExperienceWriter(store, "main", "a").write(make_rows(2, 2, batch="a"))
    assert trained == [uids(make_rows(2, 2, batch="b"))] * 2


def test_of_many_writers_one_wins(tmp_path: object) -> None:
    store = Storage(str(tmp_path))
    results: list[LedgerEntry] = []

    def record(attempt: int) -> None:
        results.append(Ledger(store).record(entry_of(1, attempt, make_rows(attempt + 1, 1), Cursor.start())))

    threads = [threading.Thread(target=record, args=(attempt,)) for attempt in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == results[0] == Ledger(store).read(1) for result in results)


def test_an_entry_of_another_history_is_refused(tmp_path: object) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    ledger.record(entry_of(2, 1, make_rows(1, 2), Cursor.start().moved("a", 1, 0), shard=1))
    with pytest.raises(
        DataError, match=r"step_00000002.json begins at \{'a': \[1, 0\]\}, the checkpoint says \{\}: rows"
    ):
        ledger.record(entry_of(2, 2, make_rows(1, 2), Cursor.start()))


@pytest.mark.parametrize("content", ["[]", '{"step": 1}', '{"cursor_before": 3}'])
def test_an_entry_that_cannot_be_understood_is_named(tmp_path: object, content: str) -> None:
    store = Storage(str(tmp_path))
    store.write("ledger/step_00000001.json", content.encode())
    with pytest.raises(DataError, match=r"ledger/step_00000001.json is not a ledger entry"):
        Ledger(store).read(1)
