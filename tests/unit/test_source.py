"""The next batch: read ahead, waited for, taken again from the ledger, and the last one by policy."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.errors import DataError, StarvedError
from tests.experience_rows import make_rows, uids
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter, source
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.layout import ShardId
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.notes import Notes
from trinity_tasks.buffer.source import Batch, BatchSource, batch_metrics
from trinity_tasks.buffer.strategies import Claim, Fifo
from trinity_tasks.operators import Dropped
from trinity_tasks.storage import Storage
from trinity_tasks.usage import Usage


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "job"))


class WatchedFifo(Fifo):
    """Tells which steps were claimed, and in which thread."""

    def __init__(self, store: Storage, num_rows: int, **options: Any) -> None:
        super().__init__(ExperienceReader(store, "main", max_damaged_shards=3), num_rows, **options)
        self.claims: list[tuple[int, bool]] = []
        self.threads: set[str] = set()

    def claim(self, position: Position, step: int, *, partial: bool = False) -> Claim | None:
        found = super().claim(position, step, partial=partial)
        self.claims.append((step, found is not None))
        self.threads.add(threading.current_thread().name)
        return found


@contextlib.contextmanager
def opened(strategy: Fifo, store: Storage, *, timeout_s: float = 5.0, **options: Any) -> Iterator[BatchSource]:
    batches = BatchSource(strategy, Ledger(store), timeout_s=timeout_s, **options)
    try:
        yield batches
    finally:
        batches.close()


def take(
    batches: BatchSource, num_steps: int, position: Position | None = None, first: int = 1, attempt: int = 1
) -> list[Batch]:
    async def steps() -> list[Batch]:
        taken, here = list[Batch](), position or Position()
        for step in range(first, first + num_steps):
            batch = await batches.next_batch(step, here, attempt=attempt)
            if batch is None:
                break
            taken.append(batch)
            here = batch.entry.after
        return taken

    return asyncio.run(steps())


def test_the_next_batch_is_read_while_this_one_trains(store: Storage) -> None:
    ExperienceWriter(store, "main", "a").write(make_rows(6, 2))
    strategy = WatchedFifo(store, 4)
    with opened(strategy, store, read_ahead=True) as batches:
        (first,) = take(batches, 1)
        deadline = time.monotonic() + 10
        while (2, True) not in strategy.claims:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (second,) = take(batches, 1, first.entry.after, first=2)
        assert strategy.claims.count((2, True)) == 1
        assert uids([*first.experiences, *second.experiences]) == uids(make_rows(6, 2)[:8])
    assert all(name.startswith("buffer") for name in strategy.threads)
    assert Ledger(store).steps() == [1, 2]  # step 3 was read ahead; it is recorded when it trains


def test_without_reading_ahead_nothing_is_claimed_early(store: Storage) -> None:
    ExperienceWriter(store, "main", "a").write(make_rows(6, 2))
    strategy = WatchedFifo(store, 4)
    with opened(strategy, store) as batches:
        assert batches.has_batch(1, Position())
        take(batches, 1)
        assert strategy.claims == [(1, True)]  # what has_batch found is the batch


def test_a_recorded_step_takes_its_rows_though_a_claim_would_give_others(store: Storage) -> None:
    """The writer `a` comes later and sorts first: a new claim would begin with it."""
    ExperienceWriter(store, "main", "b").write(make_rows(4, 2, batch="b"))
    with opened(WatchedFifo(store, 4), store) as batches:
        plain = take(batches, 2)
    ExperienceWriter(store, "main", "a").write(make_rows(4, 2, batch="a"))
    strategy = WatchedFifo(store, 4)
    with opened(strategy, store, read_ahead=True) as batches:
        assert batches.has_batch(1, Position())
        again = take(batches, 4)
    assert [uids(batch.experiences) for batch in again[:2]] == [uids(batch.experiences) for batch in plain]
    assert [batch.entry for batch in again[:2]] == [batch.entry for batch in plain]
    assert {step for step, _ in strategy.claims} <= {3, 4, 5}
    assert uids([row for batch in again[2:] for row in batch.experiences]) == uids(make_rows(4, 2, batch="a"))


def test_a_ledger_entry_by_someone_else_stops_the_run(store: Storage) -> None:
    ExperienceWriter(store, "main", "a").write(make_rows(6, 2))
    with opened(WatchedFifo(store, 4), store) as mine, opened(WatchedFifo(store, 4), store) as other:
        (first,) = take(mine, 1)
        take(other, 3)
        with pytest.raises(DataError, match=r"step 2 was recorded in the ledger by another process"):
            take(mine, 1, first.entry.after, first=2)


def test_the_entry_of_a_killed_attempt_may_arrive_late(store: Storage) -> None:
    """The writer `a` comes later and sorts first, so that attempt 2 would claim other rows than attempt 1 has."""
    ExperienceWriter(store, "main", "b").write(make_rows(2, 2, batch="b"))
    with opened(WatchedFifo(store, 4), store) as batches:
        (late,) = take(batches, 1)
    entry = store.read_bytes("ledger/step_00000001.json")
    store.remove("ledger/step_00000001.json")
    ExperienceWriter(store, "main", "a").write(make_rows(2, 2, batch="a"))

    class Overtaken(Ledger):
        def record(self, entry_: LedgerEntry) -> None:
            if entry_.step == 1:
                store.create("ledger/step_00000001.json", entry)
            super().record(entry_)

    batches = BatchSource(WatchedFifo(store, 4), Overtaken(store), timeout_s=5.0)
    with contextlib.closing(batches):
        first, second = take(batches, 2, attempt=2)
    assert (first.entry, uids(first.experiences)) == (late.entry, uids(make_rows(2, 2, batch="b")))
    assert uids(second.experiences) == uids(make_rows(2, 2, batch="a"))


def test_each_shard_is_fetched_once_and_none_is_kept(store: Storage) -> None:
    """Shards that end in stale rows, that have none, and whose notes are asked for."""
    fetched: list[str] = []

    class Counting(Storage):
        def read_bytes(self, path: str) -> bytes:
            data = super().read_bytes(path)
            fetched.append(path)
            return data

    writer = ExperienceWriter(store, "main", "a")
    for index in range(10):
        fresh, stale = make_rows(1, 2, batch=index, version=100), make_rows(1, 2, batch=f"{index} old")
        writer.write([fresh, [*fresh, *stale], []][index % 3], notes=Notes.of(["own"], [], {"own/size": float(index)}))
    names = [f"experiences/main/a-{index:08d}.parquet" for index in range(10)]
    for read_ahead in (False, True):
        for entry in store.list("ledger"):
            store.remove(entry.name)
        fetched.clear()
        reader = ExperienceReader(Counting(store.url), "main", cache_bytes=2**30)
        with opened(Fifo(reader, 2, max_staleness=1), store, read_ahead=read_ahead) as batches:
            taken = take(batches, 7, first=6)
        assert [path for path in fetched if path.endswith(".parquet")] == names
        measured = [batch.entry.measured["own/size"] for batch in taken]
        assert measured == [0, 1, 2.5, 4, 5.5, 7, 8.5], "a shard without rows counts too"
        for index in range(10):
            reader.load(ShardId(index, "a"))
        assert len([path for path in fetched if path.endswith(".parquet")]) == 20, "some were kept"


@pytest.mark.parametrize(("last_batch", "sizes", "left"), [("train", [4, 4, 2], None), ("drop", [4, 4], 2)])
def test_the_last_rows_by_policy(store: Storage, last_batch: Any, sizes: list[int], left: int | None) -> None:
    writer = ExperienceWriter(store, "main", "a")
    writer.write(make_rows(5, 2))
    writer.end()
    with opened(WatchedFifo(store, 4), store, last_batch=last_batch) as batches:
        assert [batch.entry.num_rows for batch in take(batches, 9)] == sizes
        assert batches.left_at_end == (left or 0)


def test_a_starved_trainer_names_counts_and_the_producer_that_died(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "POLL_S", 0.01)
    ExperienceWriter(store, "main", "alive").write(make_rows(1, 2, version=3))
    dead = ExperienceWriter(store, "main", "dead")
    dead.write(make_rows(2, 2, batch=1, version=0))
    dead.close()
    name = "experiences/main/writers/dead.json"
    record: Any = store.read_json(name)
    store.write_json(name, record | {"process": record["process"] | {"started": "1"}})
    strategy = WatchedFifo(store, 8, max_staleness=0)
    with opened(strategy, store, timeout_s=0.1) as batches, pytest.raises(StarvedError) as caught:
        take(batches, 1, first=4)
    assert "2 available, 4 filtered (4 stale), 8 needed" in str(caught.value)
    assert "alive (shard 1 is next)" in str(caught.value)
    assert f"dead (shard 1 is next; pid {record['process']['pid']} on" in str(caught.value)
    assert "has died)" in str(caught.value)


def test_a_silent_producer_of_another_machine_is_named(store: Storage) -> None:
    writer = ExperienceWriter(store, "main", "far")
    writer.close()
    name = "experiences/main/writers/far.json"
    record: Any = store.read_json(name)
    away = {"host": "far-away", "boot_id": "another"}
    store.write_json(name, record | {"process": record["process"] | away, "heartbeat_at": time.time() - 3600})
    reader = ExperienceReader(store, "main")
    reader.look_for_writers(now=True)
    (phrase,) = reader.signs_of_life(Position().cursor) or ("",)
    assert phrase.startswith(f"far (shard 0 is next; pid {record['process']['pid']} on far-away has been silent for 36")


def test_what_a_step_left_behind_is_in_its_metrics_and_in_the_usage(store: Storage) -> None:
    """One shard with 2 fresh and 2 stale rows, of which an operator has dropped 3 others before."""
    fresh, stale = make_rows(1, 2, batch=0, version=5), make_rows(1, 2, batch=1, version=1)
    fresh[1].truncate_status = "response_truncated"
    dropped = [Dropped(f"9/9/{run}/0/x", "reward_filter", "too low", 7) for run in range(3)]
    writer = ExperienceWriter(store, "main", "a")
    writer.write([*stale, *fresh], notes=Notes.of(["reward_filter", "own"], dropped, {"own/size": 4.0}))
    with opened(WatchedFifo(store, 2, max_staleness=1), store) as batches:
        (batch,) = take(batches, 1, first=6)
    found = batch_metrics(batch.experiences, batch.entry)
    assert (found["sample/num_stale"], found["sample/lag_max"]) == (2, 0)
    assert (found["operator/reward_filter/num_dropped"], found["operator/own/num_dropped"]) == (3, 0)
    assert found["operator/own/size"] == 4
    sums = Usage().after(batch.entry, batch.experiences)
    trained, left = (sum(row.response_length for row in rows) for rows in (fresh, stale))
    assert sums == Usage(trained=trained, stale=left, filtered=21, truncated=fresh[1].response_length)
    assert sums.generated == trained + left + 21
    assert sums.metrics()["usage/trained_share"] == trained / (trained + left + 21)
    twice = sums.after(batch.entry, batch.experiences)
    assert twice.metrics()["usage/trained_tokens"] == 2 * trained
