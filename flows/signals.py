"""SIGTERM and SIGINT become a request to stop after the step that runs; a second one ends the command at once.

Prefect's own handler raises inside whatever runs, which would cut a step or a commit. With this one the loop ends at a
step boundary, commits, and the flow returns Cancelled.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENDED_AT_ONCE = "ended at once; run it again to go on from the last commit"


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on the first stop signal; the second finds the handlers that were there before.

    Python gives signals to the main thread alone: a flow that runs in another leaves them to whoever started it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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


def end_on_signals(code: int, farewell: bytes) -> None:
    """Let a stop signal that nothing else waits for end this process at once, with this exit code.

    farewell: written to standard output before.

    Whatever runs then, a step in a thread for example, is not waited for: it is as if the process had been killed, and
    the next one goes on from the last commit.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, ENDED_AT_ONCE.encode() + b"\n")
        os.write(1, farewell)
        os._exit(code)

    for number in STOP_SIGNALS:
        signal.signal(number, end)
