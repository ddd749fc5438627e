"""Each row is taken exactly once, in whole groups, by cursor, at a cost that does not grow with what was consumed."""

from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from engines.errors import ConfigError, DataError
from engines.experience import Experience
from tests.experience_rows import FifoReader, make_group, make_rows, uids
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.buffer.row_checks import RowLimits
from trinity_tasks.buffer.strategies import Availability
from trinity_tasks.storage import ObjectInfo, Storage


class CountingStorage(Storage):
    """Counts what a reader asks of the store, by kind of call and name."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(url, options, **kwargs)
        self.calls: list[tuple[str, str]] = []

    def read_bytes(self, path: str) -> bytes:
        self.calls.append(("read", path))
        return super().read_bytes(path)

    def list(self, prefix: str = "", *, recursive: bool = False) -> list[ObjectInfo]:
        self.calls.append(("list", prefix))
        return super().list(prefix, recursive=recursive)

    def size(self, path: str) -> int | None:
        self.calls.append(("size", path))
        return super().size(path)


@pytest.fixture
def store(tmp_path: Any) -> CountingStorage:
    return CountingStorage(str(tmp_path / "job"))


def reader_of(store: Storage, **options: Any) -> FifoReader:
    """A reader whose clock stands still, so that it never puts off a listing."""
    return FifoReader(store, clock=lambda: 0.0, **options)


def drain(reader: FifoReader, cursor: Cursor, num_rows: int, *, partial: bool = True) -> list[list[str]]:
    """Identities of every batch that there is from the cursor on."""
    batches: list[list[str]] = []
    while claimed := reader.claim(cursor, num_rows, partial=partial):
        ref, cursor = claimed
        rows = reader.read(ref)
        assert len(rows) == ref.num_rows == sum(part.stop - part.start for part in ref.ranges)
        batches.append(uids(rows))
    return batches


# -- on every kind of store -------------------------------------------------------------------------------------------


def test_rows_travel_from_writers_to_batches(store_url: str) -> None:
    store = Storage(store_url)
    reader = reader_of(store)
    assert reader.claim(Cursor.start(), 8) is None
    assert reader.availability(Cursor.start(), 8) == Availability(0, 8, False, ())

    first, second = ExperienceWriter(store, "main", "agent-1"), ExperienceWriter(store, "main", "agent-2")
    rows = [make_rows(3, 2, batch=name) for name in ("a", "b", "c")]
    record = first.write(rows[0])
    assert (record.name, record.rows) == ("experiences/main/agent-1-00000000.parquet", 6)
    assert store.size(record.name) == record.size
    second.write(rows[1])
    first.write(rows[2])
    with pytest.raises(FileExistsError):
        first.write(rows[0], index=1)
    assert (first.next_index, first.has_shard(1), first.has_shard(2)) == (2, True, False)

    claimed = reader.claim(Cursor.start(), 8)
    assert claimed is not None
    ref, cursor = claimed
    assert cursor.to_json() == {"agent-1": [1, 0], "agent-2": [0, 2]}
    assert uids(reader.read(ref)) == uids([*rows[0], *rows[1][:2]])
    assert ref.ranges[0].sha256 == record.sha256
    assert reader.availability(cursor, 8).available == 10

    first.end()
    second.end()
    assert drain(reader, cursor, 8) == [uids([*rows[1][2:], *rows[2][:4]]), uids(rows[2][4:])]
    assert reader.availability(Cursor.start(), 19) == Availability(
        18, 19, True, ("agent-1 (ended after 2 shards)", "agent-2 (ended after 1 shards)")
    )


def test_a_writer_goes_on_where_it_ended(store_url: str) -> None:
    store = Storage(store_url)
    writer = ExperienceWriter(store, "main", "agent")
    writer.write(make_rows(1, 2, batch=0))
    writer.end()
    writer.end()
    with pytest.raises(DataError, match=r"writer agent of .*experiences/main has ended.*call reopen\(\) first"):
        writer.write(make_rows(1, 2, batch=1))

    again = ExperienceWriter(store, "main", "agent")
    assert (again.next_index, again.ended) == (1, True)
    reader = reader_of(store)
    assert reader.availability(Cursor.start(), 3).ended
    again.reopen()
    again.write(make_rows(1, 2, batch=1))
    assert not reader.availability(Cursor.start(), 5).ended
    assert len(drain(reader, Cursor.start(), 4, partial=False)) == 1


# -- exactly once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_taken_exactly_once(store: CountingStorage, seed: int) -> None:
    """Three writers of groups of 4, 1 to 9 groups a shard, write and end in any order while batches of 16 are taken."""
    rng = np.random.default_rng(seed)
    writers = [ExperienceWriter(store, "main", name) for name in ("a", "b-1", "c")]
    shards_left = [int(rng.integers(2, 12)) for _ in writers]
    written: list[list[str]] = [[], [], []]
    taken: list[list[Experience]] = []
    cursor, reader, position = Cursor.start(), reader_of(store), 0
    while True:
        if open_writers := [i for i, writer in enumerate(writers) if not writer.ended]:
            i = int(rng.choice(open_writers))
            if shards_left[i]:
                rows = make_rows(int(rng.integers(0, 10)), 4, batch=f"{i}-{shards_left[i]}")
                writers[i].write(rows)
                written[i] += uids(rows)
                shards_left[i] -= 1
            else:
                writers[i].end()
        if rng.random() < 0.2:  # a crash: only the cursor's JSON is left
            reader, cursor = reader_of(store), Cursor.from_json(cursor.to_json())
        while rng.random() < 0.7 or not open_writers:
            state = reader.availability(cursor, 16)
            claimed = reader.claim(cursor, 16, partial=True)
            if claimed is None:
                break
            ref, cursor = claimed
            taken.append(reader.read(ref))
            assert ref.num_rows == 16 or (state.ended and state.available == ref.num_rows)
            position += 1
        if not open_writers:
            break
    assert all(len(batch) == 16 for batch in taken[:-1])
    flat = [row for batch in taken for row in batch]
    assert sorted(uids(flat)) == sorted(uid for rows in written for uid in rows)
    for i, rows in enumerate(written):  # each writer's rows in its own order
        assert [uid for uid in uids(flat) if uid.startswith(f"{i}-")] == rows
    for batch in taken:  # whole groups, side by side
        assert [row.eid.run for row in batch] == [0, 1, 2, 3] * (len(batch) // 4)
        assert all(len({row.eid.tid for row in batch[k : k + 4]}) == 1 for k in range(0, len(batch), 4))
    assert reader.availability(cursor, 1) == Availability(0, 1, True, reader.availability(cursor, 1).writers)


def test_a_cursor_gives_the_same_remaining_batches(store: CountingStorage) -> None:
    for name, size in (("a", 3), ("b", 5), ("c", 2)):
        writer = ExperienceWriter(store, "main", name)
        for index in range(7):
            writer.write(make_rows(size, 4, batch=f"{name}{index}"))
        writer.end()
    reader, cursor, batches, cursors = reader_of(store), Cursor.start(), [], [Cursor.start().to_json()]
    while claimed := reader.claim(cursor, 32, partial=True):
        ref, cursor = claimed
        batches.append(uids(reader.read(ref)))
        cursors.append(cursor.to_json())
    assert len(batches) == 9  # 70 groups of 4 in batches of 8 groups
    for step, stored in enumerate(cursors):
        assert drain(reader_of(store), Cursor.from_json(stored), 32) == batches[step:]


def test_the_oldest_shards_come_first(store: CountingStorage) -> None:
    for name, count in (("b", 3), ("a", 1), ("c", 2)):
        writer = ExperienceWriter(store, "main", name)
        for index in range(count):
            writer.write(make_group(f"{name}{index}", 0, 1))
    order = drain(reader_of(store), Cursor.start(), 1)
    assert [uid[0].split("/")[0] for uid in order] == ["a0", "b0", "c0", "b1", "c1", "b2"]


def test_a_shard_that_is_replaced_or_lost_is_not_taken_for_the_claimed_one(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    record = writer.write(make_rows(2, 2, batch=0))
    claimed = reader_of(store).claim(Cursor.start(), 4)
    assert claimed is not None
    store.remove(record.name)
    with pytest.raises(DataError, match=r"a-00000000.parquet is missing; rows 0 to 3 are lost"):
        reader_of(store).read(claimed[0])
    writer.write(make_rows(2, 2, batch=1), index=0)
    with pytest.raises(DataError, match=r"rows 0 to 3 of sha256 [0-9a-f]{64} were claimed: the object was replaced"):
        reader_of(store).read(claimed[0])
    beyond = BatchRef((RowRange(record.name, 2, 5),), 3)
    with pytest.raises(DataError, match="has 4 rows"):
        reader_of(store).read(beyond)


# -- groups -----------------------------------------------------------------------------------------------------------


def test_a_batch_never_cuts_a_group(store: CountingStorage) -> None:
    """Where the next group does not fit, the batch ends; one that fits no batch is named."""
    writer = ExperienceWriter(store, "main", "a")
    writer.write([row for task in range(3) for row in make_group(0, task, 4)])
    writer.write(make_group(1, 0, 3))
    writer.end()
    for size, expected in ((10, [8, 7]), (14, [12, 3]), (15, [15]), (4, [4, 4, 4, 3]), (6, [4, 4, 4, 3])):
        batches = drain(reader_of(store), Cursor.start(), size)
        assert [len(batch) for batch in batches] == expected
        assert [uid for batch in batches for uid in batch] == uids([*make_rows(3, 4), *make_group(1, 0, 3)])
    with pytest.raises(
        DataError,
        match=r"group 0/0 in .*main/a-00000000.parquet has 4 rows, a batch has 3.*raise buffer.train_batch_size",
    ):
        reader_of(store).claim(Cursor.start(), 3)


def test_a_scattered_group_is_refused_at_the_door(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    first, second = make_group(0, 1, 2), make_group(0, 2, 2)
    with pytest.raises(DataError, match=r"row 3 of 4, experience 0/1/1/0/000001: its group 0/1 began earlier"):
        writer.write([first[0], second[0], second[1], first[1]])
    assert (writer.next_index, store.list("experiences/main")) == (0, [])


def test_a_bad_row_stores_nothing(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a", RowLimits(vocab_size=100))
    rows = make_rows(2, 2)
    rows[2].tokens[0] = 177
    with pytest.raises(DataError, match=r"row 2 of 4, experience 0/1/0/0/000000: tokens\[0\] is 177"):
        writer.write(rows)
    assert (writer.next_index, store.list("experiences/main")) == (0, [])


# -- cost -------------------------------------------------------------------------------------------------------------


def calls_per_batch(store: CountingStorage, reader: FifoReader, num_shards: int) -> list[list[tuple[str, str]]]:
    """Store calls of each step of a loop that asks, produces when short, and takes: one shard is one batch."""
    writer = ExperienceWriter(store, "main", "a", durable=False)
    cursor, counted = Cursor.start(), []
    for step in range(num_shards):
        store.calls.clear()
        assert reader.claim(cursor, 4) is None
        writer.write(make_rows(2, 2, batch=step))
        for _ in range(2):
            claimed = reader.claim(cursor, 4)
            assert claimed is not None
        ref, cursor = claimed
        reader.read(ref)
        counted.append(list(store.calls))
    return counted


def test_cost_does_not_grow_with_what_was_consumed(store: CountingStorage) -> None:
    """Known writers: one look for the shard that is not there yet, one read of the shard, no listing, ever."""
    counted = calls_per_batch(store, reader_of(store, writers=["a"]), 100)
    for step in (0, 50, 99):
        name = f"experiences/main/a-{step:08d}.parquet"
        assert counted[step] == [("read", name), ("read", name)]


def test_unknown_writers_cost_a_listing_only_when_a_batch_is_short(store: CountingStorage) -> None:
    counted = calls_per_batch(store, reader_of(store), 20)
    folders = ["experiences/main", "experiences/main/writers"]
    assert [[name for kind, name in calls if kind == "list"] for calls in counted[1:]] == [folders] * 19
    reader = reader_of(store)
    store.calls.clear()
    assert len(drain(reader, Cursor.start(), 4, partial=False)) == 20
    # registrations to begin with, and everything when nothing was left
    assert [name for kind, name in store.calls if kind == "list"] == [folders[1], *folders]
    assert [kind for kind, _ in store.calls].count("read") == 21


def test_a_shard_of_several_batches_is_read_once(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    for index in range(3):
        writer.write(make_rows(10, 2, batch=index))
    store.calls.clear()
    assert len(drain(reader_of(store, writers=["a"]), Cursor.start(), 6, partial=False)) == 10
    assert [name[-12:] for kind, name in store.calls if kind == "read"] == [f"{i:04d}.parquet" for i in range(4)]


def test_memory_is_bounded_and_a_small_cache_is_only_slower(store: CountingStorage) -> None:
    for name in "abcdef":
        ExperienceWriter(store, "main", name).write(make_rows(4, 2, batch=name))
    reader = reader_of(store, cache_bytes=1)
    claimed = reader.claim(Cursor.start(), 48)
    assert claimed is not None
    assert len(reader.reader._cache) == 1
    assert len(reader.read(claimed[0])) == 48
    assert len(reader.reader._cache) == 0


def test_slow_listings_are_put_off(store: CountingStorage) -> None:
    """A writer that did not register is found by listing everything: if that takes 1 s, at most every 20 s."""
    now = 0.0

    class SlowListing(CountingStorage):
        def list(self, prefix: str = "", *, recursive: bool = False) -> list[ObjectInfo]:
            nonlocal now
            now += 1.0 if prefix == "experiences/main" else 0.0
            return super().list(prefix, recursive=recursive)

    slow = SlowListing(store.url)
    reader = FifoReader(slow, clock=lambda: now)
    assert reader.claim(Cursor.start(), 2) is None
    ExperienceWriter(store, "main", "a", register=False).write(make_rows(1, 2))
    listings = slow.calls.count(("list", "experiences/main"))
    while reader.claim(Cursor.start(), 2) is None:
        now += 0.5
    assert 20.0 <= now <= 25.0
    assert slow.calls.count(("list", "experiences/main")) == listings + 1
    ExperienceWriter(store, "main", "b").write(make_rows(1, 2))
    claimed = reader.claim(Cursor.start().moved("a", 1, 0), 2)  # this one registered, and is found at once
    assert claimed is not None
    assert slow.calls.count(("list", "experiences/main")) == listings + 1


def test_a_new_writer_is_found_while_others_fill_every_batch(store: CountingStorage) -> None:
    now = 0.0
    reader, cursor = FifoReader(store, clock=lambda: now), Cursor.start()
    writer = ExperienceWriter(store, "main", "b")
    seen: list[str] = []
    for step in range(4):
        writer.write(make_rows(1, 2, batch=f"b{step}"))
        if step == 1:
            ExperienceWriter(store, "main", "a").write(make_rows(1, 2, batch="a0"))
        claimed = reader.claim(cursor, 2)
        assert claimed is not None
        ref, cursor = claimed
        seen += [part.shard.rsplit("/", 1)[-1][0] for part in ref.ranges]
        now += 25.0
    assert seen == ["b", "b", "b", "a"]


# -- the end of the data, and what is lost ----------------------------------------------------------------------------


def test_a_partial_batch_needs_the_end_of_every_writer(store: CountingStorage) -> None:
    first, second = ExperienceWriter(store, "main", "a"), ExperienceWriter(store, "main", "b")
    first.write(make_rows(1, 2, batch="a"))
    second.write([])
    first.end()
    reader = reader_of(store)
    assert reader.claim(Cursor.start(), 4, partial=True) is None
    state = reader.availability(Cursor.start(), 4)
    assert state == Availability(2, 4, False, ("a (ended after 1 shards)", "b (shard 1 is next)"))
    second.end()
    assert reader.claim(Cursor.start(), 4) is None
    claimed = reader.claim(Cursor.start(), 4, partial=True)
    assert claimed is not None
    assert claimed[0].num_rows == 2
    assert reader.claim(claimed[1], 4, partial=True) is None


def test_a_full_batch_is_not_the_end(store: CountingStorage) -> None:
    """Rows and the end that come between a claim and the question for the end must not be dropped."""
    writer = ExperienceWriter(store, "main", "a")
    reader = reader_of(store)
    assert reader.claim(Cursor.start(), 4) is None
    writer.write(make_rows(2, 2))
    writer.end()
    assert reader.availability(Cursor.start(), 4) == Availability(4, 4, False, ("a (shard 1 is next)",))


def late(store: Storage, name: str) -> Storage:
    """A store that shows `name` only to the second look: it was written while the reader looked for the end."""

    class LateStorage(Storage):
        looked = False

        def read_bytes(self, path: str) -> bytes:
            if path.endswith(name) and not self.looked:
                self.looked = True
                raise FileNotFoundError(path)
            return super().read_bytes(path)

    return LateStorage(store.url)


def test_a_shard_written_while_the_reader_looks_for_the_end_is_taken(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    writer.write(make_rows(1, 2, batch=0))
    writer.write(make_rows(1, 2, batch=1))
    writer.end()
    claimed = reader_of(late(store, "a-00000001.parquet")).claim(Cursor.start(), 9, partial=True)
    assert claimed is not None
    assert claimed[0].num_rows == 4


def test_a_lost_shard_is_an_error_and_not_a_wait(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    names = [writer.write(make_rows(1, 2, batch=index)).name for index in range(3)]
    writer.end()
    store.remove(names[1])
    with pytest.raises(
        DataError, match=r"a-00000001.parquet is missing, its writer ended after 3 shards: rows are lost"
    ):
        reader_of(store).availability(Cursor.start(), 6)
    with pytest.raises(DataError, match=r"a-00000001.parquet is missing, yet a later shard"):
        ExperienceWriter(store, "main", "a")


def test_a_damaged_shard_is_named(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    name = writer.write(make_rows(3, 2)).name
    good = store.read_bytes(name)
    for bad in (good[:-9], good[:50] + bytes([good[50] ^ 1]) + good[51:], b"PAR1", b"x" * 100):
        store.write(name, bad)
        for ask in (
            lambda: reader_of(store).claim(Cursor.start(), 2),
            lambda: reader_of(store).availability(Cursor.start(), 2),
        ):
            with pytest.raises(
                DataError, match=rf"shard {store.url}/experiences/main/a-00000000.parquet cannot be read"
            ):
                ask()


# -- names, indices, cursors ------------------------------------------------------------------------------------------


def test_two_processes_with_one_name_cannot_overwrite_each_other(store: CountingStorage) -> None:
    first, second = ExperienceWriter(store, "main", "a"), ExperienceWriter(store, "main", "a")
    first.write(make_rows(1, 2, batch="first"))
    with pytest.raises(FileExistsError):
        second.write(make_rows(1, 2, batch="second"))
    assert second.next_index == 1, "the shard of the other life counts, or end() would hide it"
    assert drain(reader_of(store), Cursor.start(), 2, partial=False) == [uids(make_rows(1, 2, batch="first"))]
    second.write(make_rows(1, 2, batch="second"), index=1)
    first.end()
    with pytest.raises(
        DataError, match=r"a.end says \{'shards': 1\}, this process has counted 2 shards: two processes"
    ):
        second.end()


def test_a_gap_in_the_shards_is_refused(store: CountingStorage) -> None:
    writer = ExperienceWriter(store, "main", "a")
    with pytest.raises(DataError, match=r"a-00000001.parquet is missing, yet a later shard of the writer is to follow"):
        writer.write(make_rows(1, 2), index=2)
    writer.write(make_rows(1, 2), index=0)
    assert writer.next_index == 1


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "a\n"])
def test_bad_names_are_refused(store: CountingStorage, name: str) -> None:
    for make in (
        lambda: ExperienceWriter(store, "main", name),
        lambda: ExperienceWriter(store, name, "a"),
        lambda: FifoReader(store, name),
    ):
        with pytest.raises(ConfigError, match="use letters, digits"):
            make()


def test_a_cursor_is_immutable_json() -> None:
    cursor = Cursor.start().moved("b", 3, 4).moved("a", 1, 0)
    assert cursor.to_json() == {"a": [1, 0], "b": [3, 4]}
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert cursor.moved("b", 4, 0).at("b") == (4, 0)
    assert (cursor.at("b"), cursor.at("unknown"), Cursor.start().to_json()) == ((3, 4), (0, 0), {})


BAD_CURSORS: list[JsonValue] = [None, [], {"a": 1}, {"a": [1]}, {"a": [1, 2.0]}, {"a": [True, 0]}, {"": [0, 0]}]


@pytest.mark.parametrize("value", BAD_CURSORS)
def test_a_bad_cursor_is_refused(value: JsonValue) -> None:
    with pytest.raises(DataError, match="a cursor is"):
        Cursor.from_json(value)
