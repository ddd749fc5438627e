"""Commits when a process was killed or overtaken: the one before stays, and the old holder can write nothing more."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.errors import LeaseLost
from tests.held_job import Job, open_job, overtaken, restored_step
from trinity_tasks.storage import Storage


@pytest.fixture
def local_job(tmp_path: Path) -> Iterator[Job]:
    job = open_job(str(tmp_path / "store"), tmp_path)
    yield job
    job.lease.release()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.held_job import open_job, staged
from trinity_tasks.storage import Storage
job = open_job(sys.argv[1], Path(sys.argv[2]))
job.commit(10)
original = getattr(Storage, sys.argv[3])
def die(self, *args, **kwargs):
    if any(sys.argv[4] in str(arg) for arg in args):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *args, **kwargs)
setattr(Storage, sys.argv[3], die)
job.commit(20)
"""


@pytest.mark.parametrize(
    ("method", "argument"),
    [("put_file", "model/model.safetensors"), ("create_json", "commits/00000002")],
    ids=["between two uploads", "between uploads and manifest"],
)
def test_sigkill_during_a_commit_leaves_the_one_before(
    shared_store_url: str, tmp_path: Path, python_environment: dict[str, str], method: str, argument: str
) -> None:
    command = [sys.executable, "-c", KILLED, shared_store_url, str(tmp_path), method, argument]
    assert subprocess.run(command, env=python_environment, timeout=60).returncode == -signal.SIGKILL
    job = open_job(shared_store_url, tmp_path / "next")
    assert job.lease.took_over
    restored = job.checkpoints.restore_latest(tmp_path / "back")
    assert restored is not None
    assert restored.step == restored_step(tmp_path / "back") == 10
    orphans = job.checkpoints.clean_orphans()
    assert [orphan.split("-")[0] for orphan in orphans] == ["checkpoints/global_step_00000020"]
    assert job.objects() == {f"{restored.prefix}/{file.path}" for file in restored.files}
    assert [manifest.kind for manifest in (job.checkpoints._read(1), job.checkpoints._read(2))] == [
        "checkpoint",
        "fence",
    ]
    assert job.commit(20).number == 3
    job.lease.release()


def test_zombie_is_refused_by_the_fence(shared_store_url: str, tmp_path: Path) -> None:
    zombie = open_job(shared_store_url, tmp_path / "zombie")
    zombie.commit(10)
    overtaken(zombie)
    job = open_job(shared_store_url, tmp_path / "job")
    # The zombie has asked for its lease just before it was overtaken, and now goes on: nothing but the fence stops it.
    zombie.lease.check = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(LeaseLost, match=r"commit 2 was made by another process \(lease 2, ours is 1\)"):
        zombie.commit(20)
    assert job.commit(30).number == 3
    with pytest.raises(LeaseLost, match="commit 2 was made by another process"):
        zombie.commit(20)
    assert [manifest.step for manifest in job.checkpoints.commits()] == [10, 30]
    assert len(job.objects()) == 6
    job.lease.release()
    zombie.lease.release()


def test_zombie_that_asks_is_told_who_has_the_job(local_job: Job) -> None:
    overtaken(local_job)
    job = open_job(local_job.store.url, local_job.folder / "job")
    with pytest.raises(LeaseLost, match=r"was taken over by pid \d+ on .* \(lease 2, ours was 1\)"):
        local_job.commit(10)
    assert job.objects() == set()
    job.lease.release()


def test_commit_that_a_zombie_made_before_the_fence_counts(local_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    local_job.commit(10)
    overtaken(local_job)
    create_json = Storage.create_json

    def zombie_first(self: Storage, path: str, value: dict[str, object], **kwargs: bool) -> None:
        if value.get("kind") == "fence":
            monkeypatch.setattr(Storage, "create_json", create_json)
            local_job.lease.check = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
            local_job.commit(20)
        create_json(self, path, value, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Storage, "create_json", zombie_first)
    job = open_job(local_job.store.url, local_job.folder / "job")
    latest = job.checkpoints.latest()
    assert latest is not None
    assert latest.step == 20
    with pytest.raises(LeaseLost, match="commit 3 was made by another process"):
        local_job.commit(30)
    job.lease.release()


def test_released_job_goes_on_without_a_fence(local_job: Job) -> None:
    local_job.commit(10)
    local_job.lease.release()
    job = open_job(local_job.store.url, local_job.folder)
    assert job.commit(20).number == 2
    job.lease.release()
