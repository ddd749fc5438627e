"""`WeightStore`: versions of the weights, published for samplers in other processes. Complete or absent.

Owns: `weights/version_<version>/`. Does not own: when to publish (`trinity_tasks.synchronizer`). The files of each try
lie in a folder of their own, so nobody ever overwrites what a sampler reads; `manifest.json` comes last.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engines.config import Frozen
from engines.errors import CheckpointError
from trinity_tasks.folders import fetch_folder, missing_files, store_folder
from trinity_tasks.lease import Lease
from trinity_tasks.storage import FileRecord, Storage

_VERSION = re.compile(r"weights/version_(\d{8,})/")


class WeightManifest(Frozen):
    """`weights/version_<version>/manifest.json`."""

    version: int
    """Train step of the weights."""
    prefix: str
    """Folder of the files, relative to the job: an HF folder."""
    files: tuple[FileRecord, ...]
    """Relative to `prefix`."""
    created_at: str
    """UTC, ISO 8601."""


def _folder(version: int) -> str:
    return f"weights/version_{version:08d}"


class WeightStore:
    """Published weights of one job.

    Example:
        >>> store = WeightStore(job)                         # doctest: +SKIP
        >>> store.publish(staging, 12).version               # doctest: +SKIP
        12
        >>> store.fetch(store.latest().version, folder)      # doctest: +SKIP
    """

    def __init__(self, store: Storage, lease: Lease | None = None) -> None:
        self._store = store
        self._lease = lease

    def publish(self, staging: Path, version: int) -> WeightManifest:
        """Publish the files below `staging`, which stay there.

        A version that a resumed job makes again is the same files, and then nothing happens; if the files differ (other
        hardware), readers get the new ones from now on. Raises CheckpointError, LeaseLost, StorageError.
        """
        prefix = f"{_folder(version)}/{secrets.token_hex(4)}"
        files = store_folder(self._store, staging, prefix)
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = WeightManifest(version=version, prefix=prefix, files=files, created_at=created_at)
        path, content = f"{_folder(version)}/manifest.json", manifest.model_dump(mode="json")
        if self._lease is not None:
            self._lease.check()
        try:
            self._store.create_json(path, content)
        except FileExistsError:
            known = self._read(version)
            if known is not None and known.files == files and not missing_files(self._store, known.prefix, known.files):
                self._store.remove_tree(prefix)
                return known
            self._store.write_json(path, content)
        return manifest

    def versions(self) -> list[int]:
        """Versions with any object, complete or not, ascending."""
        matches = (_VERSION.match(info.name) for info in self._store.list("weights", recursive=True))
        return sorted({int(match[1]) for match in matches if match is not None})

    def _read(self, version: int) -> WeightManifest | None:
        path = f"{_folder(version)}/manifest.json"
        try:
            return WeightManifest.model_validate(self._store.read_json(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise CheckpointError(f"{self._store.where(path)} is not a manifest of weights: {error}") from error

    def latest(self) -> WeightManifest | None:
        """The highest complete version; None if there is none."""
        for version in reversed(self.versions()):
            manifest = self._read(version)
            if manifest is not None and not missing_files(self._store, manifest.prefix, manifest.files):
                return manifest
        return None

    def fetch(self, version: int, into: Path) -> WeightManifest:
        """Download one version into an absent or empty folder, sizes and hashes verified: never a mix of two.

        Raises CheckpointError if it was never published, has been collected, or is damaged; StorageError.
        """
        manifest = self._read(version)
        if manifest is None:
            raise CheckpointError(
                f"{self._store.where(_folder(version))} is not published or was collected; fetch the latest version"
            )
        fetch_folder(self._store, manifest.prefix, manifest.files, into)
        return manifest

    def collect(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` (at least 1) complete versions, and older leftovers. Returns the removed."""
        removed: list[int] = []
        num_kept = 0
        for version in reversed(self.versions()):
            if num_kept < max(keep, 1):
                num_kept += self._read(version) is not None
                continue
            self._store.remove(f"{_folder(version)}/manifest.json")
            self._store.remove_tree(_folder(version))
            removed.append(version)
        return removed
