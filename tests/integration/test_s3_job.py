"""The whole job on S3: the same bits as on a local disk, whole or killed in the middle; nothing wrong in the bucket.

On SeaweedFS, and on `rclone serve s3`, which ignores create-only writes and is used by promising a single writer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.job_digest import final_state, ledger, metrics
from tests.integration.kill_target import context
from tests.integration.small_job import small_config, train
from trinity_tasks.inspection import describe, trace_step, verify
from trinity_tasks.job import job_url
from trinity_tasks.storage import Storage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def run(root: str, environment: dict[str, str], kill_at: int, overrides: tuple[str, ...]) -> None:
    """Train in this process; SIGKILL it as it sends its `kill_at`-th request that changes the bucket (0: never)."""
    os.environ.update(environment)
    from aiobotocore.client import AioBaseClient

    send = AioBaseClient._make_api_call
    count = 0

    async def counted(self: AioBaseClient, operation_name: Any, api_params: Any) -> Any:
        nonlocal count
        if operation_name.startswith(("Put", "Delete", "Create", "Upload", "Complete", "Copy")):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return await send(self, operation_name, api_params)

    AioBaseClient._make_api_call = counted
    train(small_config(root, *overrides))


def start(root: str, environment: dict[str, str], kill_at: int, overrides: tuple[str, ...]) -> int | None:
    process = context.Process(target=run, args=(root, environment, kill_at, overrides))
    process.start()
    process.join()
    return process.exitcode


def download(url: str, folder: Path) -> Path:
    store = Storage(url)
    for info in store.list(recursive=True):
        store.get_file(info.name, folder / info.name)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """Root of the job on a local disk, in one go."""
    root = tmp_path_factory.mktemp("local")
    (root / "mlflow.db").write_bytes(empty_database.read_bytes())
    train(small_config(root))
    return root


@pytest.fixture(scope="module", params=["seaweedfs", "rclone"])
def server(request: pytest.FixtureRequest) -> str:
    """Which server the job lies on."""
    return request.param


@pytest.fixture(scope="module")
def s3_environment(request: pytest.FixtureRequest, server: str) -> dict[str, str]:
    """The environment that leads to that server: for this file, what all others take from moto."""
    return request.getfixturevalue(server)


@pytest.fixture
def overrides(server: str, job_root: Path) -> tuple[str, ...]:
    """What the job's config needs there."""
    promise = ("storage.single_writer=true",) if server == "rclone" else ()
    return (f"monitor.tracking_uri=sqlite:///{job_root}/mlflow.db", *promise)


@pytest.fixture
def finished(
    s3_url: str, s3_environment: dict[str, str], overrides: tuple[str, ...], tmp_path: Path
) -> Callable[..., Path]:
    """Runs the job on S3, dying at the given requests in turn, until it ends; returns its folder, downloaded."""

    def finish(*kill_points: int) -> Path:
        for point in kill_points:
            assert start(s3_url, s3_environment, point, overrides) == -signal.SIGKILL
        assert start(s3_url, s3_environment, 0, overrides) == 0
        return download(job_url(small_config(s3_url)), tmp_path / "downloaded")

    return finish


def assert_same(local: Path, remote: Path, job_root: Path) -> None:
    of_local = local / "tests" / "small"
    assert final_state(remote) == final_state(of_local)
    assert [ranges for _, ranges in sorted(ledger(remote).items())] == [
        ranges for _, ranges in sorted(ledger(of_local).items())
    ]
    assert metrics(job_root, remote) == metrics(local, of_local)


def test_the_whole_job_is_the_same_as_on_a_local_disk(
    finished: Callable[..., Path], local: Path, s3_url: str, job_root: Path, overrides: tuple[str, ...]
) -> None:
    remote = finished()
    url = job_url(small_config(s3_url))
    assert verify(url) == []
    state = describe(url)
    assert (state.step, state.finished, state.attempt) == (12, True, 1)
    assert [commit.step for commit in state.commits] == [3, 6, 9, 12]
    assert len(trace_step(url, 12)["experiences"]) == 16
    assert_same(local, remote, job_root)
    names = [info.name for info in Storage(url).list(recursive=True) if "lease" not in info.name]
    train(small_config(s3_url, *overrides))  # again: nothing is trained
    assert [info.name for info in Storage(url).list(recursive=True) if "lease" not in info.name] == names


@pytest.mark.parametrize("server", ["seaweedfs", pytest.param("rclone", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("kill_points", [(25,), pytest.param((45, 20), marks=pytest.mark.slow)])
def test_killed_in_the_middle_it_ends_in_the_same_bits(
    finished: Callable[..., Path], local: Path, s3_url: str, job_root: Path, kill_points: tuple[int, ...]
) -> None:
    remote = finished(*kill_points)
    url = job_url(small_config(s3_url))
    assert verify(url) == []
    assert describe(url).attempt == 1 + len(kill_points)
    assert_same(local, remote, job_root)
