"""`CheckpointStore`: commits of a job. Objects first, then a create-only manifest, which makes the checkpoint exist.

Owns: the commit protocol, choosing and restoring the latest valid commit, retention, orphans, fencing. Does not own:
what is in a snapshot (engines) or in the cursor (`trinity_tasks.buffer.cursor`).

    checkpoints/global_step_00000010-3f9a1c07/...   objects; the suffix is new for every try, so nothing is overwritten
    commits/00000007.json                           the manifest of commit 7

Numbers only grow, and latest means the highest. A process learns its next number when it opens the store and then
counts by itself. So when a job is taken over from a holder that may still be alive, the new holder creates a *fence*,
a manifest without files, under the number that the old one would use next: the old one finds it and stops.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from pydantic import Field, JsonValue, ValidationError

from engines.config import Frozen
from engines.errors import CheckpointError, LeaseLost, StorageError
from trinity_tasks.buffer.cursor import Cursor, Position
from trinity_tasks.buffer.ledger import StoredCursor
from trinity_tasks.folders import DamagedFolder, damaged_files, fetch_folder, missing_files, store_folder
from trinity_tasks.lease import Lease
from trinity_tasks.storage import DamagedObject, FileRecord, Storage
from trinity_tasks.usage import Usage

FORMAT_VERSION = 1
_PREFIX = re.compile(r"checkpoints/global_step_\d{8,}-[0-9a-f]{8}(?=/)")
COMMITTED_MODEL = re.compile(rf"(.+)/({_PREFIX.pattern})/model/?")
"""URL of the model in a checkpoint: that of its job, and the checkpoint's prefix."""
_log = logging.getLogger(__name__)


class CommitFields(TypedDict, total=False):
    """What the trainer may put into a commit beside step and files. Meaning and defaults: `Manifest`."""

    cursor: Cursor
    buffer_state: JsonValue
    num_experiences: int
    usage: Usage
    finished: bool
    attempt: int
    config_fingerprint: str
    code_version: str
    tracker_run_id: str | None
    tracker_high_water: dict[str, int]
    best_metric: dict[str, float]
    metrics: dict[str, float]
    state: dict[str, JsonValue]


class Manifest(Frozen):
    """One `commits/<number>.json`: everything that goes back together when the job resumes."""

    format_version: int = FORMAT_VERSION
    number: int
    """Commit number, from 1."""
    kind: Literal["checkpoint", "fence"] = "checkpoint"
    """fence: no files; keeps an overtaken process from committing."""
    lease: int
    """Fencing number of the lease that it was written under."""
    created_at: str
    """UTC, ISO 8601."""
    parent: int | None = None
    """Commit that the process restored or made before this one."""
    step: int = 0
    """Completed train steps."""
    prefix: str = ""
    """Folder of the objects, relative to the job."""
    files: tuple[FileRecord, ...] = ()
    """Relative to `prefix`. RNG, optimizer and schedule are in them: the engine's own."""
    cursor: StoredCursor = Field(default_factory=Cursor.start)
    """Rows before it are consumed."""
    buffer_state: JsonValue = None
    """Of the sample strategy."""
    num_experiences: int = 0
    """Rows that all steps so far have trained on, each use counted."""
    usage: Usage = Usage()
    """What became of the tokens that the steps so far came to."""
    finished: bool = False
    """The job had reached its end."""
    attempt: int = 0
    """Which process of the job, as job.json counts them."""
    config_fingerprint: str = ""
    code_version: str = ""
    tracker_run_id: str | None = None
    """MLflow run."""
    tracker_high_water: dict[str, int] = Field(default_factory=dict[str, int])
    """Highest step that was handed to the tracker, by metric group."""
    best_metric: dict[str, float] = Field(default_factory=dict[str, float])
    """Best value so far, by metric."""
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    """What was measured in this step, for whoever looks at the job; numbers that are not finite are left out."""
    state: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further training state."""

    @property
    def position(self) -> Position:
        """Where the next step takes its rows."""
        return Position(self.cursor, self.buffer_state)


def _path(number: int) -> str:
    return f"commits/{number:08d}.json"


class CheckpointStore:
    """The commits of one job. With a lease it writes; without, it only reads.

    Opening it with a lease reads the commits and, after a takeover, writes the fence: open it before reading the state
    that a resume starts from. Raises LeaseLost, StorageError.

    Example:
        >>> store = CheckpointStore(job, lease, keep=3)                 # doctest: +SKIP
        >>> manifest = store.restore_latest(folder)                     # doctest: +SKIP
        >>> store.commit(staging, step=10, cursor=cursor).number        # doctest: +SKIP
        1
    """

    def __init__(
        self,
        store: Storage,
        lease: Lease | None = None,
        keep: int = 0,
        after_commit: Callable[[], None] | None = None,
    ) -> None:
        self.keep = keep
        """Retention after each commit, in checkpoints; 0 keeps all."""
        self.after_commit = after_commit
        """Called when a commit stands and old ones are gone, in its thread. What it raises, the commit raises."""
        self.skipped: list[str] = []
        """Why commits were passed over, since `latest`, `restore_latest`, `commits` or `clean_orphans` last began."""
        self._store = store
        self._lease = lease
        self._next = 1
        self._last: Manifest | None = None
        self._unconfirmed: Manifest | None = None
        self._executor = ThreadPoolExecutor(1, "checkpoint-upload")
        self._pending: Future[Manifest] | None = None
        if lease is not None:
            self._open(lease)

    def _open(self, lease: Lease) -> None:
        for _ in range(10):
            self._next = (self._numbers() or [0])[-1] + 1
            lease.check()  # after the listing: whoever overtakes us from now on fences this number or a later one
            if not lease.took_over:
                return
            created_at = datetime.now(UTC).isoformat(timespec="seconds")
            fence = Manifest(number=self._next, kind="fence", lease=lease.number, created_at=created_at)
            with contextlib.suppress(FileExistsError):  # the old holder has committed since the listing
                self._store.create_json(_path(self._next), fence.model_dump(mode="json"))
                self._next += 1
                return
        raise CheckpointError(f"{self._store.url}: the process that had the job before goes on committing; stop it")

    # -- reading ------------------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        names = (Path(info.name) for info in self._store.list("commits"))
        return sorted(int(name.stem) for name in names if name.suffix == ".json" and name.stem.isdecimal())

    def _read(self, number: int) -> Manifest:
        """Raises DamagedFolder if it is not a manifest, CheckpointError if it is one of a later format."""
        where = self._store.where(_path(number))
        try:
            value = self._store.read_json(_path(number))
            version = value.get("format_version") if isinstance(value, dict) else None
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{where} has format {version}, this version reads up to {FORMAT_VERSION}; upgrade trinity-flows"
                )
            manifest = Manifest.model_validate(value)
        except FileNotFoundError as error:
            raise DamagedFolder(f"{where} has just been removed") from error
        except DamagedObject as error:
            raise DamagedFolder(str(error)) from error
        except ValidationError as error:
            raise DamagedFolder(f"{where} is not a manifest: {error}") from error
        if manifest.number != number:
            raise DamagedFolder(f"{where} is the manifest of commit {manifest.number}")
        return manifest

    def _skip(self, reason: str) -> None:
        self.skipped.append(reason)
        _log.warning("passed over: %s", reason)

    def _newest_first(self) -> Generator[Manifest]:
        """Readable manifests of checkpoints, each read when it is asked for."""
        for number in reversed(self._numbers()):
            try:
                manifest = self._read(number)
            except DamagedFolder as error:
                self._skip(str(error))
                continue
            if manifest.kind == "checkpoint":
                yield manifest

    def _nothing_left(self) -> None:
        if self.skipped:
            raise CheckpointError(
                f"{self._store.url}: every commit is damaged: {'; '.join(self.skipped)}. "
                f"Bring the objects back, or give the job a new name to start over"
            )

    def commits(self) -> list[Manifest]:
        """Manifests of all checkpoints, oldest first. Unreadable ones are in `skipped`."""
        self.skipped = []
        return list(self._newest_first())[::-1]

    def latest(self, *, verify: bool = True) -> Manifest | None:
        """The highest commit whose objects are all present with the right size; None if the job has no commit.

        verify=False: do not look at the objects. Others are passed over, and named in `skipped` and the log.
        Raises CheckpointError if there are commits and all are damaged.
        """
        self.skipped = []
        for manifest in self._newest_first():
            problems = missing_files(self._store, manifest.prefix, manifest.files) if verify else []
            if not problems:
                return manifest
            self._skip(f"commit {manifest.number} (step {manifest.step}): {'; '.join(problems)}")
        self._nothing_left()
        return None

    def restore(self, manifest: Manifest, into: Path) -> None:
        """Download a commit's files into an absent or empty folder, sizes and hashes verified.

        Raises CheckpointError, which names the object and the reason; StorageError if the store does not answer.
        """
        fetch_folder(self._store, manifest.prefix, manifest.files, into)
        self._last = manifest

    def restore_latest(self, into: Path) -> Manifest | None:
        """Restore the highest commit that is intact, hashes included; None if the job has no commit.

        Damaged ones are passed over, and named in `skipped` and the log. A store that does not answer is a StorageError
        and never a reason to go back. Raises CheckpointError if there are commits and all are damaged.
        """
        self.skipped = []
        for manifest in self._newest_first():
            try:
                self.restore(manifest, into)
            except DamagedFolder as error:
                self._skip(f"commit {manifest.number} (step {manifest.step}): {error}")
                shutil.rmtree(into)
            else:
                return manifest
        self._nothing_left()
        return None

    def verify(self, manifest: Manifest) -> list[str]:
        """Every problem of every object, all bytes read: presence, size, hash, readable. Empty: all is well."""
        return damaged_files(self._store, manifest.prefix, manifest.files)

    def model_folder(self, prefix: str, into: Path) -> Path | None:
        """The HF folder of the checkpoint at `prefix`, verified: itself on a local store, else downloaded to `into`.

        None if there are no commits at all, so that nothing can vouch for it. Raises CheckpointError if it is damaged,
        or none of the commits names it.
        """
        manifests = self.commits()
        if not manifests:
            return None
        manifest = next((manifest for manifest in manifests if manifest.prefix == prefix), None)
        if manifest is None:
            raise CheckpointError(f"{self._store.where(prefix)} is of no commit: it may be half written; use another")
        files = [file for file in manifest.files if file.path.startswith("model/")]
        itself = self._store.local_path(f"{prefix}/model")
        if itself is None:
            fetch_folder(self._store, prefix, files, into)
            return into / "model"
        if problems := damaged_files(self._store, prefix, files):
            raise DamagedFolder(f"{'; '.join(problems)}; use the model of another commit: trinity-flows show")
        return itself

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit(self, staging: Path, *, step: int, **fields: Unpack[CommitFields]) -> Manifest:
        """Make the files below `staging` the newest checkpoint. The folder is consumed, also by a failure.

        Waits for a commit in the background first, and raises its failure. Raises CheckpointError (nothing was
        committed, older commits are as they were), LeaseLost (another process has the job; nothing was committed).
        """
        self.wait()
        return self._commit(staging, step, fields)

    def commit_in_background(self, staging: Path, *, step: int, **fields: Unpack[CommitFields]) -> None:
        """`commit` in a thread. At most one at a time: waits for the one before. A failure is raised by the next call
        of `raise_pending`, `wait`, `commit` or `commit_in_background`.
        """
        self.wait()
        self._pending = self._executor.submit(self._commit, staging, step, fields)

    def raise_pending(self) -> None:
        """Raise the failure of a commit in the background, once. Never waits. Raises as `commit`."""
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            pending.result()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no commit is in progress. Raises as `commit`, and CheckpointError if it takes too long."""
        if self._pending is None:
            return
        try:
            self._pending.exception(timeout_s)
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._store.url}: the upload of a checkpoint has not ended after {timeout_s} s; "
                f"the last commit is {self._describe_last()}"
            ) from error
        self.raise_pending()

    def close(self) -> None:
        """Wait for the commit in progress and end the thread. Call it before the lease is released."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _describe_last(self) -> str:
        return f"{self._last.number} (step {self._last.step})" if self._last is not None else "none"

    def _holder(self) -> Lease:
        if self._lease is None:
            raise CheckpointError(f"{self._store.url} was opened for reading; writing needs the job's lease")
        return self._lease

    def _commit(self, staging: Path, step: int, fields: CommitFields) -> Manifest:
        lease = self._holder()
        prefix = f"checkpoints/global_step_{step:08d}-{secrets.token_hex(4)}"
        try:
            files = store_folder(self._store, staging, prefix, move=True)
            self._store.flush()
            lease.check()
            manifest = self._create_manifest(lease, prefix, files, step, fields)
        except (StorageError, CheckpointError, LeaseLost) as error:
            if self._unconfirmed is None or self._unconfirmed.prefix != prefix:
                with contextlib.suppress(StorageError):  # else orphans: cleaned by the next holder
                    self._store.remove_tree(prefix)
            if isinstance(error, LeaseLost):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} was not committed: {error}. The last commit is {self._describe_last()}"
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._last = manifest
        try:
            self.retain()
        except StorageError as error:
            # The commit stands, and the next one removes what this one could not.
            _log.warning("old checkpoints of %s were not removed: %s", self._store.url, error)
        if self.after_commit is not None:
            self.after_commit()
        return manifest

    def _create_manifest(
        self, lease: Lease, prefix: str, files: tuple[FileRecord, ...], step: int, fields: CommitFields
    ) -> Manifest:
        while True:
            manifest = Manifest(
                number=self._next,
                lease=lease.number,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                parent=self._last.number if self._last is not None else None,
                step=step,
                prefix=prefix,
                files=files,
                **fields,
            )
            try:
                self._store.create_json(_path(manifest.number), manifest.model_dump(mode="json"))
            except StorageError:
                self._unconfirmed = manifest
                raise
            except FileExistsError as error:
                found = self._read(manifest.number)
                if self._unconfirmed is None or found.prefix != self._unconfirmed.prefix:
                    raise LeaseLost(
                        f"{self._store.url}: commit {manifest.number} was made by another process (lease "
                        f"{found.lease}, ours is {lease.number}), which has the job now; nothing was committed; "
                        f"stop this run"
                    ) from error
                self._last, self._next = found, self._next + 1  # ours: it had arrived although its answer had not
            else:
                self._next += 1
                return manifest

    # -- removing -----------------------------------------------------------------------------------------------------

    def retain(self, protect: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep` intact checkpoints and those protected, by number. Returns the removed.

        Only intact ones count, so a valid checkpoint is never removed in favour of a damaged one. The manifest goes
        first: what is left by a crash is an orphan, not a damaged checkpoint.
        """
        if self.keep < 1:
            return []
        self._holder().check_local()
        removed: list[int] = []
        num_intact = 0
        for manifest in self._newest_first():
            if num_intact < self.keep:
                num_intact += not missing_files(self._store, manifest.prefix, manifest.files)
            elif manifest.number not in protect:
                self._store.remove(_path(manifest.number))
                self._store.remove_tree(manifest.prefix)
                removed.append(manifest.number)
        return removed

    def clean_orphans(self) -> list[str]:
        """Remove objects of commits that never came about. Returns their prefixes. Only for the lease's holder.

        Does nothing while a manifest is unreadable: its objects would look like orphans; `skipped` names it.
        """
        lease = self._holder()
        self.wait()
        self.skipped = []
        objects = (info.name for info in self._store.list("checkpoints", recursive=True))
        found = sorted({match[0] for name in objects if (match := _PREFIX.match(name)) is not None})
        named = {manifest.prefix for manifest in self._newest_first()}
        lease.check()
        orphans = [prefix for prefix in found if prefix not in named] if not self.skipped else []
        for prefix in orphans:
            self._store.remove_tree(prefix)
        for folder in ("checkpoints", "commits"):
            self._store.sweep_temporaries(folder)
        return orphans
