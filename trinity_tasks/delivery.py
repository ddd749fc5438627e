"""A thread that repeats one attempt: on schedule, at once when nudged, ever more rarely while it fails.

Owns: pace, backoff, the last attempt at the end. Does not own: what an attempt does, or which errors it survives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to deliver. Rows are cheap only in bulk: few, large calls."""

    interval_s: float = 3.0
    """Between two attempts, seconds."""
    eager_metrics: int = 1000
    """Rows waiting that are sent at once."""
    first_backoff_s: float = 1.0
    """After the first failure, seconds; doubled by each further one."""
    max_backoff_s: float = 30.0
    """Longest wait during an outage, seconds."""
    closing_backoff_s: float = 1.0
    """Longest wait while `finish` is waiting, seconds."""
    max_memory_metrics: int = 200_000
    """Rows kept in memory; more go to a file."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a tracker knows about its delivery; counts are since `open`."""

    connected: bool
    """The run is known and the last call succeeded."""
    num_pending_metrics: int
    """Rows not acknowledged by the server."""
    num_overflow_metrics: int
    """Rows of those that are on disk only."""
    num_pending_artifacts: int
    num_consecutive_failures: int
    last_error: str | None
    num_skipped_points: int
    """Replayed points that the server already had."""
    num_repeated_points: int
    """Points whose step this process had logged before in that stream."""
    num_rejected_points: int
    """Points the server refused for good; kept in rejected.jsonl."""
    num_lost_artifacts: int
    """Artifacts for which there was no place on the local disk."""


class Delivery:
    """Calls `attempt(last)` until it has succeeded with last=True; None means success, an exception what was wrong."""

    def __init__(
        self,
        attempt: Callable[[bool], Exception | None],
        pace: Pace,
        *,
        on_failure: Callable[[Exception], None],
        on_recovery: Callable[[], None],
    ) -> None:
        self._attempt = attempt
        self._pace = pace
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self._wake = threading.Event()
        self._closing = self._finished = False
        self.abandoned = False
        """`finish` gave up waiting: a running attempt should end early."""
        self.num_failures = 0
        """Consecutive failed attempts."""
        self.last_error: str | None = None
        """Of the last failed attempt."""
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)

    def start(self) -> None:
        """Make the first attempt now."""
        self._thread.start()

    def nudge(self) -> None:
        """Attempt at once, unless attempts are failing."""
        if not self.num_failures:
            self._wake.set()

    def finish(self, timeout_s: float) -> bool:
        """Make the last attempt, again and again if it fails; whether it succeeded in time."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self.abandoned = not self._finished
        self._wake.set()
        return self._finished

    def _work(self) -> None:
        delay = 0.0
        while not self.abandoned:
            self._wake.wait(delay)
            self._wake.clear()
            closing = self._closing
            error = self._attempt(closing)
            if error is None:
                delay = self._pace.interval_s
                self._succeeded()
                if closing:
                    self._finished = True
                    return
            else:
                self._failed(error)
                limit = self._pace.closing_backoff_s if closing else self._pace.max_backoff_s
                delay = min(limit, self._pace.first_backoff_s * 2.0 ** min(self.num_failures - 1, 20))

    def _succeeded(self) -> None:
        if self.num_failures:
            self._on_recovery()
        self.num_failures = 0

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        self.last_error = f"{type(error).__name__}: {str(error)[:300]}"
        self._on_failure(error)
