"""Four writers and a trainer on one job, killed at random again and again: each row trains once, or is listed as left.

Proved: rows (every one that a writer made is trained exactly once, or a ledger entry says why not, or its shard's notes
do), the ledger (it says of each step what the trainer had, content included), objects (nothing half-written is there to
see), memory (what is resident does not grow with what was done).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import s3_servers
from tests.soak.accounts import Account, account_of, shards_by_writer, unexpected_objects
from tests.soak.members import Plan
from tests.soak.report import Report, run_soak
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage

pytestmark = pytest.mark.integration

WRITERS = ("agent-0", "agent-1", "agent-2", "agent-3")
GROWTH_MB = 32.0
"""Resident memory of short-lived processes differs by about 10 MB from life to life."""

soak = [pytest.mark.slow, pytest.mark.soak]


def soaked(url: str, scratch: Path, root: Path, **fields: Any) -> Report:
    settings = {"seed": 20261203, "writers": WRITERS, "pause_s": 0.01, "max_life_s": 0.5}
    plan = Plan(**{**settings, "url": url, "scratch": scratch, **fields})
    return run_soak(plan, {**os.environ, "PYTHONPATH": str(root)}, root)


def assert_each_row_once(account: Account) -> None:
    trained = Counter(row.uid for batch in account.trained for row in batch)
    assert set(trained.values()) == {1}, "a row has trained twice"
    assert all(len(left) == 1 for left in account.left.values()), "a row was left behind twice"
    assert account.left.keys().isdisjoint(trained), "a row that has trained was left behind"
    assert account.dropped.keys().isdisjoint(account.written), "a row that was dropped is in a shard"
    neither = account.written.keys() - trained.keys() - account.left.keys()
    lost = {uid for uid in neither if account.is_behind(account.written[uid])}
    assert not lost, "neither trained nor left behind"
    next_step = len(account.trained) + 1
    assert all(account.is_stale(uid, next_step) for uid in neither), "the last batch left rows that could train"


def assert_accounted(store: Storage) -> Account:
    """Everything that does not depend on how many kills there were."""
    account = account_of(store)
    assert account.last is not None
    assert (account.last.finished, account.last.step) == (True, len(account.trained))
    assert account.trained == account.ledger
    assert_each_row_once(account)
    for uid, (left,) in account.left.items():
        assert (left.reason, account.is_stale(uid, left.step)) == ("stale", True)
    for step, batch in enumerate(account.trained, 1):
        assert not any(account.is_stale(row.uid, step) for row in batch)
    dropped = [uid for uid, place in account.dropped.items() if account.is_behind(place)]
    assert account.num_dropped_in_ledger == len(dropped)
    assert min(len(account.left), len(dropped)) > 0, "nothing was left behind or dropped: the soak is too short"
    return account


def assert_nothing_half_written(store: Storage) -> None:
    """The next holder of the job cleans what killed trainers left; then every object has its name in the layout."""
    with Lease.acquire(store) as lease:
        CheckpointStore(store, lease).clean_orphans()
    writers = shards_by_writer(store)
    assert set(writers) == set(WRITERS)
    assert unexpected_objects(store, writers) == []


def assert_flat(report: Report) -> None:
    for name in (*WRITERS, "trainer"):
        first, _, last = report.peaks_mb(name)
        assert 0 < last <= first + GROWTH_MB, (name, report.peaks_mb(name))


def told(report: Report, account: Account, title: str) -> str:
    """The figures of a run, in a few lines."""
    num_rows = sum(len(batch) for batch in account.trained)
    lines = [
        f"{title}: {sum(report.kills.values())} kills {report.kills} in {report.seconds:.0f} s",
        f"{account.num_shards} shards, {len(account.written)} rows: {num_rows} trained in {len(account.trained)} steps,"
        f" {len(account.left)} left as stale, {len(account.dropped)} dropped before",
        *(f"{name}: resident MB by thirds {report.peaks_mb(name)}" for name in (*WRITERS, "trainer")),
    ]
    return "\n".join(lines)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("server", "num_kills"),
    [
        (None, 8),
        pytest.param(None, 200, marks=soak),
        pytest.param("moto", 30, marks=soak),
        pytest.param("seaweedfs", 200, marks=soak),
    ],
)
def test_killed_at_random(
    server: str | None, num_kills: int, request: pytest.FixtureRequest, tmp_path: Path, repository_root: Path
) -> None:
    environment = request.getfixturevalue(server) if server else {}
    with s3_servers.using(environment):
        url = f"s3://{s3_servers.BUCKET}/soak" if server else str(tmp_path / "job")
        report = soaked(url, tmp_path / "scratch", repository_root, num_kills=num_kills, min_shards=30)
        store = Storage(url)
        account = assert_accounted(store)
        assert_nothing_half_written(store)
    print(told(report, account, server or "local folder"))
    assert sum(report.kills.values()) == num_kills
    if num_kills >= 100:  # before, most of it is what a process needs to get going
        assert_flat(report)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_one_long_life_stays_small(tmp_path: Path, repository_root: Path) -> None:
    """Without kills, so that each process lives for the whole run."""
    store = Storage(str(tmp_path / "job"))
    report = soaked(store.url, tmp_path / "scratch", repository_root, num_kills=0, min_shards=3000, pause_s=0)
    print(told(report, assert_accounted(store), "one life"))
    assert_flat(report)
