"""A trainer that chooses among everything there is, killed again and again, trains the batches of one that was not.

The rows are all there before it starts, so that nothing but the position decides what comes next.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from tests.soak.accounts import Account, account_of
from tests.soak.members import USE_COUNT_LIMIT, Plan, write_next
from tests.soak.report import run_soak
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.storage import Storage

pytestmark = pytest.mark.integration

Pool = Literal["newest", "priority"]
NUM_SHARDS = 25


def trained(strategy: Pool, folder: Path, root: Path, num_kills: int) -> tuple[Account, Storage]:
    """The account of a job with the rows of two writers, after a trainer has come to its end."""
    store = Storage(str(folder / "job"))
    for name in ("agent-0", "agent-1"):
        with ExperienceWriter(store, "main", name) as writer:
            while writer.next_index < NUM_SHARDS:
                write_next(writer)
            writer.end()
    plan = Plan(
        url=store.url,
        scratch=folder / "scratch",
        seed=20261203,
        num_kills=num_kills,
        writers=(),
        strategy=strategy,
        pause_s=0.05 if num_kills else 0,
        max_life_s=0.15,
    )
    report = run_soak(plan, {**os.environ, "PYTHONPATH": str(root)}, root)
    assert sum(report.kills.values()) == num_kills
    return account_of(store), store


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_kills", [4, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.soak])])
@pytest.mark.parametrize(("strategy", "limit"), [("newest", 1), ("priority", USE_COUNT_LIMIT)])
def test_the_same_batches(strategy: Pool, limit: int, num_kills: int, tmp_path: Path, repository_root: Path) -> None:
    killed, store = trained(strategy, tmp_path / "killed", repository_root, num_kills)
    whole, other = trained(strategy, tmp_path / "whole", repository_root, 0)
    assert killed.trained == killed.ledger == whole.trained
    for step in range(1, len(whole.trained) + 1):
        ours, theirs = Ledger(store).read(step), Ledger(other).read(step)
        assert (ours.ranges, ours.passed, ours.after) == (theirs.ranges, theirs.passed, theirs.after), step

    uses = Counter(row.uid for batch in killed.trained for row in batch)
    assert max(uses.values()) == limit
    assert {left.reason for each in killed.left.values() for left in each} == {"evicted"}
    assert {len(each) for each in killed.left.values()} == {1}
    assert killed.left.keys() | uses.keys() == killed.written.keys()
    for uid, (left,) in killed.left.items():
        later = [row for batch in killed.trained[left.step - 1 :] for row in batch if row.uid == uid]
        assert later == [], "trained in or after the step that evicted it"
