"""Names of what lies in a buffer's folder.

    experiences/<buffer>/<writer>-<00000012>.parquet     a shard: create-only, never changed
    experiences/<buffer>/<writer>.end                    {"shards": n}: this writer has written its last
    experiences/<buffer>/writers/<writer>.json           who writes under this name, and when it was last alive
    experiences/<buffer>/damaged/<shard>.json            a shard that could not be read, and why
    experiences/<buffer>/removed.json                    {writer: index of the first shard that was not removed}

All of it is written by names alone: nothing needs a listing but to find writers that nobody has told of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from engines.errors import ConfigError

END: Final = ".end"

_SHARD: Final = re.compile(r"(?P<writer>.+)-(?P<index>\d{8,})\.parquet")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Which shard of a buffer. The order of shards is that of their indices, then of their writers' names."""

    index: int
    writer: str

    @property
    def file_name(self) -> str:
        """Within the buffer's folder."""
        return f"{self.writer}-{self.index:08d}.parquet"

    @classmethod
    def parse(cls, path: str) -> Self | None:
        """The shard of a path or file name; None if it is not one's."""
        match = _SHARD.fullmatch(path.rsplit("/", 1)[-1])
        return cls(int(match["index"]), match["writer"]) if match else None


@dataclass(frozen=True, slots=True)
class BufferFolder:
    """A buffer's folder below the job's. Raises ConfigError for a bad name of buffer or writer."""

    buffer: str

    def __post_init__(self) -> None:
        check_name("buffer", self.buffer)

    @property
    def path(self) -> str:
        return f"experiences/{self.buffer}"

    def shard(self, shard: ShardId) -> str:
        return f"{self.path}/{shard.file_name}"

    def end(self, writer: str) -> str:
        return f"{self.path}/{writer}{END}"

    @property
    def writers(self) -> str:
        return f"{self.path}/writers"

    def registration(self, writer: str) -> str:
        return f"{self.writers}/{writer}.json"

    @property
    def quarantine(self) -> str:
        return f"{self.path}/damaged"

    @property
    def removed(self) -> str:
        return f"{self.path}/removed.json"

    def damage(self, shard: str) -> str:
        return f"{self.quarantine}/{shard.rsplit('/', 1)[-1]}.json"


def check_name(what: str, name: str) -> None:
    """Raises ConfigError if a buffer or a writer may not be called so."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} name {name!r}: use letters, digits, '.', '_' and '-', and begin with one of the first two"
        )
