"""Metrics and files that a tracking server has not acknowledged yet: ordered, bounded in memory, safe across threads.

Owns: the queue of points, its overflow file, staged copies of artifacts. Does not own: sending, retrying, or what
counts as already sent (`tracking.py`).

    <folder>/overflow.jsonl     points beyond the memory limit, oldest first, newer than those in memory
    <folder>/unsent.jsonl       points that a close could not deliver; read by the next `Spool` of the same folder
    <folder>/rejected.jsonl     points that the server refused for good, with its reason
    <folder>/artifacts/<n>/...  files to upload, laid out as they shall lie in the run
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from engines.errors import DataError


@dataclass(frozen=True, slots=True)
class Point:
    """All metrics that one stream logged at one step; sent whole or not at all."""

    stream: str
    """Steps of a stream only grow."""
    step: int
    timestamp_ms: int
    """Milliseconds since the epoch."""
    values: dict[str, float]
    """Legal name -> finite number."""
    nonfinite: tuple[str, ...] = ()
    """Legal names of metrics that were NaN or infinite at this step."""

    @property
    def num_metrics(self) -> int:
        """Rows this point becomes at the server, marker included."""
        return len(self.values) + len(self.nonfinite) + 1

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`. Raises DataError if a field is missing or has the wrong type."""
        try:
            return cls(
                stream=str(raw["stream"]),
                step=int(raw["step"]),
                timestamp_ms=int(raw["timestamp_ms"]),
                values={str(key): float(value) for key, value in raw["values"].items()},
                nonfinite=tuple(raw["nonfinite"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"metrics spool: {str(raw)[:200]} is not a point ({error!r})") from error

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for a checkpoint."""
        return {**asdict(self), "nonfinite": list(self.nonfinite)}

    def split(self, max_metrics: int) -> list[Self]:
        """Itself, or if it is too large for one atomic call, parts as points of the streams `name`, `name.1`, ..."""
        if self.num_metrics <= max_metrics:
            return [self]
        items = [(key, True) for key in self.values] + [(key, False) for key in self.nonfinite]
        size = max_metrics - 1
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        return [
            replace(
                self,
                stream=f"{self.stream}.{number}" if number else self.stream,
                values={key: self.values[key] for key, finite in part if finite},
                nonfinite=tuple(key for key, finite in part if not finite),
            )
            for number, part in enumerate(parts)
        ]


class Spool:
    """First in, first out. `append` never waits for a disk; the rest belongs to the thread that sends.

    Example:
        >>> spool = Spool(Path("spool"))
        >>> spool.append(Point("train", 1, 0, {"loss": 0.5}))
        >>> spool.balance(); spool.acknowledge(len(spool.head(1000))); spool.num_metrics
        0
    """

    def __init__(self, folder: Path, pending: Iterable[Point] = (), max_metrics: int = 200_000) -> None:
        """`pending` and what an earlier process left in `folder` come first. max_metrics: limit of memory, rows."""
        self.folder = folder
        self._max_metrics = max_metrics
        self._lock = threading.Lock()  # the two queues and their counts; held for microseconds
        self._file_lock = threading.Lock()  # the overflow file; always taken before _lock
        self._memory: deque[Point] = deque()
        self._inbox: deque[Point] = deque()
        self._memory_metrics = self._inbox_metrics = self._overflow_metrics = 0
        self._overflow_offset = 0
        self._next_artifact = itertools.count(1 + max((int(path.name[:8]) for path in self.artifacts()), default=0))
        unsent = [*self._read("unsent.jsonl"), *self._read("overflow.jsonl")]
        merged = {(point.stream, point.step): point for point in [*pending, *unsent]}
        for point in sorted(merged.values(), key=lambda point: point.step):
            self.append(point)
        if unsent:  # a crash before they are acknowledged must find them again, in one place
            self._write("unsent.jsonl", list(self._inbox))
            self._path("overflow.jsonl").unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / name

    @property
    def num_metrics(self) -> int:
        """Rows not acknowledged."""
        with self._lock:
            return self._memory_metrics + self._inbox_metrics + self._overflow_metrics

    @property
    def num_overflow_metrics(self) -> int:
        """Rows of those that are on disk only."""
        return self._overflow_metrics

    def append(self, point: Point) -> None:
        """Add the newest point, in memory."""
        with self._lock:
            self._inbox.append(point)
            self._inbox_metrics += point.num_metrics

    def balance(self) -> None:
        """Move what is beyond the memory limit to disk, and back when memory is empty. Raises OSError: disk full."""
        with self._file_lock:
            beyond = self._take_inbox()
            if beyond:
                self._append_overflow(beyond)
            if not self._memory and self._overflow_metrics:
                self._refill()

    def _take_inbox(self) -> list[Point]:
        with self._lock:
            while self._inbox and not self._overflow_metrics:
                point = self._inbox[0]
                if self._memory and self._memory_metrics + point.num_metrics > self._max_metrics:
                    break
                self._memory.append(self._inbox.popleft())
                self._memory_metrics += point.num_metrics
                self._inbox_metrics -= point.num_metrics
            return list(self._inbox)

    def _append_overflow(self, points: list[Point]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path("overflow.jsonl").open("ab") as file:
            start = file.tell()
            try:
                file.writelines(json.dumps(point.to_json()).encode() + b"\n" for point in points)
                file.flush()
            except OSError:
                file.truncate(start)  # half a line would spoil all that follow
                raise
        size = sum(point.num_metrics for point in points)
        with self._lock:
            for _ in points:
                self._inbox.popleft()
            self._inbox_metrics -= size
            self._overflow_metrics += size

    def _refill(self) -> None:
        points: list[Point] = []
        size = 0
        with self._path("overflow.jsonl").open("rb") as file:
            file.seek(self._overflow_offset)
            while size < self._max_metrics and (line := file.readline()):
                points.append(self._parse(line))
                size += points[-1].num_metrics
            self._overflow_offset = file.tell()
        with self._lock:
            self._memory.extend(points)
            self._memory_metrics += size
            self._overflow_metrics -= size
        if not self._overflow_metrics:
            self._path("overflow.jsonl").unlink()
            self._overflow_offset = 0

    def head(self, max_metrics: int) -> list[Point]:
        """Oldest points, whole, of at most `max_metrics` rows; at least one if there is any in memory."""
        points: list[Point] = []
        size = 0
        with self._lock:
            for point in self._memory:
                size += point.num_metrics
                if points and size > max_metrics:
                    break
                points.append(point)
        return points

    def acknowledge(self, num_points: int) -> None:
        """Forget that many of the oldest points."""
        with self._lock:
            for _ in range(num_points):
                self._memory_metrics -= self._memory.popleft().num_metrics
            empty = not (self._memory or self._inbox or self._overflow_metrics)
        if empty:
            self._path("unsent.jsonl").unlink(missing_ok=True)

    def reject(self, reason: str) -> None:
        """Set the oldest point aside for good."""
        [point] = self.head(1)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path("rejected.jsonl").open("a") as file:
            file.write(json.dumps({"reason": reason, **point.to_json()}) + "\n")
        self.acknowledge(1)

    def snapshot(self) -> list[Point]:
        """Every point not acknowledged, oldest first."""
        with self._file_lock:
            overflow = self._read("overflow.jsonl", self._overflow_offset) if self._overflow_metrics else []
            with self._lock:
                return [*self._memory, *overflow, *self._inbox]

    def persist(self) -> None:
        """Write every unacknowledged point to disk for the next `Spool` of this folder. Raises OSError."""
        if points := self.snapshot():
            self._write("unsent.jsonl", points)
        self._path("overflow.jsonl").unlink(missing_ok=True)

    def _write(self, name: str, points: Iterable[Point]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._path(f"{name}.partial")
        partial.write_text("".join(json.dumps(point.to_json()) + "\n" for point in points))
        partial.replace(self._path(name))

    def _read(self, name: str, offset: int = 0) -> list[Point]:
        path = self._path(name)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(offset)
            # a process that was killed while writing leaves half a line at the end
            return [self._parse(line) for line in file if line.endswith(b"\n")]

    def _parse(self, line: bytes) -> Point:
        try:
            return Point.from_json(json.loads(line))
        except ValueError as error:  # DataError is one
            raise DataError(f"{self.folder}: undelivered metrics cannot be read, delete the folder: {error}") from error

    def stage_copy(self, path: Path, relative: str) -> None:
        """Keep a copy of a file or folder until it is uploaded into `relative`. Raises OSError, DataError."""

        def fill(folder: Path) -> None:
            target = _inside(folder, relative)
            target.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target / path.name)
            else:
                shutil.copyfile(path, target / path.name)

        self._stage(fill, "file")

    def stage_bytes(self, data: bytes, relative: str, label: str = "file") -> None:
        """Keep `data` until it is uploaded as the file `relative`. Raises OSError, DataError."""

        def fill(folder: Path) -> None:
            target = _inside(folder, relative)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

        self._stage(fill, label)

    def _stage(self, fill: Callable[[Path], None], label: str) -> None:
        root = self._path("artifacts")
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=self.folder))
        fill(partial)
        partial.rename(root / f"{next(self._next_artifact):08d}-{label}")

    def artifacts(self) -> list[Path]:
        """Staged folders `<n>-<label>`, oldest first."""
        root = self._path("artifacts")
        return sorted(root.iterdir()) if root.is_dir() else []

    def discard(self, staged: Path) -> None:
        """Forget a staged folder that was uploaded."""
        shutil.rmtree(staged)

    def remove_if_empty(self) -> None:
        """Remove the folder unless it keeps something unsent or rejected."""
        if not self.folder.is_dir() or self.artifacts() or any(self.folder.glob("*.jsonl")):
            return
        shutil.rmtree(self.folder)


def default_folder(identity: str) -> Path:
    """A folder of this machine for one job, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinity-flows" / "tracking"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a container without a home: what is undelivered then lives as long as the machine
        cache = Path(tempfile.gettempdir()) / "trinity-flows-tracking"
    return cache / hashlib.sha256(identity.encode()).hexdigest()[:16]


def _inside(folder: Path, relative: str) -> Path:
    target = (folder / relative).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise DataError(f"artifact path {relative!r} leads out of the run; give a relative path without ..")
    return target
