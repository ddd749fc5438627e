"""Names of what lies in a buffer's folder: shards, and the markers of their writers.

experiences/<buffer>/<writer>-<00000012>.parquet     create-only, never changed
experiences/<buffer>/<writer>.end                    {"shards": n}: this writer has written its last
"""

from __future__ import annotations

import re
from typing import Final

from engines.errors import ConfigError

SHARD: Final = re.compile(r"(?P<writer>.+)-(?P<index>\d{8,})\.parquet")
END: Final = ".end"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def folder_of(buffer: str, writer: str | None = None) -> str:
    """The folder of a buffer below the job's. Raises ConfigError for a bad name of buffer or writer."""
    for what, name in (("buffer", buffer), ("writer", writer)):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{what} name {name!r}: use letters, digits, '.', '_' and '-', and begin with one of the first two"
            )
    return f"experiences/{buffer}"


def shard_name(folder: str, writer: str, index: int) -> str:
    """Path of a shard below the job's folder."""
    return f"{folder}/{writer}-{index:08d}.parquet"


def end_name(folder: str, writer: str) -> str:
    """Path of a writer's end marker below the job's folder."""
    return f"{folder}/{writer}{END}"
