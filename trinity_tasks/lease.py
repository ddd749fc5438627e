"""`Lease`: one writer per job. Objects `lease/<number>.json`, created create-only; the highest number is the holder.

Owns: who may write, heartbeats, when a silent holder has lost the job. Does not own: what is protected; a number that
was overtaken is refused where it matters, by the create-only commit (`trinity_tasks.checkpoint`).

When may a held job be taken over?
* Released: at once.
* Same machine (boot id and pid namespace) and the process is gone, or its pid belongs to another process: at once.
* Otherwise after `ttl_s` of silence. Clocks of two machines are not trusted alone: a lease that looks expired is first
  watched for half its ttl (a live holder beats four times per ttl), one from a far future for its whole ttl. A holder
  that was wrongly overtaken is stopped, and can damage nothing: its commits are refused.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from engines.config import Frozen
from engines.errors import LeaseLost, StorageError
from trinity_tasks.process import Process
from trinity_tasks.storage import DamagedObject, Storage

TTL_S = 60.0
BEATS_PER_TTL = 4


class LeaseRecord(Frozen):
    """One `lease/<number>.json`."""

    number: int
    """Fencing number: grows with every holder."""
    holder: Process
    note: str
    """What the holder says of itself, for example its flow run."""
    since: str
    """UTC, ISO 8601."""
    heartbeat_at: float
    """Holder's clock, seconds since the epoch."""
    beat: int
    """Counts heartbeats."""
    ttl_s: float
    """Silence after which the holder has lost the job."""
    released: bool = False


def _path(number: int) -> str:
    return f"lease/{number:08d}.json"


def _numbers(store: Storage) -> list[int]:
    names = (Path(info.name) for info in store.list("lease"))
    return sorted(int(name.stem) for name in names if name.suffix == ".json" and name.stem.isdecimal())


def _read(store: Storage, number: int) -> LeaseRecord | None:
    try:
        return LeaseRecord.model_validate(store.read_json(_path(number)))
    except FileNotFoundError:
        return None  # a later holder tidied it away
    except (ValidationError, DamagedObject) as error:
        raise StorageError(
            f"{store.where(_path(number))} is not a lease: {error}; remove it if no run is alive"
        ) from error


def read_holder(store: Storage) -> LeaseRecord | None:
    """The latest lease of a job, held or released, without taking it; None if nobody ever held it."""
    numbers = _numbers(store)
    return _read(store, numbers[-1]) if numbers else None


def _refusal(store: Storage, record: LeaseRecord) -> LeaseLost:
    silent_s = max(0.0, time.time() - record.heartbeat_at)
    note = f" ({record.note})" if record.note else ""
    return LeaseLost(
        f"{store.url} is held by pid {record.holder.pid} on {record.holder.host}{note} since {record.since}, "
        f"last heartbeat {silent_s:.0f} s ago; wait until it ends, or stop it. "
        f"If it is dead, its lease expires {record.ttl_s:.0f} s after its last heartbeat"
    )


def _wait_until_free(store: Storage, record: LeaseRecord) -> None:
    """Return if the job may be taken over from this holder. Raises LeaseLost if it is alive."""
    if record.released or record.holder.is_gone():
        return
    silent_s = time.time() - record.heartbeat_at
    if -record.ttl_s <= silent_s < record.ttl_s:
        raise _refusal(store, record)
    deadline = time.monotonic() + (record.ttl_s / 2 if silent_s > 0 else record.ttl_s)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, record.ttl_s / 20))
        seen = _read(store, record.number)
        if seen is None or seen.released:
            return
        if seen.beat != record.beat:
            raise _refusal(store, seen)


class Lease:
    """The right to write one job. Use `Lease.acquire`, then `release`; a heartbeat thread keeps it.

    Example:
        >>> with Lease.acquire(Storage("memory://leased-job")) as lease:
        ...     lease.check()
        ...     lease.number
        1
    """

    def __init__(self, store: Storage, record: LeaseRecord, took_over: bool) -> None:
        self.took_over = took_over
        """The previous holder did not release it: it may still be alive somewhere, so the next commit must fence it."""
        self._store = store.with_retry_s(record.ttl_s / BEATS_PER_TTL)
        self._record = record
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._last_beat = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name=f"lease-{record.number}", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, store: Storage, *, ttl_s: float = TTL_S, holder_note: str = "") -> Lease:
        """Become the only writer of the job.

        Raises LeaseLost, which names the holder, if it is held; StorageError.
        """
        numbers = _numbers(store)
        previous = _read(store, numbers[-1]) if numbers else None
        if previous is not None:
            _wait_until_free(store, previous)
        number = numbers[-1] + 1 if numbers else 1
        record = LeaseRecord(
            number=number,
            holder=Process.current(),
            note=holder_note,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            heartbeat_at=time.time(),
            beat=0,
            ttl_s=ttl_s,
        )
        try:
            store.create_json(_path(number), record.model_dump(mode="json"))
        except FileExistsError as error:
            winner = _read(store, number)
            if winner is None:
                raise LeaseLost(f"{store.url} was taken by another process just now; wait until it ends") from error
            raise _refusal(store, winner) from error
        if _numbers(store)[-1] != number:  # our listing was so old that the number had been used and tidied away
            store.remove(_path(number))
            raise LeaseLost(f"{store.url} was taken by another process just now; wait until it ends")
        for old in numbers[:-1]:
            store.remove(_path(old))
        return cls(store, record, took_over=previous is not None and not previous.released)

    @property
    def number(self) -> int:
        """Fencing number: grows with every holder of the job."""
        return self._record.number

    @property
    def is_lost(self) -> bool:
        """Whether the heartbeat has found the lease lost, or it was released. Costs nothing."""
        return self._lost is not None

    def check_local(self) -> None:
        """Raises LeaseLost if the heartbeat has found the lease lost. Costs nothing: for every step."""
        if self._lost is not None:
            raise LeaseLost(self._lost)

    def check(self) -> None:
        """Ask the store whether the lease is still ours. Before every commit.

        Raises LeaseLost, which names who has it now; StorageError if the store cannot be asked.
        """
        self.check_local()
        self._look_for_successor()
        if time.monotonic() - self._last_beat > self._record.ttl_s / 2:
            self._beat()
        self.check_local()

    def release(self) -> None:
        """Let the next holder in at once. Idempotent; a lost lease is left alone."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with self._lock:
            if self._lost is None:
                self._lost = f"lease {self.number} of {self._store.url} was released by this process"
                self._record = self._record.model_copy(update={"released": True})
                self._store.write_json(_path(self.number), self._record.model_dump(mode="json"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _look_for_successor(self) -> None:
        numbers = _numbers(self._store)
        if numbers and numbers[-1] > self.number:
            record = _read(self._store, numbers[-1])
            who = f"pid {record.holder.pid} on {record.holder.host}" if record is not None else "another process"
            self._lost = (
                f"{self._store.url} was taken over by {who} (lease {numbers[-1]}, ours was {self.number}), because "
                f"this process was silent for {self._record.ttl_s:.0f} s; nothing more is written; stop this run"
            )

    def _beat(self) -> None:
        with self._lock:
            if self._record.released:
                return
            self._record = self._record.model_copy(update={"heartbeat_at": time.time(), "beat": self._record.beat + 1})
            self._store.write_json(_path(self.number), self._record.model_dump(mode="json"))
            self._last_beat = time.monotonic()

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(self._record.ttl_s / BEATS_PER_TTL) and self._lost is None:
            try:
                self._look_for_successor()
                if self._lost is None:
                    self._beat()
            except StorageError:
                # An outage shorter than the ttl costs nothing. After a longer one the successor, if there is one, is
                # found at the next beat, or by `check` before anything is committed.
                continue
