"""A real Prefect server for tests, on a database of its own: the one that the command line embeds."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from flows.embedded_server import COMMAND
from flows.environment import DEFAULTS


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """A server; yields the URL of its API."""
    environment = {**os.environ, **DEFAULTS, "PREFECT_HOME": str(home), "PREFECT_API_URL": ""}
    with subprocess.Popen(
        COMMAND, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/api"
        with urlopen(f"{url}/health", timeout=200):
            pass
        yield url
        process.stdin.close()


@contextlib.contextmanager
def using_prefect(url: str) -> Iterator[None]:
    """Flows of this process use the server meanwhile."""
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings

    with temporary_settings({PREFECT_API_URL: url, PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
        yield
        _send_what_waits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # sockets that Prefect has left open: here, not in whatever test runs next


def _send_what_waits() -> None:
    """Events and logs leave this process in threads of Prefect; they are to be gone before the server is."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for left in (APILogWorker.instance().drain(), EventsWorker.drain_all()):
        assert not inspect.isawaitable(left), "outside of an event loop these wait by themselves"
