"""Whatever bytes a shard has, reading it gives DataError or rows that can train: no other error, no crash, no flood.

Most of it runs in a process with limits of memory and time, so that a crash is seen and a flood ends. A reader then
leaves out what is damaged, notes it, and trains every other row.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engines.errors import DataError
from engines.experience import Experience
from tests.experience_rows import make_rows, uids
from tests.shard_fuzzer import run_fuzzer
from tests.shard_mutations import DAMAGES, foreign, not_utf8, one_text, one_token
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter, bounds, encoding
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.shards import decode
from trinity_tasks.buffer.source import Batch, BatchSource, batch_metrics
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.storage import Storage

slow = [pytest.mark.slow, pytest.mark.fuzz]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("first", "number"), [(0, 300), *(pytest.param(first, 2500, marks=slow) for first in range(300, 10_300, 2500))]
)
def test_what_is_no_good_shard_is_refused(first: int, number: int, repository_root: Path) -> None:
    tally = run_fuzzer([str(first), str(first + number)], repository_root)
    print(tally.model_dump_json(indent=1))
    assert tally.wrong == []
    assert tally.num("refused") + tally.num("equal") + tally.num("other") == number
    assert min(tally.num("refused") / number, tally.num("equal") / number * 10) > 0.5
    assert len(tally.verdicts) > 20


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_few_bytes_cannot_fill_the_memory(repository_root: Path) -> None:
    tally = run_fuzzer(["bombs"], repository_root)
    assert tally.wrong == []
    assert (tally.num("refused"), tally.num("equal")) == (4, 2)


@pytest.mark.parametrize(("data", "size"), [(one_text(600, 10_000), 6e6), (one_token(5, 2000), 4e6)])
def test_a_small_bomb_is_refused_before_it_is_whole(data: bytes, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(data) < 2e4
    assert decode(data, "shard").num_bytes > size
    monkeypatch.setattr(bounds, "MAX_SHARD_BYTES", 2**20)
    monkeypatch.setattr(bounds, "PIECE_BYTES", 2**17)
    with _watched_memory() as pool:
        with pytest.raises(DataError, match=r"a shard has at most (65536 rows and )?1048576"):
            decode(data, "shard")
        assert pool.max_memory() < 2**21


@contextlib.contextmanager
def _watched_memory() -> Iterator[Any]:
    """A pool that counts what pyarrow allocates meanwhile."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(usual)


def test_a_write_beyond_what_a_reader_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_WRITTEN_BYTES", 10_000)
    writer = ExperienceWriter(str(tmp_path), writer="a")
    writer.write(make_rows(20, 2))
    with pytest.raises(DataError, match=r"800 rows have \d+ bytes, one write at most 10000: split it"):
        writer.write(make_rows(400, 2))


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def test_no_pickle_in_the_metadata_is_loaded(tmp_path: Path) -> None:
    """pyarrow once loaded those of extension types from a file's own schema."""
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    rows = make_rows(2, 2)
    table = _columns_of(rows)
    field = table.schema.field("reward")
    extended = field.with_metadata(
        {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": trap}
    )
    schema = table.schema.set(table.schema.get_field_index("reward"), extended).with_metadata({b"pandas": trap})
    data = foreign(table.cast(schema))
    with contextlib.suppress(DataError):
        assert uids(decode(data, "shard").rows(0, 4)) == uids(rows)
    assert not (tmp_path / "sprung").exists()
    assert pickle.loads(trap) is None
    assert (tmp_path / "sprung").exists(), "it would have"


def _columns_of(rows: list[Experience]) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(encode(rows)))


# -- through a reader -------------------------------------------------------------------------------------------------


def _damage(draw: random.Random, data: bytes) -> bytes:
    """What a disk, a proxy or another program may make of a shard."""
    table = _columns_of(make_rows(1, 2, batch="bad"))
    texts = table.append_column("prompt_text", not_utf8(2))
    hostile = [foreign(texts), foreign(table.drop(["tokens"])), b"", one_text(70_000, 1)]
    while (changed := draw.choice(DAMAGES)(draw, data, data[::-1])) == data:
        pass
    return draw.choice([changed, changed, changed, *hostile])


def _drained(store: Storage, max_damaged_shards: int) -> list[Batch]:
    reader = ExperienceReader(store, "main", max_damaged_shards=max_damaged_shards)
    batches = BatchSource(Fifo(reader, 7), Ledger(store), timeout_s=30.0, last_batch="train", read_ahead=True)

    async def take() -> list[Batch]:
        taken, position = list[Batch](), Position()
        while (batch := await batches.next_batch(len(taken) + 1, position, attempt=1)) is not None:
            taken.append(batch)
            position = batch.entry.after
        return taken

    with contextlib.closing(batches):
        return asyncio.run(take())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slow) for seed in range(1, 50))])
def test_a_reader_leaves_out_what_is_damaged_and_nothing_else(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    store = Storage(str(tmp_path / "job"))
    good: list[str] = []
    damaged: dict[str, int] = {}
    for name in ("a", "b"):
        with ExperienceWriter(store, "main", name) as writer:
            for index in range(20):
                rows = make_rows(draw.randint(0, 3), draw.randint(1, 3), batch=f"{name} {index}")
                record = writer.write(rows)
                if index < 19 and draw.random() < 0.3:
                    data = _damage(draw, store.read_bytes(record.name))
                    store.write(record.name, data)
                    damaged[record.name] = len(data)
                else:
                    good += uids(rows)
            writer.end()
    assert len(damaged) > 3
    taken = _drained(store, len(damaged))
    assert sorted(row.eid.uid for batch in taken for row in batch.experiences) == sorted(good)
    passed = [part for batch in taken for part in batch.entry.passed]
    assert sorted(part.shard for part in passed) == sorted(damaged)
    assert {(part.reason, part.num_rows) for part in passed} == {("damaged", 0)}
    counts = [batch_metrics(*batch).get("sample/num_damaged_shards", 0.0) for batch in taken]
    assert sum(counts) == len(damaged)
    notes: list[Any] = [store.read_json(info.name) for info in store.list("experiences/main/damaged")]
    assert {note["shard"]: note["num_bytes"] for note in notes} == damaged

    for info in itertools.chain(store.list("ledger"), store.list("experiences/main/damaged")):
        store.remove(info.name)
    with pytest.raises(DataError, match=rf"raise max_damaged_shards \({len(damaged) - 1}; {len(damaged)} found\)"):
        _drained(store, len(damaged) - 1)
