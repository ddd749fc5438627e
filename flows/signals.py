"""SIGTERM and SIGINT become a request to stop after the step that runs; a second one interrupts at once.

Prefect's own handler raises inside whatever runs, which would cut a step or a commit. With this one the loop ends at a
step boundary, commits, and the flow returns Cancelled.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on the first stop signal; the second finds the handlers that were there before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        request_stop()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
