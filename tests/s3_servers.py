"""Real S3 servers in processes of their own: SeaweedFS, and `rclone serve s3`, which ignores create-only writes.

Owns: starting them on free ports, telling when they serve, ending them. Their data lie in a folder of the caller's.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engines.errors import StorageError
from trinity_tasks.storage import Storage

BIN = Path(sys.executable).parent
BUCKET = "bucket"
KEY, SECRET = "test-key", "test-secret"
START_S = 60.0
NUM_TRIES = 3
"""Another process may take a free port before the server does."""

# Ends the server when its own standard input ends, so that no server outlives a killed test run; ends with the server.
GUARD = """
import os, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr)
threading.Thread(target=lambda: os._exit(1 if server.wait() else 0), daemon=True).start()
sys.stdin.read()
server.kill()
server.wait()
"""


class NotStarted(Exception):
    """The server has ended, or does not serve in time. The end of its log follows."""


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[dict[str, str]]:
    """A SeaweedFS server with one bucket; yields the environment of its clients.

    Their key may do everything within the bucket, and nothing outside.
    """
    actions = [f"{action}:{BUCKET}" for action in ("Admin", "Read", "Write", "List", "Tagging")]
    identity = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
    (folder / "data").mkdir(parents=True)
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    fixed = [
        *(str(BIN / "weed"), "-logtostderr", "server", "-filer", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={folder / 'data'}", f"-s3.config={folder / 'identities.json'}", "-s3.port.iceberg=0"),
        *("-s3.port.lance=0", "-master.telemetry=false", "-master.electionTimeout=1s"),
        *("-master.volumeSizeLimitMB=512", "-volume.max=0"),
    ]

    def command(ports: list[int]) -> list[str]:
        """The S3 port is the first one."""
        servers = [f"{server}.port{kind}" for server in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
        return [*fixed, *(f"-{server}={port}" for server, port in zip(servers, ports, strict=True))]

    with _serving(command, 8, folder / "log") as environment:
        yield environment


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[dict[str, str]]:
    """`rclone serve s3` with one bucket; yields the environment of its clients."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    (folder / "rclone.conf").write_text("")

    def command(ports: list[int]) -> list[str]:
        return [
            *(str(BIN / "rclone"), "serve", "s3", str(folder / "data"), f"--addr=127.0.0.1:{ports[0]}"),
            *(f"--auth-key={KEY},{SECRET}", f"--config={folder / 'rclone.conf'}", f"--cache-dir={folder / 'cache'}"),
        ]

    with _serving(command, 1, folder / "log") as environment:
        yield environment


@contextlib.contextmanager
def _serving(command: Callable[[list[int]], list[str]], num_ports: int, log: Path) -> Iterator[dict[str, str]]:
    for _ in range(NUM_TRIES):
        ports = free_ports(num_ports)
        environment = {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{ports[0]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with _guarded(command(ports), log) as guard:
            if _serves(guard, environment):
                yield environment
                return
    raise NotStarted(log.read_text()[-4000:])


@contextlib.contextmanager
def _guarded(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        open(log, "ab") as output,
        subprocess.Popen(
            [sys.executable, "-c", GUARD, *command], stdin=subprocess.PIPE, stderr=output, start_new_session=True
        ) as guard,
    ):
        try:
            yield guard
        finally:
            assert guard.stdin is not None
            guard.stdin.close()


def _serves(guard: subprocess.Popen[bytes], environment: dict[str, str]) -> bool:
    """Wait until an object can be created and read: a port answers before that, and reads may fail for seconds."""
    deadline = time.monotonic() + START_S
    port = int(environment["AWS_ENDPOINT_URL_S3"].rpartition(":")[2])
    while time.monotonic() < deadline:
        if guard.poll() is not None:
            return False
        with contextlib.suppress(OSError, StorageError):
            socket.create_connection(("127.0.0.1", port)).close()
            _make_object(environment)
            return True
        time.sleep(0.1)
    return False


def _make_object(environment: dict[str, str]) -> None:
    with using(environment):
        make_bucket()
        store = Storage(f"s3://{BUCKET}/ready", retry_s=2)
        name = secrets.token_hex(8)
        store.create(name, b"ready")
        assert store.read_bytes(name) == b"ready"


@contextlib.contextmanager
def using(environment: dict[str, str]) -> Iterator[None]:
    """S3 clients of this process go to that server meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def make_bucket() -> None:
    """Make the tests' bucket on the server that the environment leads to, if it is not there."""
    import s3fs

    with contextlib.suppress(FileExistsError):
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)


def free_ports(number: int) -> list[int]:
    """TCP ports that nobody uses now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
