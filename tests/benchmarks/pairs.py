"""Two sides measured against each other: each lives in its own process, steps are taken in turns, A B A B.

The worker's half: `Commands` waits for a go and answers with numbers. The caller's half: `Worker`, `interleave`,
`median_ratio`. Nothing here knows what a step is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any, Self

from tests.benchmarks import machine

WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Commands:
    """The worker's side of the pipe. Anything that libraries print goes to stderr."""

    def __init__(self) -> None:
        self._replies: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, **facts: float) -> None:
        """Preparation is over; memory growth counts from here."""
        machine.reset_peak_rss()
        self._start_kb = machine.rss_kb()
        self._reply(facts)

    def wait(self) -> bool:
        """Block until the next step is asked for; False: no more."""
        return bool(sys.stdin.readline())

    def begin(self) -> None:
        """The step begins now."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """The step is over: its times and the memory peak so far are taken."""
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        growth_mb = (machine.peak_rss_kb() - self._start_kb) / 1024
        self._step = {"wall_s": wall_s, "cpu_s": cpu_s, "growth_mb": growth_mb}

    def report(self, **facts: float) -> None:
        """Tell the caller about the step that `end` closed."""
        self._reply({**self._step, **facts})

    def _reply(self, facts: dict[str, float]) -> None:
        self._replies.write(json.dumps(facts) + "\n")


class Worker:
    """A process that takes one step for each `step()`."""

    def __init__(self, module: str, spec: dict[str, Any], num_threads: int) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=machine.REPOSITORY,
            env=os.environ | WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": str(num_threads)},
        )

    def __enter__(self) -> Self:
        self.ready = self._read()
        return self

    def step(self) -> dict[str, float]:
        """What the worker said about its next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait(60)
        self._log.seek(0)
        raise RuntimeError(f"{self._module} ended with {code}:\n{self._log.read()[-4000:]}")


@dataclass(frozen=True)
class Side:
    """What was measured on one side; the warm-up step is not among the times."""

    wall_s: list[float]
    cpu_s: list[float]
    growth_mb: float
    """Peak memory over what the side held when it was ready, all steps and the warm-up."""
    first: dict[str, float]
    """The warm-up step, on the initial weights."""

    @property
    def median_s(self) -> float:
        """Median wall time of a step."""
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """Median processor time of a step."""
        return statistics.median(self.cpu_s)


def interleave(workers: dict[str, Worker], pairs: int) -> dict[str, Side]:
    """One warm-up step of each worker, then `pairs` rounds of one step of each in turn."""
    firsts, *rounds = [{name: worker.step() for name, worker in workers.items()} for _ in range(1 + pairs)]
    return {
        name: Side(
            wall_s=[steps[name]["wall_s"] for steps in rounds],
            cpu_s=[steps[name]["cpu_s"] for steps in rounds],
            growth_mb=max(steps[name]["growth_mb"] for steps in (firsts, *rounds)),
            first=firsts[name],
        )
        for name in workers
    }


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median over pairs of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
