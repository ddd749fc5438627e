"""A job held by a test: staged snapshots that tell their step, commits, and the means to damage or overtake it."""

import dataclasses
import json
from pathlib import Path

from trinity_tasks.buffer.cursor import Cursor
from trinity_tasks.checkpoint import CheckpointStore, Manifest
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage

CURSOR = Cursor.start().moved("explorer", 3, 5)


def safetensors(values: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}).encode()
    return len(header).to_bytes(8, "little") + header + values


def staged(folder: Path, step: int, size: int = 1000) -> Path:
    """A snapshot whose content tells its step."""
    path = folder / f"staged-{step}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "model.safetensors").write_bytes(safetensors(bytes([step % 256]) * size))
    (path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (path / "engine_state.json").write_text(json.dumps({"step": step}))
    return path


def restored_step(folder: Path) -> int:
    return json.loads((folder / "engine_state.json").read_text())["step"]


def flip(store: Storage, path: str) -> None:
    data = bytearray(store.read_bytes(path))
    data[-1] ^= 1
    store.write(path, bytes(data))


@dataclasses.dataclass
class Job:
    """A job that this process holds."""

    store: Storage
    lease: Lease
    checkpoints: CheckpointStore
    folder: Path

    def commit(self, step: int) -> Manifest:
        return self.checkpoints.commit(staged(self.folder, step), step=step, cursor=CURSOR)

    def objects(self) -> set[str]:
        return {info.name for info in self.store.list("checkpoints", recursive=True)}


def open_job(url: str, folder: Path, keep: int = 0) -> Job:
    store = Storage(url)
    lease = Lease.acquire(store)
    return Job(store, lease, CheckpointStore(store, lease, keep), folder)


def overtaken(job: Job) -> None:
    """Make the lease of `job` look like that of a process that died."""
    path = f"lease/{job.lease.number:08d}.json"
    record = job.store.read_json(path)
    assert isinstance(record, dict)
    assert isinstance(record["holder"], dict)
    job.store.write_json(path, {**record, "holder": {**record["holder"], "started": "1"}})
