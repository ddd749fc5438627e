"""The command `trinity-flows` as a user runs it: a process of its own, in a working folder, with a home for Prefect.

Owns: starting it and what can be seen of it from outside. A folder made by `Workplace.make` holds what a user's may:
reward functions, an engine, and files whose names are also names of the standard library and of this project.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from trinity_tasks.config import Config

PROGRAM = Path(sys.executable).with_name("trinity-flows")
LONGEST_S = 200
LONGEST_FAREWELL_S = 30
MARKER = "TRINITY_FLOWS_TEST"
"""Environment variable by which the processes of one command are found."""

REWARDS = '''
def lenient(task, response):
    """Share of the letters that are in the answer."""
    return sum(letter in task.answer for letter in response) / max(len(response), 1)
'''

ENGINE = '''
import asyncio
import os
import signal
import threading

from engines.errors import EngineError
from engines.hf.engine import HfEngine


class TroubledEngine(HfEngine):
    """Gets into the trouble that TROUBLE names, in the train step that it names: "interrupt@3"."""

    async def train_step(self, batch_exps):
        trouble, _, step = os.environ.get("TROUBLE", "").partition("@")
        if step == str(self.train_step_num + 1):
            await getattr(self, trouble)()
        return await super().train_step(batch_exps)

    async def fail(self):
        raise EngineError(f"step {self.train_step_num + 1}: the device has fallen off")

    async def interrupt(self):
        os.killpg(0, signal.SIGINT)  # as a terminal does at Ctrl-C

    async def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)

    async def interrupt_twice(self):
        os.killpg(0, signal.SIGINT)
        threading.Timer(0.2, os.killpg, (0, signal.SIGINT)).start()
        await asyncio.wrap_future(self._submit(threading.Event().wait))  # a step that does not end

    async def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
'''

TRAP = "raise ImportError(f'{__file__} hides a module that is not the user\\'s')\n"
TRAPS = ("json.py", "random.py", "secrets.py", "flows.py", "engines.py", "trinity_tasks.py", "torch.py", "rich.py")


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    """Exit code; -N if signal N ended it."""
    out: str
    err: str
    left_behind: tuple[int, ...]
    """Processes of its making that were there when it had ended."""
    immortal: tuple[int, ...]
    """Those of them that did not end soon after."""

    @property
    def json(self) -> Any:
        """What it printed, which is exactly one JSON value on one line."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)

    @property
    def noise(self) -> list[str]:
        """Lines on stderr that would frighten a user."""
        words = ("traceback", "warning", "deprecat", "error")
        return [line for line in self.err.splitlines() if any(word in line.lower() for word in words)]


@dataclasses.dataclass(frozen=True)
class Workplace:
    """A folder to work in, and Prefect's home."""

    folder: Path
    home: Path

    @classmethod
    def make(cls, root: Path, mlflow_database: Path | None = None) -> Workplace:
        """A folder with everything that a user may have there, and a home that does not exist yet.

        mlflow_database: MLflow's tables, for the jobs in runs/; making them takes seconds.
        """
        folder = root / "work"
        folder.mkdir()
        if mlflow_database is not None:
            (folder / "runs").mkdir()
            shutil.copy(mlflow_database, folder / "runs" / "mlflow.db")
        (folder / "my_rewards.py").write_text(REWARDS)
        (folder / "my_engine.py").write_text(ENGINE)
        for name in TRAPS:
            (folder / name).write_text(TRAP)
        return cls(folder, root / "prefect")

    def write(self, name: str, config: Config) -> None:
        """A config as a file to give to -c."""
        (self.folder / name).write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))

    def run(self, *arguments: str, program: str | Path = PROGRAM, **environment: str) -> Ended:
        """Run the command to its end, in a process group of its own."""
        marker = uuid.uuid4().hex
        process = subprocess.Popen(
            [str(program), *arguments],
            cwd=self.folder,
            env=self._environment() | {MARKER: marker} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                out, err = process.communicate(timeout=LONGEST_S)
            finally:
                process.kill()
        left_behind = _marked(marker)
        immortal = tuple(pid for pid in left_behind if not _ends(pid))
        return Ended(process.returncode, out, err, left_behind, immortal)

    def _environment(self) -> dict[str, str]:
        """Without what whoever runs the tests has set for Prefect, MLflow or Python."""
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "PYTHON"))
        }
        return ours | {"PREFECT_HOME": str(self.home), "XDG_CACHE_HOME": str(self.folder.parent / "cache")}

    def prefect(self, query: str) -> list[tuple[Any, ...]]:
        """Rows from the database of the embedded Prefect server."""
        return _rows(self.home / "prefect.db", query)

    def mlflow(self, query: str) -> list[tuple[Any, ...]]:
        """Rows from MLflow's database."""
        return _rows(self.folder / "runs" / "mlflow.db", query)

    def commits(self, job: str) -> list[int]:
        """The step of each checkpoint of a job, in order of the commits."""
        files = sorted((self.folder / "runs" / job / "commits").glob("0*.json"))
        commits = [json.loads(file.read_text()) for file in files]
        return [commit["step"] for commit in commits if commit["kind"] == "checkpoint"]


def _rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def _marked(marker: str) -> tuple[int, ...]:
    """Processes that inherited the marker."""
    wanted = f"{MARKER}={marker}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return tuple(found)


def _ends(pid: int) -> bool:
    """Whether a process that is no child of this one ends in time; if not, it is killed."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if select.select([handle], [], [], LONGEST_FAREWELL_S)[0]:
            return True
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return False
    finally:
        os.close(handle)
