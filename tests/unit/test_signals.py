"""Stop signals are requests: the first asks, the second interrupts, and afterwards everything is as it was."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

import pytest

from flows.signals import STOP_SIGNALS, stop_on_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request_and_interrupts_nothing(number: signal.Signals) -> None:
    asked: list[str] = []
    with stop_on_signals(lambda: asked.append("stop")):
        signal.raise_signal(number)
        asked.append("goes on")
    assert asked == ["stop", "goes on"]


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_after_the_first_ctrl_c_interrupts_at_once(first: signal.Signals) -> None:
    asked: list[str] = []

    def signalled_twice() -> None:
        with stop_on_signals(lambda: asked.append("stop")):
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGINT)
            asked.append("never reached")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            signalled_twice()
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == ["stop"]


@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("by hand")])
def test_the_handlers_from_before_are_back(signalled: bool, error: ValueError | None) -> None:
    received: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, own) for number in STOP_SIGNALS}
    try:
        with contextlib.suppress(ValueError), stop_on_signals(lambda: None):
            if signalled:
                signal.raise_signal(signal.SIGTERM)
            if error is not None:
                raise error
    finally:
        now = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert now == dict.fromkeys(STOP_SIGNALS, own)
    assert received == []


def test_a_loop_within_a_loop_stops_first_then_the_outer_one() -> None:
    asked: list[str] = []
    with stop_on_signals(lambda: asked.append("outer")):
        with stop_on_signals(lambda: asked.append("inner")):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert asked == ["inner", "outer"]


def test_outside_of_the_main_thread_signals_stay_with_the_main_thread() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    seen: list[object] = []

    def work() -> None:
        with stop_on_signals(lambda: seen.append("stop")):
            seen.append([signal.getsignal(number) for number in STOP_SIGNALS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
