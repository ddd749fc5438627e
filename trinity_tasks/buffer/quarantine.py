"""Shards that cannot be read: noted for ever, counted, never skipped without a word.

Owns: experiences/<buffer>/damaged/<shard>.json, how many of them a run puts up with. Does not own: finding the damage
(`shards.py`), going on behind it (`strategies.py`).
"""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime

from pydantic import ValidationError

from engines.config import Frozen
from engines.errors import DataError
from trinity_tasks.buffer.layout import BufferFolder
from trinity_tasks.storage import DamagedObject, Storage

logger = logging.getLogger(__name__)


class Damage(Frozen):
    """One shard that cannot be read."""

    shard: str
    """Path below the job's folder."""
    num_bytes: int
    sha256: str
    """Hex digest of what was found."""
    reason: str
    found_at: str
    """UTC, ISO 8601."""


class Quarantine:
    """The damaged shards of one buffer."""

    def __init__(self, store: Storage, folder: BufferFolder, max_shards: int) -> None:
        self._store = store
        self._folder = folder
        self._max_shards = max_shards

    def add(self, shard: str, num_bytes: int, sha256: str, error: DataError) -> Damage:
        """Note a damaged shard. Raises the error, with the count, if that is one more than a run puts up with."""
        found_at = datetime.now(UTC).isoformat(timespec="seconds")
        damage = Damage(shard=shard, num_bytes=num_bytes, sha256=sha256, reason=str(error), found_at=found_at)
        with contextlib.suppress(FileExistsError):  # found before: the first note stays
            self._store.create_json(self._folder.damage(shard), damage.model_dump(mode="json"))
        num_found = len(self._store.list(self._folder.quarantine))
        if num_found > self._max_shards:
            raise DataError(
                f"{error}. To go on without its rows, raise max_damaged_shards ({self._max_shards}; {num_found} found) "
                "of the buffer"
            ) from error
        logger.warning(
            "%s; its rows are left out, as %s says (%d of at most %d such shards)",
            *(error, self._store.where(self._folder.damage(shard)), num_found, self._max_shards),
        )
        return damage


def damaged_shards(store: Storage, folder: BufferFolder) -> list[Damage]:
    """Every shard that was found damaged, by name. Raises DataError for a note that cannot be read."""
    found: list[Damage] = []
    for info in store.list(folder.quarantine):
        try:
            found.append(Damage.model_validate(store.read_json(info.name)))
        except (ValidationError, DamagedObject) as error:
            raise DataError(f"{store.where(info.name)} does not name a damaged shard: {error}; remove it") from error
    return found
