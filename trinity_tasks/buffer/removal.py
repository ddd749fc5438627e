"""Removing shards that no checkpoint can need any more. Off by default.

Owns: which shards those are, experiences/<buffer>/removed.json, which says so to whoever misses them. Does not own:
which checkpoints are kept (`trinity_tasks.checkpoint`).

A resume from a kept checkpoint needs what lies at or behind its cursor, and what its pool refers to. The newest shard
of each writer stays too, so that a writer that starts again knows where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from pydantic import JsonValue

from engines.errors import DataError
from trinity_tasks.buffer.cursor import Cursor, Position
from trinity_tasks.buffer.layout import BufferFolder, ShardId
from trinity_tasks.storage import Storage


def first_kept(store: Storage, folder: BufferFolder) -> dict[str, int]:
    """Writer -> index below which its shards may have been removed; a writer that is not named lost none."""
    try:
        found = store.read_json(folder.removed)
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not all(isinstance(index, int) for index in found.values()):
        raise DataError(f"{store.where(folder.removed)} must hold {{writer: index of its first shard}}, not {found!r}")
    return cast("dict[str, int]", found)


def remove_consumed(store: Storage, folder: BufferFolder, kept: Sequence[Position]) -> list[str]:
    """Remove the shards of one buffer that none of these positions, of all checkpoints, can need. Returns their paths.

    kept: with cursors and states of this buffer alone. Only for the lease's holder. Raises StorageError, DataError.
    """
    if not kept:
        return []
    found = [shard for info in store.list(folder.path) if (shard := ShardId.parse(info.name))]
    newest = {writer: max(s.index for s in found if s.writer == writer) for writer in {s.writer for s in found}}
    needed = {path for position in kept for path in _paths(position.state)}
    floors = {writer: min(_floor(position.cursor, writer) for position in kept) for writer in newest}
    consumed = sorted(
        shard
        for shard in found
        if shard.index < min(floors[shard.writer], newest[shard.writer]) and folder.shard(shard) not in needed
    )
    if not consumed:
        return []
    removed = first_kept(store, folder)
    for shard in consumed:
        removed[shard.writer] = max(removed.get(shard.writer, 0), shard.index + 1)
    store.write_json(folder.removed, cast("JsonValue", removed))  # first: what is missing must be explained
    for shard in consumed:
        store.remove(folder.shard(shard))
    return [folder.shard(shard) for shard in consumed]


def _floor(cursor: Cursor, writer: str) -> int:
    return cursor.at(writer)[0]


def _paths(state: JsonValue) -> Collection[str]:
    """Every text in a strategy's state: those that are no paths of shards match none."""
    if isinstance(state, str):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [path for value in values for path in _paths(value)]
