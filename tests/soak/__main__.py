"""Run one soak: start the writers and the trainer, kill one of them at random again and again, wait for their end.

    python -m tests.soak '{"url": ..., "scratch": ..., ...}'      a `Plan`; prints a `Report`

Owns: processes, kills, what is measured of memory. Does not own: whether the rows are right (`accounts.py`). A process
that ends by itself before its work is done fails the soak.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.soak.members import Plan, train, write
from tests.soak.report import Report, Sample

context = multiprocessing.get_context("fork")
"""This process imports everything, once, and has no threads of its own; so a restart costs milliseconds."""
START_S = 60.0
END_S = 600.0
SAMPLE_S = 0.1


class Member:
    """A process that is started again, under the same name, after each kill."""

    def __init__(self, plan: Plan, name: str, run: Callable[[Plan, str, Connection], None]) -> None:
        self.name = name
        self._plan = plan
        self._run = run
        self.start()

    def start(self) -> None:
        self._ready, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=self._run, args=(self._plan, self.name, theirs))
        self.process.start()
        theirs.close()

    def wait_until_at_work(self) -> None:
        """Raises EOFError if it has failed before."""
        if not self._ready.poll(START_S):
            raise TimeoutError(f"{self.name} is not at work after {START_S} s")
        self._ready.recv()

    def kill(self) -> None:
        """SIGKILL, whatever it does at the moment."""
        self.process.kill()
        self.process.join()
        if self.process.exitcode != -signal.SIGKILL:
            raise RuntimeError(
                f"{self.name} ended by itself with exit code {self.process.exitcode} before it was killed"
            )

    def finish(self) -> None:
        self.process.join(END_S)
        if self.process.exitcode != 0:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.exitcode}")

    def rss_bytes(self) -> int:
        """Resident memory now; 0 if it has ended."""
        try:
            fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        except FileNotFoundError:
            return 0
        return int(fields[1]) * 4096


def soak(plan: Plan) -> Report:
    """Raises RuntimeError if a process fails by itself."""
    plan.scratch.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    writers = [Member(plan, name, write) for name in plan.writers]
    trainer = Member(plan, "trainer", train)
    members, samples = [*writers, trainer], list[Sample]()

    def watch(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            at_s = time.monotonic() - started
            alive = ((member.name, rss) for member in members if (rss := member.rss_bytes()))
            samples.extend(Sample(name=name, at_s=at_s, rss_bytes=rss) for name, rss in alive)
            if (left_s := deadline - time.monotonic()) <= 0:
                return
            time.sleep(min(left_s, SAMPLE_S))

    draw, kills = random.Random(plan.seed), Counter[str]()
    try:
        for _ in range(plan.num_kills):
            victim = draw.choice([*writers, trainer, trainer])
            victim.wait_until_at_work()
            watch(draw.uniform(0, plan.max_life_s))
            victim.kill()
            kills[victim.name] += 1
            victim.start()
        plan.stop.touch()
        while any(member.process.is_alive() for member in members):
            watch(SAMPLE_S)
        for member in members:
            member.finish()
    finally:
        for member in members:
            member.process.kill()
    return Report(kills=dict(kills), seconds=time.monotonic() - started, samples=tuple(samples))


def main() -> None:
    plan = Plan.model_validate_json(sys.argv[1])
    if plan.url.startswith("s3://"):
        import s3fs  # noqa: F401  (so that not each process has to)
    print(soak(plan).model_dump_json())


if __name__ == "__main__":
    main()
