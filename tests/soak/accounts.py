"""The account of a job's rows after a soak: what was written, what trained, what was left behind, and why.

Owns: reading it from the job's folder, without the code that chose the rows. Does not own: what it must be (the tests).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engines.experience import Experience
from tests.soak.members import LOG
from tests.soak.rows import MAX_STALENESS, digest, made
from trinity_tasks.buffer.layout import BufferFolder, ShardId
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.notes import parse_notes
from trinity_tasks.buffer.shards import decode
from trinity_tasks.checkpoint import CheckpointStore, Manifest
from trinity_tasks.storage import Storage


class Trained(NamedTuple):
    """One row of one step, as the trainer had it."""

    uid: str
    digest: str


class Place(NamedTuple):
    """Where a row lies."""

    writer: str
    shard: int
    row: int


class Left(NamedTuple):
    """A row that a step left behind."""

    step: int
    reason: str


@dataclass
class Account:
    """Every row of a job."""

    written: dict[str, Place] = field(default_factory=dict[str, Place])
    """uid -> where the job's shards hold the row."""
    oldest: dict[str, int] = field(default_factory=dict[str, int])
    """Group -> version of the oldest weights that sampled one of its rows."""
    num_shards: int = 0
    dropped: dict[str, Place] = field(default_factory=dict[str, Place])
    """uid -> which shard's notes name it."""
    trained: list[list[Trained]] = field(default_factory=list[list[Trained]])
    """Step 1 first, from the last commit."""
    ledger: list[list[Trained]] = field(default_factory=list[list[Trained]])
    """The same, as the ledger refers to the shards."""
    left: dict[str, list[Left]] = field(default_factory=dict[str, list[Left]])
    """uid -> when and why it was left behind."""
    num_dropped_in_ledger: int = 0
    last: Manifest | None = None

    def is_stale(self, uid: str, step: int) -> bool:
        """Whether the row's group has a row that is too old for the step."""
        return self.oldest[_group(uid)] < step - 1 - MAX_STALENESS

    def is_behind(self, place: Place) -> bool:
        """Whether the last commit's cursor lies behind it."""
        assert self.last is not None
        return (place.shard, place.row) < self.last.cursor.at(place.writer)


def account_of(store: Storage) -> Account:
    """Reads everything in the job's folder. Raises AssertionError if a shard is not what its writer makes."""
    account = Account()
    shards = dict(_shards(store, account))
    ledger = Ledger(store)
    steps = ledger.steps()
    assert steps == list(range(1, len(steps) + 1)), "the ledger has a gap"
    for step in steps:
        _add(account, shards, ledger.read(step))
    with tempfile.TemporaryDirectory() as folder:
        account.last = CheckpointStore(store).restore_latest(Path(folder) / "restored")
        for line in (Path(folder) / "restored" / LOG).read_text().splitlines():
            step, uid, found = line.split("\t")
            if int(step) > len(account.trained):
                account.trained.append([])
            assert int(step) == len(account.trained), "the log has a gap"
            account.trained[-1].append(Trained(uid, found))
    return account


def _shards(store: Storage, account: Account) -> Iterator[tuple[str, list[Experience]]]:
    """(path, rows) of each, compared with what its writer makes of it."""
    for info in store.list("experiences/main"):
        if (shard_id := ShardId.parse(info.name)) is None:
            continue
        shard = decode(store.read_bytes(info.name), info.name)
        rows, expected = shard.rows(0, shard.num_rows), made(shard_id.writer, shard_id.index)
        dropped = [uid for uid, *_ in parse_notes(shard.notes, info.name).dropped]
        assert [digest(row) for row in rows] == [digest(row) for row in expected.kept], info.name
        assert dropped == [row.uid for row in expected.dropped], info.name
        account.num_shards += 1
        account.dropped.update((uid, Place(shard_id.writer, shard_id.index, 0)) for uid in dropped)
        for number, row in enumerate(rows):
            assert row.eid.uid not in account.written
            account.written[row.eid.uid] = Place(shard_id.writer, shard_id.index, number)
            oldest = account.oldest.get(row.eid.tid, row.model_version)
            account.oldest[row.eid.tid] = min(oldest, row.model_version)
        yield info.name, rows


def _add(account: Account, shards: dict[str, list[Experience]], entry: LedgerEntry) -> None:
    rows = [row for part in entry.ranges for row in shards[part.shard][part.start : part.stop]]
    assert len(rows) == entry.num_rows
    account.ledger.append([Trained(row.eid.uid, digest(row)) for row in rows])
    for part in entry.passed:
        for row in shards[part.shard][part.start : part.stop]:
            account.left.setdefault(row.eid.uid, []).append(Left(entry.step, part.reason))
    account.num_dropped_in_ledger += sum(num_rows for num_rows, _ in entry.dropped.values())


def _group(uid: str) -> str:
    return uid.rsplit("/", 3)[0]


def unexpected_objects(store: Storage, writers: dict[str, int]) -> list[str]:
    """Objects of the job that no part of it names; writers: name -> number of shards."""
    folder = BufferFolder("main")
    expected = {folder.shard(ShardId(index, name)) for name, number in writers.items() for index in range(number)}
    expected |= {path for name in writers for path in (folder.end(name), folder.registration(name))}
    expected |= {f"ledger/step_{step:08d}.json" for step in Ledger(store).steps()}
    manifests = CheckpointStore(store).commits()
    prefixes = tuple(manifest.prefix + "/" for manifest in manifests)
    found = {info.name for info in store.list(recursive=True)}
    assert expected <= found, f"missing: {sorted(expected - found)[:5]}"
    return sorted(name for name in found - expected if not name.startswith(("lease/", "commits/", *prefixes)))


def shards_by_writer(store: Storage) -> dict[str, int]:
    """What each writer's end says."""
    ends = [info.name for info in store.list("experiences/main") if info.name.endswith(".end")]
    markers: dict[str, Any] = {name: store.read_json(name) for name in ends}
    return {name.rsplit("/", 1)[-1].removesuffix(".end"): marker["shards"] for name, marker in markers.items()}
