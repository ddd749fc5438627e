"""The Prefect server that the command brings along: when there is one, what it records, and when it is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from flows.embedded_server import API_URL, COMMAND, LOG_NAME, NICENESS
from tests.integration.command import Ended, Workplace
from tests.integration.small_job import small_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFECT = Path(sys.executable).with_name("prefect")
LONGEST_START_S = 90
NAMES = ("left", "right")
TASK_RUNS = {"prepare": 1, "evaluate": 2, "train_step": 3, "save_checkpoint": 1}
"""Of a job of three steps with an evaluation before and after. Sampling and sync in memory are plain calls."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Workplace:
    """Holds the configs of two jobs of three steps."""
    place = Workplace.make(tmp_path_factory.mktemp("embedded"), empty_database)
    for name in NAMES:
        config = small_config("runs", f"name={name}", "trainer.total_steps=3", "explorer.eval_interval=0")
        place.write(f"{name}.yaml", config)
    return place


@pytest.fixture(scope="module")
def both(place: Workplace) -> list[Ended]:
    """Two commands that were started at the same moment, in a Prefect home that did not exist."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda name: place.run("train", "-c", f"{name}.yaml", "--json"), NAMES))


def test_two_at_once_in_a_fresh_home(both: list[Ended]) -> None:
    for ended in both:
        assert (ended.code, ended.noise) == (0, []), ended.err
        assert ended.json["finished"]
    assert [ended.json["name"] for ended in both] == list(NAMES)


def test_everything_is_recorded_as_completed(both: list[Ended], place: Workplace) -> None:
    assert [ended.code for ended in both] == [0, 0]
    assert sorted(place.prefect("select name, state_type from flow_run")) == [(name, "COMPLETED") for name in NAMES]
    for name in NAMES:
        rows = place.prefect(
            "select task_run.name, task_run.state_name from task_run join flow_run on flow_run.id = flow_run_id "
            f"where flow_run.name = '{name}'"
        )
        assert {state for _, state in rows} == {"Completed"}
        assert Counter(task.rpartition("-")[0] for task, _ in rows) == TASK_RUNS


def test_the_server_ends_with_the_command(both: list[Ended], place: Workplace) -> None:
    assert [ended.left_behind for ended in both] == [(), ()]
    assert (place.home / LOG_NAME).read_text() == ""  # it had nothing to complain of


def test_none_is_started_where_another_one_is_named(both: list[Ended], place: Workplace, tmp_path: Path) -> None:
    assert [ended.code for ended in both] == [0, 0]
    home = tmp_path / "home"
    with prefect_server(place.home) as api:
        ended = place.run("train", "-c", "left.yaml", "--json", **{API_URL: api, "PREFECT_HOME": str(home)})
        assert (ended.code, ended.noise, ended.left_behind) == (0, [], ()), ended.err
        runs = post(f"{api}/flow_runs/filter", {"sort": "START_TIME_DESC"})
    assert (runs[0]["name"], runs[0]["state_name"]) == ("left", "Completed")
    assert len(runs) == len(NAMES) + 1
    assert not (home / LOG_NAME).exists()
    assert not (home / "prefect.db").exists()


def test_it_makes_way_for_the_training(place: Workplace) -> None:
    """Once it has started: the start itself is waited for."""
    environment = {name: value for name, value in os.environ.items() if name != API_URL}
    environment["PREFECT_HOME"] = str(place.home)
    pipe = subprocess.PIPE
    with subprocess.Popen(COMMAND, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        port = cast("IO[str]", process.stdout).readline().strip()
        urlopen(f"http://127.0.0.1:{port}/api/health", timeout=LONGEST_START_S).close()
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + NICENESS, 19)
        cast("IO[str]", process.stdin).close()
        assert process.wait(LONGEST_START_S) == 0


@pytest.mark.parametrize("home", ["a_file", "/proc/nowhere/home"])
def test_a_home_that_cannot_be_used_is_named(tmp_path: Path, home: str) -> None:
    place = Workplace.make(tmp_path)
    place.write("left.yaml", small_config("runs"))
    (place.folder / "a_file").write_text("not a folder")
    ended = place.run("train", "-c", "left.yaml", "--json", PREFECT_HOME=str(place.folder / home))
    assert (ended.code, ended.left_behind) == (1, ()), ended.err
    assert ended.json["error"]["exit_code"] == 1
    (line,) = ended.err.splitlines()
    assert line.startswith(f"TrinityFlowsError: the embedded Prefect server did not start: {place.folder / home}")
    assert API_URL in line
    assert not (place.folder / "runs").exists()


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """The API's address of a Prefect server on the database in `home`, started as its users do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(PREFECT), "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-services"]
    environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    log = home / "server.log"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            api = f"http://127.0.0.1:{port}/api"
            wait_until_healthy(api, process)
            yield api
        finally:
            process.terminate()


def wait_until_healthy(api: str, process: subprocess.Popen[bytes]) -> None:
    """A server that is another's has no other way to say that it is ready."""
    deadline = time.monotonic() + LONGEST_START_S
    while True:
        try:
            urlopen(f"{api}/health", timeout=10).close()
        except (URLError, ConnectionError):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        else:
            return


def post(url: str, content: Any) -> Any:
    request = Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        return json.load(answer)
