"""Our side of writing and reading experiences, through the public writer and the strategy fifo.

A step writes `num_shards` shards to a new folder, or reads all that a folder holds, in batches of 512. Files are not
waited for.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.buffer_rows import BATCH_ROWS, SHARD_ROWS, WRITER, make_rows
from tests.benchmarks.pairs import Commands
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.storage import Storage


def main() -> None:
    """Serve steps of argv[1], JSON: action ("write" or "read"), folder, num_shards (to write)."""
    spec = json.loads(sys.argv[1])
    {"write": _serve_writes, "read": _serve_reads}[spec["action"]](spec, Commands())


def _serve_writes(spec: dict[str, Any], commands: Commands) -> None:
    shards = [make_rows(SHARD_ROWS, index) for index in range(spec["num_shards"])]
    folder = Path(spec["folder"])
    commands.ready()
    while commands.wait():
        store = Storage(str(folder))
        with ExperienceWriter(store, writer=WRITER, durable=False) as writer:
            commands.begin()
            written = [writer.write(rows) for rows in shards]
            commands.end()
        store.flush()
        shutil.rmtree(folder)
        commands.report(rows=sum(shard.rows for shard in written), bytes=sum(shard.size for shard in written))


def _serve_reads(spec: dict[str, Any], commands: Commands) -> None:
    store = Storage(spec["folder"])
    commands.ready()
    while commands.wait():
        commands.begin()
        rows, tokens = read_all(store)
        commands.end()
        commands.report(rows=rows, tokens=tokens, peak_rss_mb=machine.peak_rss_kb() / 1024)


def read_all(store: Storage) -> tuple[int, int]:
    """(rows, tokens) of a job, read once from its beginning."""
    strategy, position = Fifo(ExperienceReader(store, "main"), BATCH_ROWS), Position()
    num_rows = num_tokens = 0
    while (claim := strategy.claim(position, step=1)) is not None:
        rows = strategy.read(claim.ref)
        strategy.forget(claim.ref)
        position = claim.after
        num_rows += len(rows)
        num_tokens += sum(len(row.tokens) for row in rows)
    return num_rows, num_tokens


if __name__ == "__main__":
    main()
