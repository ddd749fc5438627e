"""Storage: what each verb promises, on a local folder, in memory and on S3, and what it says when it cannot keep it."""

import errno
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engines.errors import StorageError
from tests.faulty_s3 import Fault, FaultyS3, first_times
from trinity_tasks.remote_files import part_bytes
from trinity_tasks.storage import DamagedObject, ObjectInfo, Storage

moto_only = pytest.mark.skipif("TEST_S3_ENDPOINT" in os.environ, reason="a real server checks signatures and buckets")


@pytest.fixture
def store(store_url: str) -> Storage:
    return Storage(store_url)


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "store"))


def via(proxy: FaultyS3, url: str, retry_s: float = 20) -> Storage:
    return Storage(url, {"endpoint_url": proxy.url}, retry_s=retry_s)


def test_objects_come_back_and_are_listed(store: Storage) -> None:
    store.create("a/b/one", b"1")
    store.create_json("a/two.json", {"x": [1, None, "\u00e9"]})
    store.write("three", b"333")
    assert store.read_bytes("a/b/one") == b"1"
    assert store.read_json("a/two.json") == {"x": [1, None, "\u00e9"]}
    assert store.list() == [ObjectInfo("three", 3)]
    assert [info.name for info in store.list("a")] == ["a/two.json"]
    assert [info.name for info in store.list(recursive=True)] == ["a/b/one", "a/two.json", "three"]
    assert (store.size("three"), store.size("a"), store.size("none")) == (3, None, None)
    assert store.exists("a/b/one")
    assert not store.exists("a/b")


def test_missing_things(store: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_bytes("none")
    assert store.list("none") == []
    assert store.list("none", recursive=True) == []
    store.remove("none")
    store.remove_tree("none")


def test_write_replaces_and_create_does_not(store: Storage) -> None:
    store.write("x", b"first")
    store.write("x", b"second")
    with pytest.raises(FileExistsError):
        store.create("x", b"third")
    assert store.read_bytes("x") == b"second"
    with pytest.raises(FileExistsError):
        store.create("x", b"second")  # equal content is no excuse: another writer made it


def test_create_refuses_an_empty_object(store: Storage) -> None:
    with pytest.raises(StorageError, match="an empty object would bypass"):
        store.create("x", b"")


def test_remove(store: Storage) -> None:
    for name in ("a/1", "a/b/2", "c"):
        store.write(name, b"x")
    store.remove("c")
    store.remove_tree("a/b")
    assert [info.name for info in store.list(recursive=True)] == ["a/1"]
    store.remove_tree("a")
    assert store.list(recursive=True) == []


def test_of_eight_creators_one_wins(store: Storage) -> None:
    barrier, winners = threading.Barrier(8), list[int]()

    def create(number: int) -> None:
        barrier.wait()
        try:
            store.create("prize", b"%d" % number)
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert store.read_bytes("prize") == b"%d" % winners[0]


def test_child_and_pickle_mean_the_same_place(store: Storage) -> None:
    child = pickle.loads(pickle.dumps(store.child("a", "b")))
    child.write("x", b"1")
    assert store.read_bytes("a/b/x") == b"1"
    assert child.url == f"{store.url}/a/b"
    assert child.where("x") == f"{store.url}/a/b/x"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\\b", "a/.tmp-1"])
def test_a_path_cannot_leave_the_store(local: Storage, path: str) -> None:
    with pytest.raises(StorageError, match="not a path inside a store"):
        local.write(path, b"x")


def test_json_has_no_nan_and_damage_is_named(store: Storage) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_json("x.json", {"loss": float("nan")})
    store.write("x.json", b'{"loss": ')
    with pytest.raises(DamagedObject, match=r"x\.json is not JSON \(9 bytes\)"):
        store.read_json("x.json")


def test_files_travel_verified(store: Storage, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(2_000_000)
    (tmp_path / "source").write_bytes(content)
    record = store.put_file(tmp_path / "source", "big")
    assert (record.path, record.size) == ("big", 2_000_000)
    assert (tmp_path / "source").exists()
    store.get_file("big", tmp_path / "in" / "back", size=record.size, sha256=record.sha256)
    assert (tmp_path / "in" / "back").read_bytes() == content

    store.write("big", content[:-1])
    with pytest.raises(DamagedObject, match="has 1999999 bytes, recorded were 2000000"):
        store.get_file("big", tmp_path / "in" / "cut", size=record.size, sha256=record.sha256)
    store.write("big", bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DamagedObject, match=f"recorded was {record.sha256}; its bytes changed"):
        store.get_file("big", tmp_path / "in" / "flipped", size=record.size, sha256=record.sha256)
    with pytest.raises(FileNotFoundError):
        store.get_file("none", tmp_path / "in" / "none")
    assert os.listdir(tmp_path / "in") == ["back"]


def test_large_file_goes_in_parts(s3_url: str, tmp_path: Path, faulty_s3: FaultyS3) -> None:
    content = random.Random(0).randbytes(2**20) * 40
    (tmp_path / "source").write_bytes(content)
    faulty_s3.rule = first_times(1, "500")
    store = via(faulty_s3, s3_url)
    record = store.put_file(tmp_path / "source", "big")
    parts = {path for method, path in faulty_s3.requests if method == "PUT"}
    assert len(parts) == 3  # 40 MB in parts of 16 MB, one of them tried twice
    store.get_file("big", tmp_path / "back", size=record.size, sha256=record.sha256)
    assert (tmp_path / "back").read_bytes() == content


def test_part_size_stays_within_ten_thousand_parts() -> None:
    assert part_bytes(1) == part_bytes(160 * 10**9) == 16 * 2**20
    assert 600 * 10**9 / part_bytes(600 * 10**9) <= 10_000


def test_moved_file_is_consumed_and_later_writes_to_its_name_do_not_reach_the_store(
    local: Storage, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    local.put_file(source, "x", move=True)
    assert not source.exists()
    source.write_bytes(b"other")
    assert local.read_bytes("x") == b"content"


def test_what_another_process_writes_is_seen_at_once(shared_store_url: str, python_environment: dict[str, str]) -> None:
    store = Storage(shared_store_url)
    store.write("d/one", b"1")
    assert [info.name for info in store.list("d")] == ["d/one"]
    assert not store.exists("d/two")
    code = f"""
from trinity_tasks.storage import Storage
store = Storage({shared_store_url!r})
store.create("d/two", b"22")
store.write("d/one", b"111")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=python_environment, timeout=60)
    assert store.list("d") == [ObjectInfo("d/one", 3), ObjectInfo("d/two", 2)]
    assert store.read_bytes("d/two") == b"22"
    assert store.read_bytes("d/one") == b"111"


def test_sigkill_never_leaves_a_torn_object(tmp_path: Path, python_environment: dict[str, str]) -> None:
    code = f"""
from trinity_tasks.storage import Storage
store = Storage({str(tmp_path)!r})
print("ready", flush=True)
for number in range(10**9):
    store.write("x", bytes([number % 256]) * 3_000_000, durable=False)
    store.create(f"d/{{number}}", bytes([number % 256]) * 100_000, durable=False)
"""
    store = Storage(str(tmp_path))
    for seed in range(2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=python_environment) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            try:
                writer.wait(random.Random(seed).uniform(0.02, 0.2))
            except subprocess.TimeoutExpired:
                writer.send_signal(signal.SIGKILL)
        for info in store.list(recursive=True):
            data = store.read_bytes(info.name)
            assert data == data[:1] * (3_000_000 if info.name == "x" else 100_000)
        store.remove_tree("d")
        store.sweep_temporaries("d")
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} - {"x"} <= set(tmp_names(tmp_path))
    (tmp_path / ".tmp-1-dead").write_bytes(b"x")
    assert ".tmp-1-dead" not in {info.name for info in store.list()}


def tmp_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".tmp-")]


def test_quick_writes_are_on_disk_after_flush(local: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    local.create("d/x", b"1", durable=False)
    local.write("d/y", b"2", durable=False)
    local.flush()
    assert {f"{local.url}/d/x", f"{local.url}/d/y", f"{local.url}/d"} <= set(synced)


def test_full_disk_is_named_and_leaves_the_old_object(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.write("x", b"old")
    (tmp_path / "source").write_bytes(b"new")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"cannot write .*/x: .*No space left.*; the disk is full"):
            local.write("x", b"new")
        with pytest.raises(StorageError, match="the disk is full"):
            local.create("y", b"new")
        with pytest.raises(StorageError, match="the disk is full"):
            local.put_file(tmp_path / "source", "x")
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(StorageError, match="the disk is full"):
            local.put_file(tmp_path / "source", "x")
        local.create("quick", b"1", durable=False)
        with pytest.raises(StorageError, match="the disk is full"):
            local.flush()
    assert local.read_bytes("x") == b"old"
    assert not local.exists("y")
    assert tmp_names(Path(local.url)) == []


def test_preflight_passes_and_leaves_nothing(store: Storage) -> None:
    store.check_writable()
    assert store.list(recursive=True) == []


def test_preflight_names_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot create .*/file/job/probe-.*a file is where a folder must be"):
        Storage(str(tmp_path / "file" / "job")).check_writable()


def test_preflight_names_an_impossible_folder() -> None:
    with pytest.raises(StorageError, match=r"cannot create /proc/job/probe-.*; choose another folder|folder cannot be"):
        Storage("/proc/job").check_writable()


@moto_only
def test_preflight_names_a_wrong_bucket(s3_url: str) -> None:
    with pytest.raises(StorageError, match="bucket s3://no-such-bucket does not exist or is not visible"):
        Storage("s3://no-such-bucket/job").check_writable()


@moto_only
def test_preflight_finds_a_store_that_ignores_create_only(s3_url: str, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = lambda *_: "ignore_condition"
    store = via(faulty_s3, s3_url)
    with pytest.raises(StorageError, match="ignores create-only writes"):
        store.check_writable()
    assert store.list() == []


def test_a_single_writer_needs_no_create_only_writes(s3_url: str, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = lambda *_: "ignore_condition"
    store = Storage(s3_url, {"endpoint_url": faulty_s3.url}, single_writer=True)
    store.check_writable()
    assert store.list() == []
    for each in (store.child("a"), store.with_retry_s(5).child("b"), pickle.loads(pickle.dumps(store)).child("c")):
        each.create("x", b"first")
        with pytest.raises(FileExistsError):
            each.create("x", b"second")
        assert each.read_bytes("x") == b"first"
    faulty_s3.rule = first_times(1, "cut_after")
    store.create("lost answer", b"mine")
    assert store.read_bytes("lost answer") == b"mine"


def test_unknown_protocols_and_empty_buckets_are_refused() -> None:
    with pytest.raises(StorageError, match="no driver for gopher://"):
        Storage("gopher://x/y").check_writable()
    with pytest.raises(StorageError, match="names no bucket"):
        Storage("s3://")


def test_relative_paths_and_file_urls_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Storage("runs/").url == Storage(f"file://{tmp_path}/runs").url == str(tmp_path / "runs")
    assert Storage("runs").local_path("x") == tmp_path / "runs" / "x"


def test_transient_errors_are_ridden_out(s3_url: str, faulty_s3: FaultyS3) -> None:
    faults: list[Fault | None] = ["500", "cut_before", None, "503", None, "500", "cut_after", None]
    script = iter(faults)
    faulty_s3.rule = lambda *_: next(script, None)
    store = via(faulty_s3, s3_url)
    store.create("x", b"1")
    store.write("y", b"2")
    assert store.read_bytes("x") == b"1"
    assert [info.name for info in store.list()] == ["x", "y"]


def test_a_create_that_had_succeeded_before_the_answer_was_lost_is_a_success(s3_url: str, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = first_times(1, "cut_after")
    store = via(faulty_s3, s3_url)
    store.create("x", b"mine")
    assert store.read_bytes("x") == b"mine"
    assert [method for method, _ in faulty_s3.requests].count("PUT") == 2


def test_a_create_whose_answer_was_lost_is_refused_when_another_won(s3_url: str, faulty_s3: FaultyS3) -> None:
    Storage(s3_url).create("x", b"theirs")
    faulty_s3.rule = first_times(1, "cut_before")
    with pytest.raises(FileExistsError):
        via(faulty_s3, s3_url).create("x", b"mine")
    assert Storage(s3_url).read_bytes("x") == b"theirs"


def test_a_store_that_is_gone_is_named(s3_url: str) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    store = Storage(s3_url, options, retry_s=0)
    with pytest.raises(StorageError, match=r"cannot read s3://.*/x: .*; the store does not answer; check AWS_ENDPOINT"):
        store.read_bytes("x")


def test_refused_permission_is_named(s3_url: str, faulty_s3: FaultyS3) -> None:
    faulty_s3.rule = lambda *_: "403"
    with pytest.raises(StorageError, match=r"cannot write s3://.*/x: Access Denied; no permission; check the credent"):
        via(faulty_s3, s3_url).write("x", b"1")


def test_expired_credentials_are_read_again(s3_url: str, faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty_s3.rule = lambda method, path, authorization: "expired" if "Credential=old/" in authorization else None
    store = via(faulty_s3, s3_url, retry_s=1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    store._backend._forget_connections()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match=r"/x: .*; the credentials have expired; renew them"):
        store.write("x", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    store.write("x", b"2")
    assert store.read_bytes("x") == b"2"
