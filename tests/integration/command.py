"""The command `trinity-flows` as a user runs it: a process of its own, in a working folder, with a home for Prefect.

Owns: starting it and what can be seen of it from outside. A folder made by `Workplace.make` holds what a user's may:
reward functions, an engine, and files whose names are also names of the standard library and of this project.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity_tasks.config import Config

PROGRAM = Path(sys.executable).with_name("trinity-flows")
LONGEST_S = 100

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
    """A command that has ended, and so has its server."""

    code: int
    """Exit code; -N if signal N ended it."""
    out: str
    err: str

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
    def make(cls, folder: Path) -> Workplace:
        """A folder with everything a user may have there, and a home that does not exist yet."""
        work = folder / "work"
        work.mkdir(parents=True)
        (work / "my_rewards.py").write_text(REWARDS)
        (work / "my_engine.py").write_text(ENGINE)
        for name in TRAPS:
            (work / name).write_text(TRAP)
        return cls(work, folder / "prefect")

    def write(self, name: str, config: Config) -> None:
        """A config as a file to give to -c."""
        (self.folder / name).write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))

    def run(self, *arguments: str, program: str | Path = PROGRAM, **environment: str) -> Ended:
        """Run the command to its end, in a process group of its own."""
        with self.start(*arguments, program=program, **environment) as process:
            out, err = process.communicate(timeout=LONGEST_S)
        return Ended(process.returncode, out, err)

    @contextmanager
    def start(
        self, *arguments: str, program: str | Path = PROGRAM, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """The command while it runs; it is killed if the block ends before it."""
        process = subprocess.Popen(
            [str(program), *arguments],
            cwd=self.folder,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        """Nothing that whoever runs the tests has set for Prefect, MLflow or Python."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "PYTHON"))}
        cache = str(self.folder.parent / "cache")
        return kept | {"PREFECT_HOME": str(self.home), "XDG_CACHE_HOME": cache, "COLUMNS": "200"} | dict(changes)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the database of the embedded Prefect server."""
        with sqlite3.connect(self.home / "prefect.db") as database:
            return database.execute(sql).fetchall()

    def servers(self) -> list[int]:
        """Processes that work in this Prefect home and are not the command itself."""
        return [pid for pid in _processes() if _environ(pid).get("PREFECT_HOME") == str(self.home)]


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environ(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def wait_for_end(pid: int, timeout_s: float = 30) -> bool:
    """Whether the process, which need not be a child, ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
