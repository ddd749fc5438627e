"""Lease: exactly one writer per job, on a local folder and on S3, whatever happened to the one before."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from engines.errors import LeaseLost
from trinity_tasks.lease import Lease, LeaseRecord, read_holder
from trinity_tasks.process import Process
from trinity_tasks.storage import Storage

OTHER_MACHINE = Process(host="far", boot_id="other", pid_namespace="pid:[1]", pid=7, started="1")


@pytest.fixture
def store(shared_store_url: str) -> Storage:
    return Storage(shared_store_url)


def holder_elsewhere(store: Storage, *, silent_s: float, ttl_s: float = 60, beat: int = 3) -> None:
    """Lease 1, of a process whose end cannot be seen from here."""
    record = LeaseRecord(
        number=1,
        holder=OTHER_MACHINE,
        note="flow run tall-fox",
        since="2026-01-02T03:04:05+00:00",
        heartbeat_at=time.time() - silent_s,
        beat=beat,
        ttl_s=ttl_s,
    )
    store.write_json("lease/00000001.json", record.model_dump(mode="json"))


def test_acquire_check_release(store: Storage) -> None:
    with Lease.acquire(store, holder_note="flow run red-owl") as lease:
        assert (lease.number, lease.took_over) == (1, False)
        lease.check()
        held = read_holder(store)
        assert held is not None
        assert (held.holder.pid, held.note, held.released) == (os.getpid(), "flow run red-owl", False)
    lease.release()
    held = read_holder(store)
    assert held is not None
    assert held.released
    with pytest.raises(LeaseLost, match="was released by this process"):
        lease.check()
    with Lease.acquire(store) as lease:
        assert (lease.number, lease.took_over) == (2, False)


def test_second_holder_is_refused_at_once_and_told_who_has_it(store: Storage) -> None:
    with Lease.acquire(store):
        started = time.monotonic()
        with pytest.raises(LeaseLost, match=rf"is held by pid {os.getpid()} on .* since .*, last heartbeat \d+ s ago"):
            Lease.acquire(store)
        assert time.monotonic() - started < 2


def test_holder_on_another_machine_is_believed(store: Storage) -> None:
    holder_elsewhere(store, silent_s=20)
    message = r"held by pid 7 on far \(flow run tall-fox\) since 2026-01-02T03:04:05\+00:00, last heartbeat 2\d s ago"
    with pytest.raises(LeaseLost, match=message):
        Lease.acquire(store)


def test_silent_holder_on_another_machine_loses_the_job(store: Storage) -> None:
    holder_elsewhere(store, silent_s=100, ttl_s=0.4)
    with Lease.acquire(store) as lease:
        assert (lease.number, lease.took_over) == (2, True)


@pytest.mark.parametrize("clock_error_s", [100, -100], ids=["holder's clock is late", "holder's clock is early"])
def test_living_holder_with_a_wrong_clock_keeps_the_job(tmp_path: Path, clock_error_s: float) -> None:
    store = Storage(str(tmp_path))
    holder_elsewhere(store, silent_s=clock_error_s, ttl_s=2)
    beating = threading.Timer(0.3, holder_elsewhere, (store,), {"silent_s": clock_error_s, "ttl_s": 2, "beat": 4})
    beating.start()
    with pytest.raises(LeaseLost, match="is held by pid 7 on far"):
        Lease.acquire(store)
    beating.join()


def test_dead_holder_with_an_early_clock_loses_the_job_after_its_ttl(tmp_path: Path) -> None:
    store = Storage(str(tmp_path))
    holder_elsewhere(store, silent_s=-3600, ttl_s=0.5)
    started = time.monotonic()
    with Lease.acquire(store) as lease:
        assert lease.took_over
        assert time.monotonic() - started >= 0.5


HOLD = """
import sys, time
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage
lease = Lease.acquire(Storage(sys.argv[1]), ttl_s=float(sys.argv[2]))
print(lease.number, flush=True)
time.sleep(60)
"""


def test_killed_holder_on_this_machine_is_replaced_at_once(store: Storage, python_environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", HOLD, store.url, "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(LeaseLost, match=f"is held by pid {holder.pid} on "):
            Lease.acquire(store)
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # ended, but still in the process table
        started = time.monotonic()
        with Lease.acquire(store) as lease:
            assert (lease.number, lease.took_over) == (2, True)
            assert time.monotonic() - started < 2


def test_pid_that_belongs_to_a_later_process_is_not_the_holder(tmp_path: Path) -> None:
    store = Storage(str(tmp_path))
    Lease.acquire(store).release()
    holder = read_holder(store)
    assert holder is not None
    reused = holder.model_copy(update={"released": False, "holder": holder.holder.model_copy(update={"started": "1"})})
    store.write_json("lease/00000001.json", reused.model_dump(mode="json"))
    with Lease.acquire(store) as lease:
        assert lease.took_over


def test_same_pid_in_another_container_is_not_judged() -> None:
    here = Process.current()
    assert here.is_gone() is False
    assert here.model_copy(update={"pid": 2**22 + 1}).is_gone() is True
    assert here.model_copy(update={"pid_namespace": "pid:[1]", "pid": 2**22 + 1}).is_gone() is None
    assert here.model_copy(update={"boot_id": "other", "pid": 2**22 + 1}).is_gone() is None


def test_stopped_holder_is_overtaken_and_finds_out(tmp_path: Path, python_environment: dict[str, str]) -> None:
    store = Storage(str(tmp_path))
    code = HOLD.replace("time.sleep(60)", "sys.stdin.readline()\nlease.check()")
    command = [sys.executable, "-c", code, store.url, "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=python_environment
    ) as zombie:
        assert zombie.stdout is not None
        zombie.stdout.readline()
        zombie.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while True:
            try:
                lease = Lease.acquire(store)
                break
            except LeaseLost:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert lease.number == 2
        zombie.send_signal(signal.SIGCONT)
        _, error = zombie.communicate(b"\n", timeout=30)
    assert zombie.returncode == 1
    assert b"LeaseLost" in error
    assert f"was taken over by pid {os.getpid()} on ".encode() in error
    lease.check()
    lease.release()


def test_heartbeat_keeps_the_lease_and_finds_its_loss(tmp_path: Path) -> None:
    store = Storage(str(tmp_path))
    lease = Lease.acquire(store, ttl_s=0.2)
    first = read_holder(store)
    assert first is not None
    deadline = time.monotonic() + 10
    while (now := read_holder(store)) is not None and now.beat < first.beat + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.check_local()
    holder_elsewhere(store, silent_s=0)
    stolen = read_holder(store)
    assert stolen is not None
    store.create_json("lease/00000002.json", stolen.model_copy(update={"number": 2}).model_dump(mode="json"))
    while lease.is_lost is False:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(LeaseLost, match=r"was taken over by pid 7 on far \(lease 2, ours was 1\).*stop this run"):
        lease.check_local()
    lease.release()
    still = read_holder(store)
    assert still is not None
    assert (still.number, still.released) == (2, False)


def test_of_eight_threads_one_gets_the_job(store: Storage) -> None:
    barrier, won, lost = threading.Barrier(8), list[Lease](), list[LeaseLost]()

    def acquire() -> None:
        barrier.wait()
        try:
            won.append(Lease.acquire(store))
        except LeaseLost as error:
            lost.append(error)

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].release()


def _contend(url: str, barrier: Barrier, results: "multiprocessing.Queue[int]") -> None:
    store = Storage(url)
    store.list("lease")
    barrier.wait(60)
    try:
        results.put(Lease.acquire(store).number)
    except LeaseLost:
        results.put(0)
    barrier.wait(60)  # nobody ends, and so seems dead, before all have tried


def test_of_two_processes_one_gets_the_job_of_a_dead_one(store: Storage) -> None:
    holder_elsewhere(store, silent_s=100, ttl_s=0.2)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_contend, args=(store.url, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    numbers = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert numbers == [0, 2]


def test_old_leases_are_tidied_away(tmp_path: Path) -> None:
    store = Storage(str(tmp_path))
    for _ in range(5):
        Lease.acquire(store).release()
    assert [info.name for info in store.list("lease")] == ["lease/00000004.json", "lease/00000005.json"]
