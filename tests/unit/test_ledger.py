"""A step has one ledger entry, for ever: whoever comes second gets the first one's rows."""

import contextlib
import hashlib
import threading
from datetime import UTC, datetime

import pytest

from engines.errors import DataError
from engines.experience import Experience
from tests.experience_rows import make_group, make_rows
from trinity_tasks.buffer.cursor import BatchRef, Cursor, PassedRows, Position, RowRange
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.notes import Notes
from trinity_tasks.buffer.strategies import Claim
from trinity_tasks.storage import Storage


def entry_of(step: int, attempt: int, rows: list[Experience], before: Cursor, shard: int = 0) -> LedgerEntry:
    name = f"experiences/main/a-{shard:08d}.parquet"
    ref = BatchRef((RowRange(name, 0, len(rows), "ab" * 32),), len(rows))
    claim = Claim(ref, Position(before.moved("a", shard + 1, 0)))
    return LedgerEntry.of(step, claim, rows, before=Position(before), attempt=attempt)


def test_the_first_entry_of_a_step_stays(store_url: str) -> None:
    ledger = Ledger(Storage(store_url))
    assert ledger.steps() == []
    with pytest.raises(FileNotFoundError):
        ledger.read(1)
    first = entry_of(1, 1, make_rows(2, 2), Cursor.start())
    assert ledger.recorded(1, Position()) is None
    ledger.record(first)
    with pytest.raises(FileExistsError):
        ledger.record(entry_of(1, 2, make_rows(3, 2), Cursor.start(), shard=5))
    assert ledger.read(1) == ledger.recorded(1, Position()) == first
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
        "ranges": {"shards": [["experiences/main/a-00000002.parquet", "ab" * 32]], "rows": [[0, 0, 4]]},
        "num_rows": 4,
        "num_groups": 2,
        "policy_versions": {"min": 4, "max": 8, "mean": 5.0},
        "cursor_before": {"a": [2, 0]},
        "cursor_after": {"a": [3, 0]},
        "state_before_sha256": hashlib.sha256(b"null").hexdigest(),
        "state_after": None,
        "passed": [],
        "dropped": {},
        "measured": {},
        "reused_tokens": 0,
    }


def test_everything_in_an_entry_comes_back(tmp_path: object) -> None:
    """A pool's state, what was passed and why, what operators dropped, ranges of several shards."""
    shards = [f"experiences/main/{name}-00000000.parquet" for name in "ab"]
    ranges = tuple(RowRange(shards[n], start, start + 2, f"{n}" * 64) for n, start in ((0, 4), (1, 0), (0, 0)))
    before = Position(Cursor.start(), {"groups": [[0, 1, 2.5]]})
    claim = Claim(
        BatchRef(ranges, 6),
        Position(Cursor.start().moved("a", 1, 0), {"groups": []}),
        passed=(PassedRows(shards[1], 2, 5, "stale", 17), PassedRows(shards[1], 0, 0, "damaged")),
        reused_tokens=3,
    )
    notes = [
        Notes(operators=("f", "g"), dropped=(("1/2/3/4/x", "f", "too bad", 5),), measured={"g/mean": 1.0}),
        Notes(operators=("f", "g"), dropped=(("1/2/3/5/x", "f", "too bad", 6),), measured={"g/mean": 4.0}),
    ]
    ledger = Ledger(Storage(str(tmp_path)))
    entry = LedgerEntry.of(1, claim, make_rows(3, 2), before=before, attempt=1, notes=notes)
    ledger.record(entry)
    assert ledger.recorded(1, before) == entry
    assert (entry.ranges, entry.after, entry.passed) == (ranges, claim.after, claim.passed)
    assert (entry.dropped, entry.measured) == ({"f": (2, 11), "g": (0, 0)}, {"g/mean": 2.5})
    with pytest.raises(DataError, match=r"with a state of sha256 [0-9a-f]{64}, the checkpoint says"):
        ledger.recorded(1, Position(Cursor.start(), {"groups": [[0, 1, 2.25]]}))


def test_of_many_writers_one_wins(tmp_path: object) -> None:
    store = Storage(str(tmp_path))
    entries = [entry_of(1, attempt, make_rows(attempt + 1, 1), Cursor.start()) for attempt in range(8)]
    won: list[LedgerEntry] = []

    def record(entry: LedgerEntry) -> None:
        with contextlib.suppress(FileExistsError):
            Ledger(store).record(entry)
            won.append(entry)

    threads = [threading.Thread(target=record, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [Ledger(store).read(1)]


def test_an_entry_of_another_history_is_refused(tmp_path: object) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    ledger.record(entry_of(2, 1, make_rows(1, 2), Cursor.start().moved("a", 1, 0), shard=1))
    with pytest.raises(
        DataError, match=r"step_00000002.json begins at \{'a': \[1, 0\]\} with .*, the checkpoint says \{\} and"
    ):
        ledger.recorded(2, Position())


@pytest.mark.parametrize("content", ["[]", '{"step": 1}', '{"cursor_before": 3}'])
def test_an_entry_that_cannot_be_understood_is_named(tmp_path: object, content: str) -> None:
    store = Storage(str(tmp_path))
    store.write("ledger/step_00000001.json", content.encode())
    with pytest.raises(DataError, match=r"ledger/step_00000001.json is not a ledger entry"):
        Ledger(store).read(1)
