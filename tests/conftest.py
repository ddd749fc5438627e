"""Fixtures shared by all tests: stores to write to, and an S3 server (moto, in its own process)."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3_servers
from tests.faulty_s3 import FaultyS3
from tests.s3_servers import BUCKET

# The server ends when its standard input does, so that it cannot outlive a killed test run.
MOTO_SERVER = """
import logging, sys
logging.disable()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, str]]:
    """Environment variables that lead any S3 client, also of a subprocess, to a moto server with one bucket.

    Or to the server at TEST_S3_ENDPOINT with the AWS keys of the environment.
    """
    if endpoint := os.environ.get("TEST_S3_ENDPOINT"):
        environment = {"AWS_ENDPOINT_URL_S3": endpoint}
        with s3_servers.using(environment):
            s3_servers.make_bucket()
        yield environment
        return
    command = [sys.executable, "-W", "ignore", "-c", MOTO_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        environment = {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with s3_servers.using(environment):
            s3_servers.make_bucket()
        yield environment
        server.stdin.close()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables that lead any S3 client to a SeaweedFS server, which checks signatures and checksums."""
    with s3_servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "server") as environment:
        yield environment


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables that lead any S3 client to `rclone serve s3`, which ignores create-only writes."""
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone") / "server") as environment:
        yield environment


@pytest.fixture(scope="session")
def s3_environment(moto: dict[str, str]) -> dict[str, str]:
    """Environment variables that lead to the S3 server of the tests; a file may choose another."""
    return moto


@pytest.fixture
def s3_url(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on the S3 server, which the environment leads to."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def _proxy(s3_environment: dict[str, str]) -> Iterator[FaultyS3]:
    with FaultyS3(s3_environment["AWS_ENDPOINT_URL_S3"]) as proxy:
        yield proxy


@pytest.fixture
def faulty_s3(s3_url: str, _proxy: FaultyS3) -> FaultyS3:
    """A proxy in front of the S3 server: set its `rule` to make it fail. Lead a Storage there by `endpoint_url`."""
    _proxy.requests.clear()
    _proxy.faults.clear()
    _proxy.rule = lambda method, path, authorization: None
    return _proxy


@pytest.fixture(params=["local", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty prefix on every kind of store."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "s3"])
def shared_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty prefix on every kind of store that several processes share."""
    return request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "store")


@pytest.fixture
def repository_root() -> Path:
    """The folder that subprocesses of a test import the packages from."""
    return Path(__file__).parent.parent


@pytest.fixture
def python_environment(repository_root: Path) -> dict[str, str]:
    """Environment of a subprocess that imports the packages of this checkout."""
    return {**os.environ, "PYTHONPATH": str(repository_root)}
