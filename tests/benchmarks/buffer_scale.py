"""The next batch in a job of a million experiences against one of ten thousand, and the memory of reading them all.

Both jobs have full rows in shards of 1,024; the shards of the large one are hard links to a few files, so that it fits
any disk and is read from the page cache, as the small one is. Taken in turns, ratios of the same round:

cold: a new reader at a cursor in the middle. warm: the same reader going on. new_writer: a reader in the middle finds
that a writer has registered, and takes its rows. starved: a new reader at the end finds nothing but a new writer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks import machine
from tests.benchmarks.buffer_rows import BATCH_ROWS, DIFFERENT_SHARDS, SHARD_ROWS, WRITER, make_rows, write_job
from tests.benchmarks.pairs import Worker, median_ratio
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import Cursor, Position
from trinity_tasks.buffer.reader import RELIST_S
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.storage import Storage

SIZES = {"10k": 10_000, "1m": 1_000_000}
ROUNDS = 15
WARM_BATCHES = 4
CASES = ("cold", "warm", "new_writer", "starved")


class Job:
    """One of the jobs, and where its reader is."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self._store = Storage(str(folder))
        self._num_shards = write_job(folder, num_rows) // SHARD_ROWS
        self._new = make_rows(BATCH_ROWS, DIFFERENT_SHARDS)
        self._num_writers = 0
        self._ahead_s = 0.0

    def round(self) -> dict[str, float]:
        """Seconds of a batch in each case."""
        middle = Cursor.start().moved(WRITER, self._num_shards // 2, 0)
        strategy, position, cold_s = self._first(self._known(middle))
        warm: list[float] = []
        for _ in range(WARM_BATCHES):
            position, seconds = _next(strategy, position)
            warm.append(seconds)
        self._add_writer()
        self._ahead_s += RELIST_S
        position, new_writer_s = _next(strategy, position)
        assert position.cursor.at(self._last_writer) == (1, 0), "the new writer was not found"
        end = self._known(Cursor.start().moved(WRITER, self._num_shards, 0))
        self._add_writer()
        _, position, starved_s = self._first(end)
        assert position.cursor.at(self._last_writer) == (1, 0), "the new writer was not found"
        return dict(zip(CASES, (cold_s, statistics.fmean(warm), new_writer_s, starved_s), strict=True))

    @property
    def _last_writer(self) -> str:
        return f"other-{self._num_writers}"

    def _known(self, cursor: Cursor) -> Position:
        """With every row of the writers that came later consumed."""
        for number in range(1, self._num_writers + 1):
            cursor = cursor.moved(f"other-{number}", 1, 0)
        return Position(cursor)

    def _add_writer(self) -> None:
        self._num_writers += 1
        with ExperienceWriter(self._store, writer=self._last_writer, durable=False) as writer:
            writer.write(self._new)

    def _first(self, position: Position) -> tuple[Fifo, Position, float]:
        started = time.perf_counter()
        reader = ExperienceReader(self._store, "main", clock=lambda: time.monotonic() + self._ahead_s)
        strategy = Fifo(reader, BATCH_ROWS)
        after, _ = _next(strategy, position)
        return strategy, after, time.perf_counter() - started


def _next(strategy: Fifo, position: Position) -> tuple[Position, float]:
    """(behind the batch, seconds)."""
    started = time.perf_counter()
    claim = strategy.claim(position, step=1)
    assert claim is not None, "the next batch was not found"
    rows = strategy.read(claim.ref)
    strategy.forget(claim.ref)
    assert len(rows) == BATCH_ROWS
    return claim.after, time.perf_counter() - started


def buffer_scale() -> dict[str, float]:
    """Medians of fifteen rounds; the measure is the worst case."""
    with tempfile.TemporaryDirectory() as name:
        jobs = {size: Job(Path(name, size), num_rows) for size, num_rows in SIZES.items()}
        _, *rounds = [{size: job.round() for size, job in jobs.items()} for _ in range(1 + ROUNDS)]
    seconds = {size: {case: [each[size][case] for each in rounds] for case in CASES} for size in SIZES}
    ratios = {case: median_ratio(seconds["1m"][case], seconds["10k"][case]) for case in CASES}
    figures = {"buffer_1m_vs_10k": max(ratios.values()), "python_loop_ms": machine.python_loop_ms()}
    for case in CASES:
        figures[f"buffer_1m_vs_10k_{case}"] = ratios[case]
        for size in SIZES:
            figures[f"buffer_{size}_{case}_ms"] = 1000 * statistics.median(seconds[size][case])
    return figures


def buffer_memory() -> dict[str, float]:
    """Highest resident memory of a process that reads a million experiences in batches of 512."""
    with tempfile.TemporaryDirectory() as name:
        num_rows = write_job(Path(name), SIZES["1m"])
        with Worker("tests.benchmarks.buffer_worker", {"action": "read", "folder": name}, num_threads=1) as worker:
            read = worker.step()
    if read["rows"] != num_rows // BATCH_ROWS * BATCH_ROWS:
        raise AssertionError(f"{read['rows']:.0f} of {num_rows} rows were read")
    return {
        "buffer_rss_mb": read["peak_rss_mb"],
        "buffer_rss_growth_mb": read["growth_mb"],
        "buffer_1m_read_s": read["wall_s"],
        "buffer_1m_read_cpu_s": read["cpu_s"],
    }
