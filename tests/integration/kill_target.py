"""What the kill tests run in processes of their own: one training run, which dies at its n-th durable action.

A forkserver imports the heavy modules once, so that a process costs a fraction of a second. The actions are Python's
own audit events for files and databases: whatever touches the disk is a place to die at.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

EVENTS = frozenset({"open", "os.link", "os.rename", "os.remove", "os.mkdir", "sqlite3.connect/handle", "shutil.rmtree"})

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "transformers", "mlflow", "reasoning_gym", "trinity_tasks.trainer", __name__])


def run_small_job(root: str, kill_at: int, count_file: str, overrides: tuple[str, ...] = ()) -> None:
    """Train the small job; SIGKILL this process at durable action `kill_at` (0: never). Leaves how many there were."""
    from tests.integration.small_job import small_config, train

    count = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS and (event != "open" or _writes(args)):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train(small_config(root, *overrides))
    total = count
    Path(count_file).write_text(str(total))


def _writes(args: tuple[object, ...]) -> bool:
    mode = args[1] if len(args) > 1 else None
    flags = args[2] if len(args) > 2 else 0
    return (isinstance(mode, str) and any(letter in mode for letter in "wax+")) or (
        isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    )


def start(root: Path, kill_at: int, count_file: Path, overrides: tuple[str, ...] = ()) -> int:
    """Run it, wait, and return the exit code: 0, or -9 when it was killed."""
    process = context.Process(target=run_small_job, args=(str(root), kill_at, str(count_file), overrides))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
