"""What the training side hands to a tracker: metrics, tags, data sets, files. Made legal, and queued.

Owns: names, secrets, values that are not finite, steps that were logged before. Does not own: delivery (`tracking.py`).
Nothing here waits for a server, and only a caller's mistake raises.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from engines.errors import DataError
from trinity_tasks.spool import Point, Spool
from trinity_tasks.tracked_values import legal_tags, mask_secrets, sanitize_name

logger = logging.getLogger("trinity_tasks.tracking")

MAX_METRICS_PER_POINT = 900
"""Rows of one point, its marker included: it must fit into one call."""


class Outbox:
    """Queues everything in the order given. Safe to use from several threads."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()  # all below
        self._tags: dict[str, str] = {}
        self._datasets: list[dict[str, str]] = []
        self._last_logged: dict[str, int] = {}
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()

    def log(
        self, step: int, metrics: Mapping[str, float], *, stream: str = "train", timestamp_ms: int | None = None
    ) -> None:
        """Queue one point. A value that is not finite is counted in `nonfinite/<key>` instead of being sent.

        A step at or below the stream's last one is dropped: a replay, or two kinds of metrics that need two streams.
        """
        point = self._point(step, metrics, stream, timestamp_ms)
        with self._lock:
            repeated = point.step <= self._last_logged.get(point.stream, point.step - 1)
            self._counts["repeated"] += repeated
            if not repeated:
                self._last_logged[point.stream] = point.step
        if repeated:
            self._warn(
                f"repeated {stream}",
                f"step {step} of stream {stream!r} was logged again and dropped: a replay, or metrics that need a "
                "stream of their own",
            )
            return
        for part in point.split(MAX_METRICS_PER_POINT):
            self._spool.append(part)

    def _point(self, step: int, metrics: Mapping[str, float], stream: str, timestamp_ms: int | None = None) -> Point:
        values: dict[str, float] = {}
        nonfinite: list[str] = []
        for key, value in metrics.items():
            name = sanitize_name(key)
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._warn(f"type {name}", f"metric {key} is {value!r} at step {step}, not a number; it is not sent")
                continue
            if math.isfinite(number):
                values[name] = number
            else:
                nonfinite.append(name)
        now = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        return Point(sanitize_name(stream), int(step), now, values, tuple(nonfinite))

    def spool_state(
        self, step: int | None = None, metrics: Mapping[str, float] | None = None, *, stream: str = "train"
    ) -> list[dict[str, Any]]:
        """Every point not acknowledged yet, JSON-able: belongs in the checkpoint, and into `open(pending=...)`.

        step, metrics: a point that will be logged after the checkpoint which already covers its step.
        """
        points = self._spool.snapshot()
        if step is not None:
            extra = self._point(step, metrics or {}, stream)
            if step > self._last_logged.get(extra.stream, step - 1):
                points += extra.split(MAX_METRICS_PER_POINT)
        return [point.to_json() for point in points]

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; secrets are masked."""
        with self._lock:
            self._tags.update(legal_tags(tags))

    def log_dataset(self, name: str, digest: str, source: str, context: str = "training") -> None:
        """Record which data was used. digest: at most 36 characters; context: training, eval, ..."""
        row = {"name": name[:500], "digest": digest[:36], "source": str(mask_secrets(source)), "context": context}
        with self._lock:
            self._datasets.append(row)

    def log_artifact(self, path: Path, artifact_path: str = "") -> None:
        """Upload a file or folder, as it is now, into the run's folder `artifact_path`. Raises DataError: not there."""
        if not path.exists():
            raise DataError(f"artifact {path} does not exist; write it before it is logged")
        self._stage(lambda: self._spool.stage_copy(path, artifact_path), str(path))

    def log_bytes(self, data: bytes, artifact_file: str) -> None:
        """Upload `data`, a picture for example, as the run's file `artifact_file`."""
        self._stage(lambda: self._spool.stage_bytes(data, artifact_file), artifact_file)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Upload text as the run's file `artifact_file`."""
        self.log_bytes(text.encode(), artifact_file)

    def log_dict(self, data: Mapping[str, Any] | Sequence[Any], artifact_file: str) -> None:
        """Upload JSON, or YAML if the name ends so, as the run's file `artifact_file`."""
        is_yaml = artifact_file.endswith((".yaml", ".yml"))
        self.log_text(yaml.safe_dump(data, sort_keys=False) if is_yaml else json.dumps(data, indent=1), artifact_file)

    def log_table(self, rows: Sequence[Mapping[str, Any]], artifact_file: str) -> None:
        """Upload rows as a JSON table that MLflow's UI shows; columns are the keys of all rows. One file per call."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
        data = json.dumps(table, default=str).encode()
        self._stage(lambda: self._spool.stage_bytes(data, artifact_file, label="table"), artifact_file)

    def _stage(self, stage: Callable[[], None], what: str) -> None:
        try:
            stage()
        except OSError as error:  # a picture is not worth a training run
            self._counts["lost_artifacts"] += 1
            self._warn("disk", f"{what} cannot be kept in {self._spool.folder} and is not sent: {error}")

    def _warn(self, kind: str, message: str) -> None:
        with self._lock:
            known = kind in self._warned
            self._warned.add(kind)
        if not known:
            logger.warning("tracking: %s", message)
