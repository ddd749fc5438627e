"""What a job needs of its store, on real servers: SeaweedFS, and `rclone serve s3` with the promise of a single writer.

SeaweedFS keeps create-only writes by itself, so there writers may race. rclone does not, so a job without the promise
is refused there.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import LeaseLost, StorageError
from tests.experience_rows import make_rows, uids
from tests.faulty_s3 import FaultyS3, first_times
from tests.held_job import CURSOR, Job, flip, restored_step, staged
from tests.integration.command import Workplace
from tests.integration.small_job import small_config, train
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.job import job_url
from trinity_tasks.lease import Lease
from trinity_tasks.storage import DamagedObject, ObjectInfo, Storage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_RACERS = 8


@pytest.fixture(scope="module", params=["seaweedfs", "rclone"])
def server(request: pytest.FixtureRequest) -> str:
    """Which server a test runs on."""
    return request.param


@pytest.fixture(scope="module")
def s3_environment(request: pytest.FixtureRequest, server: str) -> dict[str, str]:
    """The environment that leads to that server: for this file, what others take from moto."""
    return request.getfixturevalue(server)


@pytest.fixture
def store(s3_url: str, server: str) -> Storage:
    """An empty prefix, as a job would use it."""
    return Storage(s3_url, single_writer=server == "rclone")


on_seaweedfs = pytest.mark.parametrize("server", ["seaweedfs"], indirect=True)
on_rclone = pytest.mark.parametrize("server", ["rclone"], indirect=True)


def at_once(number: int, call: Callable[[int], None]) -> None:
    """`call(0)` to `call(number - 1)`, all at the same moment, each in a thread."""
    barrier = threading.Barrier(number)

    def wait_and_call(index: int) -> None:
        barrier.wait()
        call(index)

    threads = [threading.Thread(target=wait_and_call, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- storage ----------------------------------------------------------------------------------------------------------


def test_objects_come_back_are_listed_and_go(store: Storage) -> None:
    store.create("a/b/one", b"1")
    store.create_json("a/two.json", {"x": [1, None, "\u00e9"]})
    store.write("three", b"333")
    store.write("empty", b"")
    store.write("three", b"4444")
    assert store.read_json("a/two.json") == {"x": [1, None, "\u00e9"]}
    assert (store.read_bytes("three"), store.read_bytes("empty")) == (b"4444", b"")
    assert store.list() == [ObjectInfo("empty", 0), ObjectInfo("three", 4)]
    assert [info.name for info in store.list(recursive=True)] == ["a/b/one", "a/two.json", "empty", "three"]
    assert (store.size("a/b/one"), store.size("empty"), store.size("a"), store.size("none")) == (1, 0, None, None)
    store.remove("empty")
    store.remove("none")
    store.remove_tree("none")
    store.remove_tree("a/b")
    assert [info.name for info in store.list(recursive=True)] == ["a/two.json", "three"]
    assert store.list("a/b", recursive=True) == []
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/b/one")


@on_seaweedfs
def test_a_listing_of_more_than_one_page_is_whole(store: Storage) -> None:
    def write(index: int) -> None:
        for number in range(index, 1100, NUM_RACERS):
            store.write(f"many/{number:04d}", b"x")

    at_once(NUM_RACERS, write)
    assert store.list("many") == [ObjectInfo(f"many/{number:04d}", 1) for number in range(1100)]
    store.remove_tree("many")
    assert store.list(recursive=True) == []


def test_create_never_replaces(store: Storage) -> None:
    store.create("x", b"first")
    for content in (b"second", b"first"):
        with pytest.raises(FileExistsError):
            store.create("x", content)
    assert store.read_bytes("x") == b"first"
    store.remove("x")
    store.create("x", b"third")
    assert store.read_bytes("x") == b"third"


@on_seaweedfs
def test_of_eight_creators_one_wins(store: Storage) -> None:
    winners, refused = list[int](), list[int]()

    def create(index: int) -> None:
        try:
            store.create("prize", b"%d" % index)
        except FileExistsError:
            refused.append(index)
        else:
            winners.append(index)

    at_once(NUM_RACERS, create)
    assert (len(winners), len(refused)) == (1, NUM_RACERS - 1)
    assert store.read_bytes("prize") == b"%d" % winners[0]


def test_a_large_file_travels_in_parts_and_verified(store: Storage, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(2**20) * 40 + b"end"
    (tmp_path / "source").write_bytes(content)
    record = store.put_file(tmp_path / "source", "big")
    assert (record.size, store.size("big")) == (40 * 2**20 + 3, 40 * 2**20 + 3)
    store.get_file("big", tmp_path / "back", size=record.size, sha256=record.sha256)
    assert (tmp_path / "back").read_bytes() == content
    assert store.read_bytes("big") == content
    with pytest.raises(DamagedObject, match=f"big has sha256 {record.sha256}, recorded was 0000"):
        store.get_file("big", tmp_path / "other", sha256="0" * 64)
    with pytest.raises(DamagedObject, match="big has 41943043 bytes, recorded were 41943044"):
        store.get_file("big", tmp_path / "other", size=record.size + 1)
    with pytest.raises(FileNotFoundError):
        store.get_file("none", tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["back", "source"]


def test_a_large_object_is_created_once(store: Storage) -> None:
    """Beyond 32 MB an object travels in parts, and the condition with the last request."""
    content = random.Random(1).randbytes(2**20) * 33
    store.create("big", content)
    with pytest.raises(FileExistsError):
        store.create("big", content[1:])
    assert store.read_bytes("big") == content


def test_an_upload_in_parts_whose_last_answer_was_lost_is_whole(
    store: Storage, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    """The client asks again: SeaweedFS answers as before, rclone that there is no such upload."""
    content = random.Random(2).randbytes(2**20) * 33
    (tmp_path / "source").write_bytes(content)
    with FaultyS3(s3_environment["AWS_ENDPOINT_URL_S3"]) as proxy:
        faulty = Storage(store.url, {"endpoint_url": proxy.url}, single_writer=store.single_writer)
        proxy.rule = first_times(1, "cut_after", "POST", within="uploadId=")
        record = faulty.put_file(tmp_path / "source", "big")
        proxy.rule = first_times(1, "cut_after", "POST", within="uploadId=")
        faulty.create("created", content)
        assert proxy.faults["cut_after"] == 2
    store.get_file("big", tmp_path / "back", size=record.size, sha256=record.sha256)
    assert store.read_bytes("created") == content


def test_wrong_keys_are_named(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("x", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    calls: list[Callable[[], object]] = [
        lambda: store.write("x", b"2"),
        lambda: store.create("y", b"2"),
        lambda: store.read_bytes("x"),
        lambda: store.exists("x"),
        lambda: store.list(),
        lambda: store.remove("x"),
        store.check_writable,
    ]
    for call in calls:
        with pytest.raises(StorageError, match=f"{store.url}.*no permission; check the credentials"):
            call()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    assert [(info.name, store.read_bytes(info.name)) for info in store.list()] == [("x", b"1")]


@on_seaweedfs
def test_a_bucket_that_is_not_ours_is_named(store: Storage) -> None:
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/job.*no permission"):
        Storage("s3://no-such-bucket/job").check_writable()


@on_rclone
def test_a_bucket_that_is_not_there_is_named(store: Storage) -> None:
    with pytest.raises(StorageError, match="bucket s3://no-such-bucket does not exist"):
        Storage("s3://no-such-bucket/job").check_writable()


def test_preflight_leaves_nothing(store: Storage) -> None:
    store.check_writable()
    store.child("a", "b").check_writable()
    assert store.list(recursive=True) == []


@on_rclone
def test_a_store_that_ignores_create_only_writes_needs_the_promise(store: Storage) -> None:
    with pytest.raises(StorageError, match=r"ignores create-only writes .*set storage\.single_writer: true"):
        Storage(store.url).check_writable()
    assert store.list(recursive=True) == []


# -- what a job makes of it -------------------------------------------------------------------------------------------


def test_each_row_of_two_writers_is_taken_once(store: Storage) -> None:
    rows = {name: [make_rows(3, 2, batch=f"{name}-{index}") for index in range(6)] for name in ("a", "b")}

    def write(index: int) -> None:
        name = "ab"[index]
        writer = ExperienceWriter(Storage(store.url, single_writer=store.single_writer), "main", name)
        for shard in rows[name]:
            writer.write(shard)
        writer.end()

    at_once(2, write)
    writer = ExperienceWriter(store, "main", "a")
    assert (writer.next_index, writer.ended) == (6, True)
    writer.reopen()
    with pytest.raises(FileExistsError):
        writer.write(make_rows(1, 2), index=5)
    writer.end()

    strategy, ledger, position = Fifo(ExperienceReader(store, "main"), 8), Ledger(store), Position()
    taken: list[str] = []
    while claim := strategy.claim(position, step := len(taken) // 8 + 1):
        batch = strategy.read(claim.ref)
        entry = LedgerEntry.of(step, claim, batch, before=position, attempt=1)
        ledger.record(entry)
        with pytest.raises(FileExistsError):
            ledger.record(entry.model_copy(update={"attempt": 2, "num_groups": 99}))
        assert ledger.recorded(step, position) == entry
        taken += uids(batch)
        position = claim.after
    assert sorted(taken) == sorted(uids([row for shards in rows.values() for shard in shards for row in shard]))
    assert ledger.steps() == list(range(1, 10))
    assert [uids(strategy.read(ledger.read(step).ref)) for step in (1, 9)] == [taken[:8], taken[-8:]]


def test_a_producer_never_replaces_its_shards(store: Storage) -> None:
    """It is given the job's URL, and knows nothing of the promise in the job's config."""
    rows = make_rows(1, 2)
    with ExperienceWriter(store.url, writer="agent") as writer:
        written = writer.write(rows)
        with pytest.raises(FileExistsError):
            writer.write(make_rows(2, 2), index=0)
    assert hashlib.sha256(store.read_bytes(written.name)).hexdigest() == written.sha256


def test_a_commit_comes_back_whole_and_a_damaged_one_is_passed_over(store: Storage, tmp_path: Path) -> None:
    with Lease.acquire(store) as lease:
        job = Job(store, lease, CheckpointStore(store, lease, keep=3), tmp_path)
        for step in (5, 10):
            job.commit(step)
        large = job.checkpoints.commit(staged(tmp_path, 15, size=40 * 2**20), step=15, cursor=CURSOR)
        assert [manifest.step for manifest in job.checkpoints.commits()] == [5, 10, 15]
        assert job.checkpoints.verify(large) == []
        found = CheckpointStore(store).restore_latest(tmp_path / "back")
        assert (found, restored_step(tmp_path / "back")) == (large, 15)
        flip(store, f"{large.prefix}/model/model.safetensors")
        found = job.checkpoints.restore_latest(tmp_path / "before")
        assert found is not None
        assert (found.step, restored_step(tmp_path / "before")) == (10, 10)
        assert job.commit(20).parent == 2
        assert [manifest.step for manifest in job.checkpoints.commits()] == [10, 15, 20]
        store.write("checkpoints/global_step_00000099-deadbeef/model/x", b"half a checkpoint")
        assert job.checkpoints.clean_orphans() == ["checkpoints/global_step_00000099-deadbeef"]
        job.checkpoints.close()


def test_a_job_has_one_holder(store: Storage) -> None:
    first = Lease.acquire(store)
    with pytest.raises(LeaseLost, match=f"{store.url} is held by pid {os.getpid()}"):
        Lease.acquire(store)
    first.check()
    first.release()
    with Lease.acquire(store) as second:
        assert (second.number, second.took_over) == (2, False)


@on_seaweedfs
def test_of_eight_that_want_a_job_one_gets_it(store: Storage) -> None:
    held, refused = list[Lease](), list[LeaseLost]()

    def acquire(_: int) -> None:
        try:
            held.append(Lease.acquire(store))
        except LeaseLost as error:
            refused.append(error)

    at_once(NUM_RACERS, acquire)
    assert (len(held), len(refused)) == (1, NUM_RACERS - 1)
    held[0].check()
    held[0].release()


@on_rclone
def test_a_run_without_the_promise_is_refused_before_anything_starts(store: Storage) -> None:
    with pytest.raises(StorageError, match=r"/tests/small: the store ignores create-only writes"):
        train(small_config(store.url))
    assert store.list(recursive=True) == []


@on_rclone
@pytest.mark.slow
def test_the_command_says_what_the_store_lacks(
    store: Storage, tmp_path: Path, s3_environment: dict[str, str], prefect_api: str
) -> None:
    place = Workplace.make(tmp_path)
    place.write("small.yaml", small_config(store.url))
    ended = place.run("finetune", "-c", "small.yaml", "--json", PREFECT_API_URL=prefect_api, **s3_environment)
    assert (ended.code, ended.left_behind) == (1, ())
    assert ended.json["error"]["type"] == "StorageError"
    message = ended.json["error"]["message"]
    assert message.startswith(f"{job_url(small_config(store.url))}: the store ignores create-only writes")
    assert message.endswith("set storage.single_writer: true")
    assert store.list(recursive=True) == []
