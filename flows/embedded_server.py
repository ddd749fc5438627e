"""The embedded Prefect server: a process beside the command, on the local database in PREFECT_HOME.

Prefect can start one by itself, but late, when the flow begins, and it imports the whole server into this process for
that. Its server also stops at Ctrl-C before the flow could say that it was cancelled, outlives a killed command, and
drops at its end what it has not recorded yet. This one starts at once, while everything else loads; it ends with the
command, however that ends, and records everything first. Nothing is started where PREFECT_API_URL or a Prefect profile
names a server.

The upper half runs in the command and imports no Prefect. The lower half is the process itself; it is run as a file and
imports nothing of this project.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

API_URL = "PREFECT_API_URL"
LONGEST_START_S = 180
"""A fresh database needs a quarter of a minute, on a busy machine several times that."""
LONGEST_DRAIN_S = 60
COMMAND = (sys.executable, "-P", "-W", "ignore", __file__)
"""Runs this file. -P: modules in its folder have names of the standard library's kind."""
NICENESS = 10
"""Added once it has started: on a machine that is full, training comes before keeping its history."""
LOG_NAME = "embedded-server.log"
LOCK_NAME = "embedded-server.lock"


class EmbeddedServer:
    """The server of this command, if it needs one. Use `start`, `announce`, `wait_until_ready`; it stops at exit."""

    running = False
    """Whether this process has one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def start(cls) -> EmbeddedServer:
        """Begin to start it, unless PREFECT_API_URL names another. Returns at once."""
        server = cls()
        if not os.environ.get(API_URL):
            server._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the command; the server still has to hear how that ended
            )
            # Prefect sends its last events when threads end, which is before this.
            atexit.register(server.stop)
        return server

    def announce(self) -> None:
        """Wait for the server's address and give it to Prefect, which must not have been imported before."""
        if self._process is None or self._process.stdout is None:
            return
        said = self._process.stdout.readline().strip()
        if said.isdigit():
            os.environ[API_URL] = f"http://127.0.0.1:{said}/api"
            EmbeddedServer.running = True
        elif said:
            raise _failure(f"{said}; let PREFECT_HOME name a folder that can be written")
        elif self._process.wait() != 0:
            raise _failure()

    def wait_until_ready(self) -> None:
        """Wait until it answers: it listens from the beginning, so that one question is enough."""
        if not EmbeddedServer.running:
            return
        try:
            with urlopen(f"{os.environ[API_URL]}/health", timeout=LONGEST_START_S):
                pass
        except (OSError, HTTPException) as error:
            raise _failure() from error

    def stop(self) -> None:
        """Wait until it has recorded everything, and end it. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(LONGEST_DRAIN_S + 10)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def _failure(reason: str | None = None) -> Exception:
    from engines.errors import TrinityFlowsError

    known = f"the end of {LOG_NAME} in PREFECT_HOME (by default ~/.prefect) says why. Run it again"
    return TrinityFlowsError(
        f"the embedded Prefect server did not start: {reason or known}, or name a server of yours with {API_URL}"
    )


# -- the process ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Be the server until standard input ends.

    Says its port on standard output, or why its folder cannot be used; nothing if another server is named.
    """
    watch = _Watch()
    threading.Thread(target=watch.end_with_parent, daemon=True).start()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url:
        return
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        log = (settings.home / LOG_NAME).open("a")
    except OSError as error:
        print(f"{settings.home}: {error.strerror}", flush=True)
        return
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    with log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import uvicorn
    from filelock import FileLock
    from prefect.server.api.server import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with FileLock(settings.home / LOCK_NAME):  # two at once would both create the tables
                await super().startup(sockets)
            os.nice(NICENESS)

    app = create_app(ephemeral=True, final=True)
    watch.server = Server(uvicorn.Config(app, log_level="error", ws_per_message_deflate=False))
    watch.server.run(sockets=[listener])
    os._exit(0)  # taking a thousand modules apart costs a second, and the parent waits


class _Watch:
    """Ends the process when its parent has gone, whatever it is doing then."""

    server: Any = None
    """Set once it begins to start: from then on a sudden end could leave half a database."""

    def end_with_parent(self) -> None:
        sys.stdin.read()
        if self.server is None:
            os._exit(0)
        while not self.server.started:
            time.sleep(0.1)
        _drain()
        self.server.should_exit = True


def _drain() -> None:
    """Wait until every event that was sent is recorded.

    Recorders take events from queues and write them in batches. They are done when all that was published is consumed
    and nothing has come for longer than a batch is held back. Prefect's own end drops what is queued.
    """
    from prefect.server.utilities.messaging.memory import METRICS
    from prefect.settings import get_current_settings

    held_back_s = get_current_settings().server.services.task_run_recorder.flush_interval + 0.5
    start = quiet_since = time.monotonic()
    before: dict[str, int] = {}
    while time.monotonic() - start < LONGEST_DRAIN_S and time.monotonic() - quiet_since < held_back_s:
        time.sleep(0.05)
        now = dict(METRICS["events"])
        if now != before or now["published"] != now["consumed"]:
            quiet_since = time.monotonic()
        before = now


if __name__ == "__main__":
    serve()
