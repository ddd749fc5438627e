"""Reads the shards of a range of seeds in a process with little memory and time: `python -m tests.shard_fuzzer 0 300`.

Owns: the limits, the verdict on each. Does not own: making them (`tests/shard_mutations.py`). Standard error names each
seed before it is read, so that its last line tells what a process died of; standard output is a `Tally`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from engines.config import Frozen
from engines.errors import DataError
from engines.experience import Experience
from tests.shard_mutations import BOMBS, Mutation, mutation
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.ledger import policy_versions
from trinity_tasks.buffer.row_checks import check_groups, validate
from trinity_tasks.buffer.shards import decode, read_columns

MEMORY_BYTES = 2 * 2**30
"""Beyond what the process has mapped when it has imported everything; twice that to make bombs, too."""
CPU_S_PER_SHARD = 0.5
CPU_S = 60
COLUMNS = ("eid_batch", "tokens", "reward", "info")


class Tally(Frozen):
    """What became of the shards of a range."""

    verdicts: dict[str, dict[str, int]]
    """Kind -> verdict -> how many."""
    wrong: list[str]
    """Those that came to another verdict than they must, or raised something else than DataError."""

    def num(self, verdict: str) -> int:
        return sum(each.get(verdict, 0) for each in self.verdicts.values())


def verdict(shard: Mutation) -> str:
    """What the shard comes to: refused, equal, or other rows."""
    try:
        found = decode(shard.data, "shard")
        rows = found.rows(0, found.num_rows)
    except DataError as error:
        _columns(shard, None)
        return "refused" if shard.reason in str(error) else f"refused for another reason: {error}"
    _columns(shard, len(rows))
    if encode(rows) == encode(shard.original):
        return "equal"
    _check_trainable(rows)
    return "other"


def _columns(shard: Mutation, num_rows: int | None) -> None:
    """A reader of a few columns refuses what `decode` does, but for what lies in the others."""
    try:
        table = read_columns(shard.data, COLUMNS, "shard")
    except DataError:
        assert num_rows is None, "read_columns refuses what decode takes"
    else:
        assert num_rows in (None, table.num_rows), "read_columns has other rows than decode"


def _check_trainable(rows: list[Experience]) -> None:
    """What the trainer does with any rows before it trains them."""
    validate(rows)
    check_groups(rows)
    assert all(np.isreal(value) for row in rows for value in row.metrics.values())
    assert all(version is not None for version in policy_versions(rows))


def _limit(num_shards: int, memory_bytes: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    seconds = CPU_S + int(CPU_S_PER_SHARD * num_shards)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def fuzz(names: list[str]) -> Tally:
    """names: seeds, or keys of `BOMBS`."""
    verdicts: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for name in names:
        print(name, file=sys.stderr)
        shard = mutation(int(name)) if name.isdecimal() else BOMBS[name]()
        try:
            found = verdict(shard)
        except Exception as error:  # whatever it is: it must have been a DataError
            found = f"{type(error).__name__}: {error}"
        verdicts.setdefault(shard.kind, Counter())[found] += 1
        if found != shard.verdict and (shard.verdict != "either" or found not in ("refused", "equal", "other")):
            wrong.append(f"{name} ({shard.kind}) must be {shard.verdict}, it is {found[:300]}")
    return Tally(verdicts={kind: dict(counts) for kind, counts in verdicts.items()}, wrong=wrong)


def run_fuzzer(arguments: list[str], root: Path) -> Tally:
    """In a process of its own. Raises AssertionError, with the last seed, if that dies."""
    command = [sys.executable, "-W", "error", "-m", "tests.shard_fuzzer", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode} at:\n{done.stderr[-2000:]}"
    return Tally.model_validate_json(done.stdout)


def main(arguments: list[str]) -> None:
    if arguments == ["bombs"]:
        names, memory_bytes = list(BOMBS), 2 * MEMORY_BYTES
    else:
        names, memory_bytes = [str(seed) for seed in range(*map(int, arguments))], MEMORY_BYTES
    _limit(len(names), memory_bytes)
    print(fuzz(names).model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
