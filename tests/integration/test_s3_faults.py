"""A store behind a bad network: what arrives is right, or an error names the object. SeaweedFS behind `FaultyS3`.

Owns: faults that come and go, at random but the same ones for a seed. A job on a good store is in test_s3_job.py.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.errors import StorageError
from engines.experience import Experience
from tests.experience_rows import make_rows
from tests.faulty_s3 import Fault, FaultyS3, first_times, now_and_then
from tests.held_job import CURSOR, Job, restored_step, safetensors, staged
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.lease import Lease
from trinity_tasks.storage import DamagedObject, Storage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CUTS: tuple[Fault, ...] = ("cut_before", "cut_after", "cut_body", "short_body")
TRANSIENT: tuple[Fault, ...] = ("500", "503", *CUTS, "hang", "expired_400")
NUM_WRITERS = 3
GROUPS, GROUP_SIZE, BATCH = 2, 2, 6
"""Groups of a shard, rows of a group, rows of a batch: batches end within shards."""
POLL_S = 0.1


@pytest.fixture(scope="module")
def s3_environment(seaweedfs: dict[str, str]) -> dict[str, str]:
    """For this file, what others take from moto."""
    return seaweedfs


@pytest.fixture(scope="module")
def _proxy(s3_environment: dict[str, str]) -> Iterator[FaultyS3]:
    with FaultyS3(s3_environment["AWS_ENDPOINT_URL_S3"]) as proxy:
        yield proxy


def via(proxy: FaultyS3, url: str, retry_s: float = 60.0, max_attempts: int = 2) -> Storage:
    """A Storage that gives up an answer before the proxy's `hang` ends."""
    config = {"read_timeout": 1, "retries": {"max_attempts": max_attempts}}
    return Storage(url, {"endpoint_url": proxy.url, "config_kwargs": config}, retry_s=retry_s)


def shard_of(writer: str, index: int) -> list[Experience]:
    return make_rows(GROUPS, GROUP_SIZE, batch=f"{writer}-{index}")


def assert_same_bits(found: Experience, written: Experience) -> None:
    assert (found.eid, found.reward, found.prompt_length) == (written.eid, written.reward, written.prompt_length)
    assert found.logprobs is not None
    assert written.logprobs is not None
    np.testing.assert_array_equal(found.tokens, written.tokens)
    np.testing.assert_array_equal(found.logprobs.view(np.int32), written.logprobs.view(np.int32))


def write_all(store: Storage, name: str, num_shards: int) -> None:
    writer = ExperienceWriter(store, "main", name)
    for index in range(num_shards):
        writer.write(shard_of(name, index))
    writer.end()


def take_all(store: Storage, num_rows: int) -> list[Experience]:
    """Every row in the order of the ledger, by a reader that begins anew now and then, as after a crash."""
    strategy, ledger, position = Fifo(ExperienceReader(store, "main"), BATCH), Ledger(store), Position()
    rows: list[Experience] = []
    while len(rows) < num_rows:
        step = len(rows) // BATCH + 1
        claim = strategy.claim(position, step)
        if claim is None:
            time.sleep(POLL_S)
            continue
        batch = strategy.read(claim.ref)
        entry = LedgerEntry.of(step, claim, batch, before=position, attempt=1)
        ledger.record(entry)
        assert ledger.recorded(step, position) == entry
        if step % 10 == 0:
            strategy = Fifo(ExperienceReader(store, "main"), BATCH)
            assert strategy.read(ledger.read(step).ref)[0].eid == batch[0].eid
        rows += batch
        position = claim.after
    return rows


def exactly_once(store: Storage, num_shards: int) -> None:
    """Writers and a reader at work at the same time; every row comes once, with its bits."""
    names = [f"writer-{number}" for number in range(NUM_WRITERS)]
    failures: list[BaseException] = []

    def write(name: str) -> None:
        try:
            write_all(store, name, num_shards // NUM_WRITERS)
        except (StorageError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    rows = take_all(store, num_shards * GROUPS * GROUP_SIZE)
    for thread in threads:
        thread.join()
    assert failures == []
    assert_complete(rows, names, num_shards // NUM_WRITERS)
    assert Ledger(store).steps() == list(range(1, len(rows) // BATCH + 1))


def assert_complete(rows: Sequence[Experience], names: Sequence[str], num_shards: int) -> None:
    """These are the rows of the shards that each writer wrote: none twice, none changed."""
    written = [row for name in names for index in range(num_shards) for row in shard_of(name, index)]
    by_uid = {row.eid.uid: row for row in rows}
    assert len(by_uid) == len(rows) == len(written)
    for row in written:
        assert_same_bits(by_uid[row.eid.uid], row)


def test_each_row_is_taken_once_through_all_faults(s3_url: str, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = now_and_then(0.05, TRANSIENT, seed=1)
    exactly_once(via(faulty_s3, s3_url), num_shards=60)
    assert sum(faulty_s3.faults.values()) >= 10
    assert len(faulty_s3.faults) >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
def test_each_row_is_taken_once_through_many_faults(s3_url: str, faulty_s3: FaultyS3, seed: int) -> None:
    faulty_s3.rule = now_and_then(0.15, TRANSIENT, seed)
    exactly_once(via(faulty_s3, s3_url), num_shards=300)
    assert set(faulty_s3.faults) == set(TRANSIENT)


@pytest.mark.parametrize("latency_s", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_slow_answers_are_waited_for(s3_url: str, faulty_s3: FaultyS3, latency_s: float) -> None:
    count = 0

    def every_tenth(*_: str) -> Fault | None:
        nonlocal count
        count += 1
        return "slow" if count % 10 == 0 else None

    faulty_s3.rule, faulty_s3.latency_s = every_tenth, latency_s
    store = Storage(s3_url, {"endpoint_url": faulty_s3.url})
    write_all(store, "writer", num_shards=6)
    assert_complete(take_all(store, 6 * GROUPS * GROUP_SIZE), ["writer"], num_shards=6)
    written = [path for method, path in faulty_s3.requests if method == "PUT"]
    assert len(written) == len(set(written))  # nothing was given up and sent again
    assert faulty_s3.faults["slow"] == count // 10 > 1


def test_a_checkpoint_is_committed_and_restored_through_faults(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    faulty_s3.rule = now_and_then(0.1, TRANSIENT, seed=4)
    store = via(faulty_s3, s3_url)
    with Lease.acquire(store) as lease:
        job = Job(store, lease, CheckpointStore(store, lease, keep=2), tmp_path)
        for step in (5, 10):
            job.commit(step)
        manifest = job.checkpoints.commit(staged(tmp_path, 15, size=33 * 2**20), step=15, cursor=CURSOR)
        assert [commit.step for commit in job.checkpoints.commits()] == [10, 15]
        assert CheckpointStore(store).restore_latest(tmp_path / "back") == manifest
        assert restored_step(tmp_path / "back") == 15
        expected = safetensors(bytes([15]) * (33 * 2**20))
        assert (tmp_path / "back" / "model" / "model.safetensors").read_bytes() == expected
        job.checkpoints.close()
    assert len(faulty_s3.faults) >= 4


# -- one operation ----------------------------------------------------------------------------------------------------


class Tries:
    """Operations that may fail, but only with an error that names the object and does not call it damaged."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.errors: list[tuple[str, StorageError]] = []
        self.num_right = 0

    def result(self, name: str, call: Callable[[], Any]) -> Any:
        """What it returned; None after an error."""
        try:
            value = call()
        except StorageError as error:
            self.errors.append((self._store.where(name), error))
            return None
        self.num_right += 1
        return value

    def assert_named(self) -> None:
        for name, error in self.errors:
            assert name in str(error)
            assert not isinstance(error, DamagedObject)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_without_a_second_try_each_operation_is_right_or_names_its_object(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path, seed: int
) -> None:
    """Half of all requests fail. Nothing else may come back than what was stored, or a StorageError about it."""
    good, store = Storage(s3_url), via(faulty_s3, s3_url, retry_s=0, max_attempts=0)
    rng, tries = random.Random(seed), Tries(store)
    stored = {f"object-{index}": rng.randbytes(rng.randint(2, 5000)) for index in range(3)}
    for name, content in stored.items():
        good.write(name, content)
    faulty_s3.rule = now_and_then(0.5, ("500", *CUTS, "expired_400", "403", "bad_key", "400"), seed)
    for number in range(8):
        name, new, local = rng.choice(sorted(stored)), f"new-{number}", tmp_path / str(number)
        assert tries.result(name, partial(store.read_bytes, name)) in (None, stored[name])
        assert tries.result(name, partial(store.size, name)) in (None, len(stored[name]))
        listed = tries.result("", store.list)
        sizes = {name: len(content) for name, content in stored.items()}
        assert listed is None or {info.name: info.size for info in listed} == sizes
        tries.result(name, partial(store.get_file, name, local))
        assert not local.exists() or local.read_bytes() == stored[name]
        content = rng.randbytes(100)
        tries.result(new, partial(store.create, new, content))
        if good.exists(new):
            stored[new] = good.read_bytes(new)
        assert stored.get(new) in (None, content)
    faulty_s3.rule = lambda *_: None
    assert len(os.listdir(tmp_path)) == sum(name.isdigit() for name in os.listdir(tmp_path))  # no half-written file
    assert len(tries.errors) >= 5
    assert tries.num_right >= 5
    tries.assert_named()


@pytest.mark.parametrize("fault", ["cut_body", "short_body"])
def test_a_body_that_is_always_cut_is_never_taken_for_the_whole(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path, fault: Fault
) -> None:
    store = via(faulty_s3, s3_url, retry_s=0, max_attempts=0)
    store.write("x", bytes(1000))
    faulty_s3.rule = lambda method, path, _: fault if method == "GET" else None
    for call in (lambda: store.read_bytes("x"), lambda: store.get_file("x", tmp_path / "x")):
        with pytest.raises(StorageError, match=rf"cannot (read|fetch) {s3_url}/x: "):
            call()
    with pytest.raises(StorageError, match=rf"cannot list {s3_url}: "):
        store.list()
    assert list(tmp_path.iterdir()) == []


def test_a_large_object_without_a_hash_is_not_filled_up_with_zeros(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    """The client would fetch parts of 5 MB at once, and not see that one of them is short."""
    options = {"endpoint_url": faulty_s3.url, "default_block_size": 5 * 2**20}
    store = Storage(s3_url, options)
    content = random.Random(0).randbytes(2**20) * 6
    store.write("x", content)
    faulty_s3.rule = first_times(2, "short_body", "GET")
    assert store.read_bytes("x") == content
    faulty_s3.rule = first_times(2, "short_body", "GET")
    store.get_file("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("fault", ["short_body", "flip", "flip_unsaid"])
def test_a_transfer_that_went_wrong_is_no_damaged_object(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path, fault: Fault
) -> None:
    """A damaged object makes a resume go back to an older commit; a bad transfer must not."""
    store = via(faulty_s3, s3_url)
    (tmp_path / "source").write_bytes(random.Random(0).randbytes(2000))
    record = store.put_file(tmp_path / "source", "x")
    faulty_s3.rule = first_times(1, fault, "GET")
    store.get_file("x", tmp_path / "back", size=record.size, sha256=record.sha256)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "source").read_bytes()
    assert faulty_s3.faults[fault] == 1


def test_a_checksum_of_the_store_is_looked_at(s3_url: str, faulty_s3: FaultyS3) -> None:
    store = via(faulty_s3, s3_url)
    store.write("x", b"content")
    faulty_s3.rule = first_times(2, "flip", "GET")
    assert store.read_bytes("x") == b"content"
    faulty_s3.rule = lambda *_: "flip"
    with pytest.raises(StorageError, match=rf"cannot read {s3_url}/x: .*checksum"):
        store.with_retry_s(0).read_bytes("x")


@pytest.mark.parametrize("fault", ["expired_400", "bad_key"])
def test_credentials_that_are_refused_for_a_moment_cost_nothing(s3_url: str, faulty_s3: FaultyS3, fault: Fault) -> None:
    store = via(faulty_s3, s3_url)
    calls: list[tuple[Callable[[], object], object]] = [
        (lambda: store.write("x", b"1"), None),
        (lambda: store.create("y", b"22"), None),
        (lambda: store.read_bytes("x"), b"1"),
        (lambda: store.size("y"), 2),
        (lambda: [info.name for info in store.list()], ["x", "y"]),
        (lambda: store.remove("x"), None),
        (lambda: store.exists("x"), False),
    ]
    for call, expected in calls:
        faulty_s3.rule = first_times(1, fault, method="")
        assert call() == expected
    assert faulty_s3.faults[fault] == len(calls)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("expired_400", "the credentials have expired; renew them"),
        ("bad_key", "no permission; check the credentials"),
    ],
)
def test_credentials_that_stay_refused_are_named_by_every_operation(
    s3_url: str, faulty_s3: FaultyS3, tmp_path: Path, fault: Fault, advice: str
) -> None:
    store = via(faulty_s3, s3_url, retry_s=0)
    store.write("x", b"1")
    (tmp_path / "source").write_bytes(b"2")
    faulty_s3.rule = lambda *_: fault
    calls = [
        lambda: store.read_bytes("x"),
        lambda: store.write("x", b"2"),
        lambda: store.create("x", b"2"),
        lambda: store.put_file(tmp_path / "source", "x"),
        lambda: store.get_file("x", tmp_path / "x"),
        lambda: store.size("x"),
        lambda: store.remove("x"),
        lambda: store.remove_tree("x"),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=rf"cannot [a-z ]+.*{s3_url}/x: .*{advice}"):
            call()
    faulty_s3.rule = lambda *_: None
    assert store.read_bytes("x") == b"1"
