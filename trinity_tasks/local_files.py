"""Objects as files of a local folder: atomic, durable, create-only. Standard library only.

Owns: temporary file in the same folder, fsync, rename or exclusive link. Does not own: what is written, error messages
for users (`trinity_tasks.storage`). A process killed at any instruction leaves the old object, the new one, or none;
at worst a `.tmp-` file stays, which listings do not show and `sweep` removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TMP_PREFIX = ".tmp-"


def _sync(path: str) -> None:
    """fsync of a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(directory: str) -> None:
    """Create a folder and its parents, each name durable.

    Raises NotADirectoryError if a parent is a file: FileExistsError is kept for objects.
    """
    missing: list[str] = []
    current = directory
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of a folder", path) from None
        _sync(os.path.dirname(path))


@contextlib.contextmanager
def _temporary(target: str) -> Generator[str]:
    """A fresh name beside `target`; gone afterwards, whatever happens."""
    path = f"{os.path.dirname(target)}/{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def _write(path: str, data: bytes, synced: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except FileNotFoundError:
        make_dirs(os.path.dirname(path))
        fd = os.open(path, flags, 0o666)
    with open(fd, "wb") as file:
        file.write(data)
        if synced:
            file.flush()
            os.fsync(fd)


class _BackgroundSync:
    """Brings files to disk in one background thread, so that a train step does not wait 4-8 ms for each."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "sync-files")
        self._lock = threading.Lock()
        self._paths: set[str] = set()
        self._error: OSError | None = None

    def add(self, path: str) -> None:
        with self._lock:
            self._paths.add(path)
        self._executor.submit(self._drain)

    def wait(self) -> None:
        """Return when everything added so far is on disk. Raises OSError of any file that could not be."""
        self._executor.submit(self._drain).result()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _drain(self) -> None:
        with self._lock:
            paths, self._paths = self._paths, set()
        try:
            for path in (*paths, *{os.path.dirname(path) for path in paths}):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    _sync(path)
        except OSError as error:
            with self._lock:
                self._error = error


_syncs: dict[int, _BackgroundSync] = {}


def background_sync() -> _BackgroundSync:
    """This process's own: threads do not survive a fork."""
    return _syncs.get(os.getpid()) or _syncs.setdefault(os.getpid(), _BackgroundSync())


class LocalFiles:
    """The store of a `file://` job. Paths are relative to `root`, with forward slashes.

    A killed process never leaves a torn object. Against power failure: `durable=True` returns when bytes and name are
    on disk; `durable=False` returns at once and a background thread brings them there, which `flush` waits for.
    """

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, root: str) -> None:
        self.root = root

    def local_path(self, path: str) -> Path | None:
        return Path(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def read(self, path: str) -> bytes:
        with open(self._full(path), "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes, durable: bool) -> None:
        target = self._full(path)
        with _temporary(target) as tmp:
            _write(tmp, data, synced=durable)
            os.replace(tmp, target)
        self._name_synced(target, durable)

    def create(self, path: str, data: bytes, durable: bool) -> None:
        """Raises FileExistsError: of any number of callers exactly one creates the object."""
        target = self._full(path)
        with _temporary(target) as tmp:
            _write(tmp, data, synced=durable)
            try:
                os.link(tmp, target)
            except FileExistsError:
                raise FileExistsError(errno.EEXIST, "the object exists", target) from None
        self._name_synced(target, durable)

    def _name_synced(self, target: str, durable: bool) -> None:
        if durable:
            _sync(os.path.dirname(target))
        else:
            background_sync().add(target)

    def flush(self) -> None:
        background_sync().wait()

    def upload(self, local: Path, path: str, move: bool) -> None:
        """Copy a file in, or rename it when `move` and both are on one file system."""
        target = self._full(path)
        make_dirs(os.path.dirname(target))
        if move:
            _sync(str(local))
            try:
                os.replace(local, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            else:
                _sync(os.path.dirname(target))
                return
        with _temporary(target) as tmp:
            shutil.copyfile(local, tmp)
            _sync(tmp)
            os.replace(tmp, target)
        _sync(os.path.dirname(target))

    def download(self, path: str, local: Path, has_hash: bool) -> None:
        shutil.copyfile(self._full(path), local)

    def list(self, prefix: str, recursive: bool) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        pending = [prefix]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(self._full(folder)) as entries:
                    for entry in entries:
                        name = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_dir():
                            if recursive:
                                pending.append(name)
                        elif not entry.name.startswith(TMP_PREFIX):
                            with contextlib.suppress(FileNotFoundError):  # removed since the scan
                                found.append((name, entry.stat().st_size))
            except (FileNotFoundError, NotADirectoryError):
                continue
        return found

    def size(self, path: str) -> int | None:
        try:
            status = os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if os.path.isdir(self._full(path)) else status.st_size

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._full(path))

    def remove_tree(self, prefix: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(self._full(prefix))

    def sweep(self, prefix: str) -> int:
        """Remove temporary files that killed writers left; the caller is the only writer. Returns their number."""
        count = 0
        for folder, _, names in os.walk(self._full(prefix)):
            for name in names:
                if name.startswith(TMP_PREFIX):
                    os.unlink(f"{folder}/{name}")
                    count += 1
        return count
