"""Experiences per second and core through the buffer, and against what Trinity-RFT does, all in turns in one run.

Speed of a side is rows by processor time, of all its threads: other work on the machine does not count, its slowness
does, which `python_loop_..._ms` tell. Files are read from the page cache. That both read the same tokens is checked.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.buffer_rows import SHARD_ROWS, write_job
from tests.benchmarks.pairs import Side, Worker, interleave, median_ratio

NUM_SHARDS = 16
"""Of a step; 16,384 rows, 50 MB."""
ROUNDS = 5


def buffer_speed() -> dict[str, float]:
    """Medians of five rounds."""
    before_ms = machine.python_loop_ms(time.process_time)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_job(Path(name, "job"), NUM_SHARDS * SHARD_ROWS)
        workers = {side: stack.enter_context(worker) for side, worker in _workers(Path(name)).items()}
        sides = interleave(workers, ROUNDS)
    _check_same_rows(sides)
    rates = {side: measured.first["rows"] / measured.median_cpu_s for side, measured in sides.items()}
    wall_rates = {side: measured.first["rows"] / measured.median_s for side, measured in sides.items()}
    return {
        "decode_experiences_per_s": rates["read"],
        "encode_experiences_per_s": rates["write"],
        "buffer_read_vs_sqlite": median_ratio(sides["sqlite_read"].cpu_s, sides["read"].cpu_s),
        "buffer_write_vs_sqlite": median_ratio(sides["sqlite_write"].cpu_s, sides["write"].cpu_s),
        "buffer_bytes_vs_sqlite": sides["write"].first["bytes"] / sides["sqlite_write"].first["bytes"],
        "python_loop_before_ms": before_ms,
        "python_loop_after_ms": machine.python_loop_ms(time.process_time),
        **{f"{side}_experiences_per_s": rate for side, rate in rates.items()},
        **{f"{side}_experiences_per_s_wall": rate for side, rate in wall_rates.items()},
        "buffer_bytes_per_row": sides["write"].first["bytes"] / sides["write"].first["rows"],
    }


def _workers(folder: Path) -> dict[str, Worker]:
    def ours(**spec: Any) -> Worker:
        return Worker("tests.benchmarks.buffer_worker", spec, num_threads=1)

    def sqlite(action: str) -> Worker:
        spec = {"action": action, "file": str(folder / f"{action}.db"), "num_shards": NUM_SHARDS}
        return Worker("tests.benchmarks.sqlite_worker", spec, num_threads=1)

    return {
        "read": ours(action="read", folder=str(folder / "job")),
        "write": ours(action="write", folder=str(folder / "written"), num_shards=NUM_SHARDS),
        "sqlite_read": sqlite("read"),
        "sqlite_write": sqlite("write"),
    }


def _check_same_rows(sides: dict[str, Side]) -> None:
    rows = {side: measured.first["rows"] for side, measured in sides.items()}
    tokens = {side: measured.first["tokens"] for side, measured in sides.items() if "tokens" in measured.first}
    if set(rows.values()) != {NUM_SHARDS * SHARD_ROWS} or len(set(tokens.values())) != 1:
        raise AssertionError(f"the sides do not do the same work: rows {rows}, tokens {tokens}")
