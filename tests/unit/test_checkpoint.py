"""CheckpointStore: what a crash, a damaged object, a second writer and a full disk can and cannot do."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.errors import CheckpointError, StorageError
from tests.faulty_s3 import FaultyS3
from tests.held_job import CURSOR, Job, flip, open_job, restored_step, safetensors, staged
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage


def impatient(proxy: FaultyS3, url: str) -> Storage:
    """A Storage behind the proxy that tries nothing twice."""
    options = {"endpoint_url": proxy.url, "config_kwargs": {"retries": {"max_attempts": 0}}}
    return Storage(url, options, retry_s=0)


@pytest.fixture
def job(shared_store_url: str, tmp_path: Path) -> Iterator[Job]:
    job = open_job(shared_store_url, tmp_path)
    yield job
    job.checkpoints.close()
    job.lease.release()


@pytest.fixture
def local_job(tmp_path: Path) -> Iterator[Job]:
    job = open_job(str(tmp_path / "store"), tmp_path)
    yield job
    job.lease.release()


def test_a_commit_comes_back_whole(job: Job) -> None:
    assert job.checkpoints.latest() is None
    assert job.checkpoints.restore_latest(job.folder / "none") is None
    staging = staged(job.folder, 10)
    manifest = job.checkpoints.commit(
        staging,
        step=10,
        cursor=CURSOR,
        attempt=2,
        tracker_run_id="abc",
        tracker_high_water={"train": 9},
        best_metric={"eval/accuracy": 0.5},
        state={"kl": {"coefficient": 0.1}},
    )
    assert not staging.exists()
    assert (manifest.number, manifest.step, manifest.parent, manifest.lease) == (1, 10, None, 1)
    assert [file.path for file in manifest.files] == [
        "engine_state.json",
        "model/config.json",
        "model/model.safetensors",
    ]
    assert manifest.prefix.startswith("checkpoints/global_step_00000010-")
    assert job.store.exists("commits/00000001.json")

    found = CheckpointStore(Storage(job.store.url)).restore_latest(job.folder / "back")
    assert found is not None
    assert found == manifest
    assert found.cursor == CURSOR
    assert restored_step(job.folder / "back") == 10
    expected = safetensors(bytes([10]) * 1000)
    assert (job.folder / "back" / "model" / "model.safetensors").read_bytes() == expected
    assert job.checkpoints.verify(manifest) == []


def test_latest_is_the_highest_number(job: Job) -> None:
    for step in (9, 20, 100):
        job.commit(step)
    latest = job.checkpoints.latest()
    assert latest is not None
    assert (latest.number, latest.step, latest.parent) == (3, 100, 2)
    assert [manifest.step for manifest in job.checkpoints.commits()] == [9, 20, 100]


def test_byte_flip_is_found_and_the_commit_before_is_restored(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.commit(10)
    damaged = job.commit(20)
    path = f"{damaged.prefix}/model/model.safetensors"
    flip(job.store, path)
    with caplog.at_level(logging.WARNING):
        manifest = job.checkpoints.restore_latest(job.folder / "back")
    assert manifest is not None
    assert manifest.step == restored_step(job.folder / "back") == 10
    assert job.checkpoints.skipped == [
        f"commit 2 (step 20): {job.store.where(path)} has sha256 "
        f"{job.checkpoints.verify(damaged)[0].split('has sha256 ')[1].split(',')[0]}, recorded was "
        f"{damaged.files[2].sha256}; its bytes changed"
    ]
    assert "passed over: commit 2 (step 20)" in caplog.text
    assert job.commit(20).parent == 1


def test_cut_and_missing_objects_are_passed_over_without_download(job: Job) -> None:
    job.commit(10)
    cut, gone = job.commit(20), job.commit(30)
    job.store.write(f"{cut.prefix}/engine_state.json", b"{}")
    job.store.remove(f"{gone.prefix}/model/config.json")
    latest = job.checkpoints.latest()
    assert latest is not None
    assert latest.step == 10
    assert [reason.split(":")[0] for reason in job.checkpoints.skipped] == ["commit 3 (step 30)", "commit 2 (step 20)"]
    assert job.checkpoints.skipped[0].endswith(f"{gone.prefix}/model/config.json is missing")
    assert job.checkpoints.skipped[1].endswith("has 2 bytes, the manifest says 12")
    restored = job.checkpoints.restore_latest(job.folder / "back")
    assert restored is not None
    assert restored.step == 10


def test_damaged_manifest_is_passed_over_and_its_number_stays_taken(local_job: Job) -> None:
    local_job.commit(10)
    local_job.commit(20)
    local_job.store.write("commits/00000002.json", b'{"number": 2')
    latest = local_job.checkpoints.latest()
    assert latest is not None
    assert latest.step == 10
    assert "commits/00000002.json is not JSON" in local_job.checkpoints.skipped[0]
    local_job.lease.release()
    again = open_job(local_job.store.url, local_job.folder)
    assert again.commit(20).number == 3
    again.lease.release()


def test_when_every_commit_is_damaged_nothing_starts_over_silently(local_job: Job) -> None:
    manifest = local_job.commit(10)
    flip(local_job.store, f"{manifest.prefix}/engine_state.json")
    with pytest.raises(CheckpointError, match=r"every commit is damaged: commit 1 .*engine_state\.json has sha256"):
        local_job.checkpoints.restore_latest(local_job.folder / "back")


def test_manifest_of_a_later_format_is_refused_not_passed_over(local_job: Job) -> None:
    local_job.commit(10)
    local_job.store.write_json("commits/00000002.json", {"format_version": 2, "new": True})
    with pytest.raises(CheckpointError, match="has format 2, this version reads up to 1; upgrade trinity-flows"):
        local_job.checkpoints.latest()


def test_manifest_cannot_name_files_outside_the_job(local_job: Job) -> None:
    manifest = local_job.commit(10)
    evil = manifest.files[0].model_copy(update={"path": "../../../evil"})
    with pytest.raises(StorageError, match="not a path inside a store"):
        local_job.checkpoints.restore(manifest.model_copy(update={"files": (evil,)}), local_job.folder / "back")
    assert not list(local_job.folder.glob("**/evil"))


def test_verify_names_every_problem(job: Job) -> None:
    staging = staged(job.folder, 10)
    (staging / "notes.txt").write_text("x")
    manifest = job.checkpoints.commit(staging, step=10)
    prefix = job.store.where(manifest.prefix)
    flip(job.store, f"{manifest.prefix}/engine_state.json")
    job.store.remove(f"{manifest.prefix}/model/config.json")
    job.store.write(f"{manifest.prefix}/notes.txt", b"longer")
    problems = job.checkpoints.verify(manifest)
    assert [problem.split(" ")[0].removeprefix(prefix) for problem in problems] == [
        "/engine_state.json",
        "/model/config.json",
        "/notes.txt",
    ]
    assert "its bytes changed" in problems[0]
    assert "is missing" in problems[1]
    assert "has 6 bytes, recorded were 1" in problems[2]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"", "is not a safetensors file"),
        ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "has no safetensors header"),
        ("model.safetensors", safetensors(b"12345")[:-1], "has 4 bytes of tensors, its header says 5"),
        ("model.safetensors", safetensors(b"12345") + b"6", "has 6 bytes of tensors, its header says 5"),
        ("state.json", b'{"a": ', "is not JSON"),
    ],
)
def test_unreadable_staged_files_are_refused(local_job: Job, name: str, content: bytes, reason: str) -> None:
    staging = staged(local_job.folder, 10)
    (staging / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"step 10 was not committed: .*{name} {reason}"):
        local_job.checkpoints.commit(staging, step=10)
    assert (local_job.checkpoints.latest(), local_job.objects()) == (None, set())


def test_empty_staging_is_refused(local_job: Job) -> None:
    (local_job.folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no files: the engine staged nothing"):
        local_job.checkpoints.commit(local_job.folder / "empty", step=10)


def test_failed_upload_leaves_the_last_commit_and_no_objects(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.commit(10)
    before = job.objects()
    put_file = Storage.put_file

    def fail_on_model(self: Storage, local: Path, path: str, *, move: bool = False) -> object:
        if path.endswith("model.safetensors"):
            raise StorageError("the line was cut")
        return put_file(self, local, path, move=move)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put_file", fail_on_model)
        message = r"step 20 was not committed: the line was cut\. The last commit is 1 \(step 10\)"
        with pytest.raises(CheckpointError, match=message):
            job.commit(20)
    assert job.objects() == before
    latest = job.checkpoints.latest()
    assert latest is not None
    assert latest.step == 10
    assert job.commit(30).number == 2


def test_full_disk_leaves_the_last_commit(local_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    local_job.commit(10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CheckpointError, match=r"step 20 was not committed: .*No space left.*the disk is full"):
            local_job.commit(20)
    latest = local_job.checkpoints.latest()
    assert latest is not None
    assert (latest.step, local_job.checkpoints.verify(latest)) == (10, [])
    assert local_job.commit(20).number == 2


def test_reader_cannot_write(local_job: Job) -> None:
    reader = CheckpointStore(local_job.store)
    with pytest.raises(CheckpointError, match="opened for reading; writing needs the job's lease"):
        reader.commit(staged(local_job.folder, 10), step=10)
    with pytest.raises(CheckpointError, match="opened for reading"):
        reader.clean_orphans()


def test_manifest_that_arrived_although_its_answer_was_lost(s3_url: str, tmp_path: Path, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = lambda method, path, _: "cut_after" if method == "PUT" and "commits/" in path else None
    store = impatient(faulty_s3, s3_url)
    lease = Lease.acquire(store)
    job = Job(store, lease, CheckpointStore(store, lease), tmp_path)
    with pytest.raises(CheckpointError, match="step 10 was not committed: cannot create"):
        job.commit(10)
    faulty_s3.rule = lambda *_: None
    assert job.commit(11).number == 2
    assert [manifest.step for manifest in job.checkpoints.commits()] == [10, 11]
    restored = job.checkpoints.restore_latest(tmp_path / "back")
    assert restored is not None
    assert restored.parent == 1
    lease.release()


def test_background_commit_lets_training_go_on_and_reports_its_failure_once(
    local_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, proceed, put_file = threading.Event(), threading.Event(), Storage.put_file

    def slow(self: Storage, local: Path, path: str, *, move: bool = False) -> object:
        started.set()
        assert proceed.wait(30)
        return put_file(self, local, path, move=move)

    monkeypatch.setattr(Storage, "put_file", slow)
    checkpoints, staging = local_job.checkpoints, staged(local_job.folder, 10)
    checkpoints.commit_in_background(staging, step=10, cursor=CURSOR)
    assert started.wait(30)
    checkpoints.raise_pending()
    assert checkpoints.latest() is None
    with pytest.raises(CheckpointError, match=r"has not ended after 0.01 s; the last commit is none"):
        checkpoints.wait(0.01)
    proceed.set()
    checkpoints.wait()
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.cursor, staging.exists()) == (10, CURSOR, False)

    shutil.rmtree(staging, ignore_errors=True)
    checkpoints.commit_in_background(local_job.folder / "nothing", step=20)
    assert checkpoints._pending is not None
    checkpoints._pending.exception(30)
    with pytest.raises(CheckpointError, match=r"step 20 was not committed: .*has no files"):
        checkpoints.raise_pending()
    checkpoints.raise_pending()

    checkpoints.commit_in_background(local_job.folder / "nothing", step=20)
    with pytest.raises(CheckpointError, match="step 20 was not committed"):
        checkpoints.commit_in_background(staged(local_job.folder, 30), step=30)
    checkpoints.commit_in_background(staged(local_job.folder, 40), step=40)
    checkpoints.close()
    assert [manifest.step for manifest in checkpoints.commits()] == [10, 40]


def test_retention_keeps_the_newest_intact_ones_across_restarts(shared_store_url: str, tmp_path: Path) -> None:
    for first in (10, 30, 50):
        job = open_job(shared_store_url, tmp_path / str(first), keep=2)
        job.checkpoints.restore_latest(tmp_path / f"back-{first}")
        for step in (first, first + 10):
            job.commit(step)
            assert len(job.checkpoints.commits()) <= 2
        job.lease.release()
    commits = job.checkpoints.commits()
    assert [(manifest.number, manifest.step) for manifest in commits] == [(5, 50), (6, 60)]
    assert job.objects() == {f"{manifest.prefix}/{file.path}" for manifest in commits for file in manifest.files}


def test_retention_never_removes_the_last_intact_one(local_job: Job) -> None:
    good, first_bad, second_bad = (local_job.commit(step) for step in (10, 20, 30))
    for manifest in (first_bad, second_bad):
        local_job.store.remove(f"{manifest.prefix}/engine_state.json")
    local_job.checkpoints.keep = 1
    assert local_job.checkpoints.retain() == []
    latest = local_job.checkpoints.latest()
    assert latest is not None
    assert latest.step == good.step
    local_job.commit(40)
    assert [manifest.step for manifest in local_job.checkpoints.commits()] == [40]


def test_retention_spares_what_is_protected(local_job: Job) -> None:
    for step in (10, 20, 30, 40):
        local_job.commit(step)
    local_job.checkpoints.keep = 1
    assert local_job.checkpoints.retain(protect={2}) == [3, 1]
    assert [manifest.number for manifest in local_job.checkpoints.commits()] == [2, 4]


def test_failed_retention_does_not_fail_the_commit(
    local_job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local_job.checkpoints.keep = 1
    local_job.commit(10)

    def refuse(self: Storage, path: str) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Storage, "remove", refuse)
        assert local_job.commit(20).number == 2
    assert "were not removed: no" in caplog.text
    local_job.commit(30)
    assert [manifest.step for manifest in local_job.checkpoints.commits()] == [30]


def test_orphans_are_left_while_a_manifest_is_unreadable(local_job: Job) -> None:
    local_job.commit(10)
    local_job.store.write("checkpoints/global_step_00000009-0123abcd/x", b"orphan")
    local_job.store.write("checkpoints/notes/x", b"not ours")
    manifest = local_job.store.read_bytes("commits/00000001.json")
    local_job.store.write("commits/00000001.json", b"{")
    assert local_job.checkpoints.clean_orphans() == []
    assert "00000001.json is not JSON" in local_job.checkpoints.skipped[0]
    local_job.store.write("commits/00000001.json", manifest)
    assert local_job.checkpoints.clean_orphans() == ["checkpoints/global_step_00000009-0123abcd"]
    assert local_job.store.exists("checkpoints/notes/x")
    assert local_job.checkpoints.latest() is not None


def test_store_that_does_not_answer_is_no_reason_to_go_back(s3_url: str, tmp_path: Path, faulty_s3: FaultyS3) -> None:
    job = open_job(s3_url, tmp_path)
    job.commit(10)
    prefix = job.commit(20).prefix
    job.lease.release()
    faulty_s3.rule = lambda method, path, _: (
        "500" if method == "GET" and prefix in path and "list-type" not in path else None
    )
    reader = CheckpointStore(impatient(faulty_s3, s3_url))
    with pytest.raises(StorageError, match=f"cannot fetch .*{prefix}/engine_state.json"):
        reader.restore_latest(tmp_path / "back")
    assert reader.skipped == []
