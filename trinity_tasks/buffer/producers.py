"""Who writes a buffer: each writer registers under its name and says from time to time that it lives.

Owns: experiences/<buffer>/writers/<writer>.json, the heartbeat, what can be said of a silent writer. Does not own: the
shards. A reader finds new writers by these few objects, however many shards there are. A writer of another program that
does not register is found too, but later: see `reader.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from pydantic import ValidationError

from engines.config import Frozen
from engines.errors import StorageError
from trinity_tasks.buffer.layout import BufferFolder
from trinity_tasks.process import Process
from trinity_tasks.storage import DamagedObject, Storage

logger = logging.getLogger(__name__)

BEAT_S = 15.0
SILENT_AFTER_BEATS = 4


class Registration(Frozen):
    """writers/<writer>.json."""

    process: Process
    heartbeat_at: float
    """Clock of the writer, seconds since the epoch."""
    beat_s: float = BEAT_S
    """How often it is rewritten, seconds."""

    def trouble(self, now: float) -> str | None:
        """What is wrong with the writer, as far as can be seen from here; None: nothing."""
        who = f"pid {self.process.pid} on {self.process.host}"
        if self.process.is_gone():
            return f"{who} has died"
        silent_s = now - self.heartbeat_at
        if silent_s > SILENT_AFTER_BEATS * self.beat_s:
            return f"{who} has been silent for {silent_s:.0f} s"
        return None


def read_registration(store: Storage, folder: BufferFolder, writer: str) -> Registration | None:
    """None if the writer has not registered, or not in a form that this version understands."""
    try:
        return Registration.model_validate(store.read_json(folder.registration(writer)))
    except (FileNotFoundError, ValidationError, DamagedObject):
        return None


class Heartbeat:
    """Keeps a writer's registration fresh from a thread, until `stop`."""

    def __init__(self, store: Storage, folder: BufferFolder, writer: str, beat_s: float = BEAT_S) -> None:
        """Registers. Raises StorageError."""
        self._store = store.with_retry_s(beat_s)
        self._name = folder.registration(writer)
        self._registration = Registration(process=Process.current(), heartbeat_at=time.time(), beat_s=beat_s)
        self._stopping = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{writer}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        self._registration = self._registration.model_copy(update={"heartbeat_at": time.time()})
        self._store.write_json(self._name, self._registration.model_dump(mode="json"), durable=False)

    def _run(self) -> None:
        while not self._stopping.wait(self._registration.beat_s):
            with contextlib.suppress(StorageError):  # an outage: readers see silence, and that is what there is
                self._beat()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        self._thread.join()
