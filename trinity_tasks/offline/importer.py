"""`import_experiences`: data becomes shards of a buffer, once, in order, and again from where a killed run was.

Owns: which rows make a shard, what is recorded of an import, resuming. Does not own: how a record becomes a row
(`formats.py`, `trinity_db.py`), the bytes of a shard (`trinity_tasks.buffer`).

    experiences/<buffer>/import.json             what is imported: written first, create-only
    experiences/<buffer>/import-<00000000>.parquet
    experiences/<buffer>/import.done.json        how many rows came of it: written last, then the writer's end marker

Shard i holds what source rows i * rows_per_shard and following became, so a resume skips as many source rows as the
shards that exist stand for. Groups of an experience database are never cut: a shard ends at the first group boundary
behind rows_per_shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue, ValidationError

from engines.base import SamplingEngine, TrainEngineWrapper
from engines.config import Frozen
from engines.errors import ConfigError, DataError
from engines.experience import Experience
from engines.text import Tokenizer
from trinity_tasks.buffer.choose import row_limits
from trinity_tasks.buffer.layout import BufferFolder, ShardId
from trinity_tasks.buffer.row_checks import RowLimits
from trinity_tasks.buffer.writer import ExperienceWriter
from trinity_tasks.config import Config
from trinity_tasks.offline.config import IMPORT_WRITER, OfflineConfig
from trinity_tasks.offline.files import DataFiles, NoData, content_sha256
from trinity_tasks.offline.formats import RecordFormat
from trinity_tasks.offline.sources import Record, Unit, read_records
from trinity_tasks.offline.trinity_db import experience_units
from trinity_tasks.storage import FileRecord, Storage

_BEGUN: Final = "import.json"
_DONE: Final = "import.done.json"


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import gave."""

    num_rows: int
    """Experiences in the buffer."""
    num_dropped: int
    """Source rows that were left out for their length."""
    num_shards: int
    content_sha256: str
    """Identity of the data."""


class _Begun(Frozen):
    """import.json"""

    content_sha256: str
    files: tuple[FileRecord, ...]
    settings: dict[str, JsonValue]
    """What decides the rows, beside the content."""


class _Done(Frozen):
    """import.done.json"""

    num_rows: int
    num_dropped: int
    num_shards: int


def import_experiences(
    store: Storage, buffer: str, config: OfflineConfig, tokenizer: Tokenizer, limits: RowLimits
) -> Imported:
    """Write all shards of the data and end the writer; what was written before is kept. `store` is the job's folder.

    A finished import reads no rows again: of a local source it compares the content, of a remote one names and sizes,
    and a source that is gone is no longer needed. Raises ConfigError (no data, other data or settings than this buffer
    was begun with), DataError (a record that does not fit; it is named), StorageError.
    """
    folder = BufferFolder(buffer).path
    begun = _read(store, f"{folder}/{_BEGUN}", _Begun)
    done = _read(store, f"{folder}/{_DONE}", _Done)
    try:
        with DataFiles(config.path, config.format, config.split) as files:
            begun = _begin(store, folder, begun, config, limits, files, finished=done is not None)
            if done is None:
                units = _units(files, config, tokenizer, limits, begun.content_sha256)
                done = _write(store, folder, _writer(store, buffer, limits), units, config)
    except NoData:
        if begun is None or done is None:
            raise
    _finish(store, buffer, folder, done, config)
    return Imported(done.num_rows, done.num_dropped, done.num_shards, begun.content_sha256)


def import_data(config: Config, store: Storage, engine: TrainEngineWrapper) -> dict[str, Imported]:
    """Import the data of every buffer of a job that has some; buffer -> what it gave. The engine is prepared.

    Raises as `import_experiences`, and ConfigError if the engine has no tokenizer.
    """
    buffers = config.buffer.trainer_input
    used = [buffers.experience_buffer, *([buffers.expert_buffer] if config.expert_batch_size else [])]
    done: dict[str, Imported] = {}
    for buffer in used:
        if buffer.data is None:
            continue
        if not isinstance(engine, SamplingEngine):
            raise ConfigError(
                f"trainer.trainer_type {config.trainer.trainer_type} has no tokenizer, and data is imported with it; "
                "write the experiences with ExperienceWriter, or use the engine hf"
            )
        done[buffer.name] = import_experiences(store, buffer.name, buffer.data, engine.tokenizer, row_limits(config))
    return done


def _begin(
    store: Storage,
    folder: str,
    begun: _Begun | None,
    config: OfflineConfig,
    limits: RowLimits,
    files: DataFiles,
    *,
    finished: bool,
) -> _Begun:
    """What this import is, recorded before its first shard. Raises ConfigError if it was begun as another one."""
    settings: dict[str, JsonValue] = {**config.model_dump(mode="json", exclude={"path"}), **asdict(limits)}
    where = store.where(f"{folder}/{_BEGUN}")
    if begun is not None:
        for key, value in begun.settings.items():
            if settings.get(key) != value:
                raise ConfigError(
                    f"{where}: the data was imported with {key} = {value}, now it is {settings.get(key)}: the buffer "
                    "would hold rows of both. Give the job another name, or set it back"
                )
        if finished and not files.is_local:
            now = [(file.name, file.size) for file in files.listed]
            if now == [(record.path, record.size) for record in begun.files]:
                return begun
    records = files.records()
    content = content_sha256(records)
    if begun is None:
        begun = _Begun(content_sha256=content, files=records, settings=settings)
        store.create_json(f"{folder}/{_BEGUN}", begun.model_dump(mode="json"))
    elif content != begun.content_sha256:
        raise ConfigError(
            f"{files.path} is not what was imported: its content has sha256 {content}, {where} recorded "
            f"{begun.content_sha256}. Restore the data, give the job another name, or, if no step has trained on them "
            f"yet, remove {store.where(folder)}"
        )
    return begun


def _units(
    files: DataFiles, config: OfflineConfig, tokenizer: Tokenizer, limits: RowLimits, content: str
) -> Iterator[Unit]:
    if config.format == "trinity" or any(files.kind(file) == "sqlite" for file in files.listed):
        yield from experience_units(files, config, limits)
        return
    record_format = RecordFormat(config, tokenizer, limits, content)
    for index, record in enumerate(read_records(files)):
        yield Unit(1, partial(_rows_of, record_format, record, index))


def _rows_of(record_format: RecordFormat, record: Record, index: int) -> list[Experience]:
    row = record_format.row(record, index)
    return [] if row is None else [row]


def _write(
    store: Storage, folder: str, writer: ExperienceWriter, units: Iterator[Unit], config: OfflineConfig
) -> _Done:
    """Every shard that does not exist; the rows of one are in memory at a time."""
    existing = writer.next_index
    num_rows = num_source = num_shards = 0
    for shard in _shards(units, config.rows_per_shard):
        num_source += sum(unit.size for unit in shard)
        if num_shards < existing:
            num_rows += _stored_rows(store, f"{folder}/{ShardId(num_shards, IMPORT_WRITER).file_name}")
        else:
            rows = [row for unit in shard for row in unit.load()]
            writer.write(rows, index=num_shards)
            num_rows += len(rows)
        num_shards += 1
    if not num_source:
        raise ConfigError(f"{config.path} holds no records; check path")
    return _Done(num_rows=num_rows, num_dropped=num_source - num_rows, num_shards=num_shards)


def _shards(units: Iterator[Unit], rows_per_shard: int) -> Iterator[list[Unit]]:
    shard: list[Unit] = []
    num_rows = 0
    for unit in units:
        shard.append(unit)
        num_rows += unit.size
        if num_rows >= rows_per_shard:
            yield shard
            shard, num_rows = [], 0
    if shard:
        yield shard


def _stored_rows(store: Storage, name: str) -> int:
    try:
        return int(pq.read_metadata(pa.BufferReader(store.read_bytes(name))).num_rows)
    except pa.ArrowException as error:
        raise DataError(f"shard {store.where(name)} cannot be read: {error}; restore it from a copy") from error


def _finish(store: Storage, buffer: str, folder: str, done: _Done, config: OfflineConfig) -> None:
    """Record the outcome and end the writer. Idempotent."""
    with contextlib.suppress(FileExistsError):
        store.create_json(f"{folder}/{_DONE}", done.model_dump(mode="json"))
    if not done.num_rows:
        raise DataError(
            f"all {done.num_dropped} rows of {config.path} are beyond the model's limits and were dropped; raise "
            "model.max_model_len, or set too_long to truncate"
        )
    writer = _writer(store, buffer)
    if writer.next_index != done.num_shards:
        raise DataError(
            f"{store.where(folder)} has {writer.next_index} shards of writer {IMPORT_WRITER!r}, its import made "
            f"{done.num_shards}; restore the missing ones, or take foreign ones away"
        )
    writer.end()


def _writer(store: Storage, buffer: str, limits: RowLimits | None = None) -> ExperienceWriter:
    return ExperienceWriter(store, buffer, IMPORT_WRITER, limits, register=False)


_Model = TypeVar("_Model", bound=Frozen)


def _read(store: Storage, name: str, model: type[_Model]) -> _Model | None:
    """What an import recorded; None if it has not. Raises DataError if it is no such record."""
    try:
        return model.model_validate(store.read_json(name))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{store.where(name)} is no record of an import: {error}; restore it from a copy") from error
