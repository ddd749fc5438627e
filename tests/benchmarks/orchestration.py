"""What a train step costs besides training: the real flow `train` around the null engine, 3,000 steps in one run.

Real parts: embedded Prefect server in a fresh home, MLflow on sqlite, local storage, default settings, so that every
step is two task runs (explore, train), one shard, one ledger entry and one point of each metric. Small batches: 4 tasks
with 4 samples. Nothing is saved before the end. "Outside" is wall time from one train step to the next, less the
engine's and the sampler's own; encoding, rewards and progress display are in it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks import machine, null_engine, workload
from trinity_tasks.config import Config

TASKS, SAMPLES = 4, 4
STEPS = 3000
SETTLED = 100
"""First step that counts: caches are filled, lazy imports done."""
COUNTED = 300
"""Steps of the median."""
LEVEL = 1000
"""First step of the memory's slope: pools and queues have their size by then."""
IDLE_CPU_S = 0.15
"""Processor time per second under which the servers have nothing left to do but their own upkeep."""
LONGEST_DRAIN_S = 120


def orchestration() -> dict[str, float]:
    """Median outside of 300 steps, the same at the end against that, the servers' processor time until they have
    digested everything, and the slope of this process's memory.
    """
    python_loop_ms = machine.python_loop_ms()
    diary, drained = _run()
    outside = diary.outside_ms()[SETTLED - 1 :]
    early, late = outside[:COUNTED], outside[-COUNTED:]
    before = diary.children_cpu_s[SETTLED]
    server_cpu_s = sum(seconds - before.get(pid, 0.0) for pid, seconds in drained.items())
    return {
        "orchestration_ms_per_step": float(np.median(early)),
        "orchestration_growth": float(np.median(late) / np.median(early)),
        "server_cpu_ms_per_step": 1000 * server_cpu_s / (STEPS - SETTLED),
        "rss_kb_per_step": float(np.polyfit(np.arange(LEVEL, STEPS), diary.rss_kb[LEVEL:], 1)[0]),
        "python_loop_ms": python_loop_ms,
        "orchestration_p10_ms": float(np.percentile(early, 10)),
        "orchestration_p95_ms": float(np.percentile(early, 95)),
        "orchestration_mean_ms": float(early.mean()),
        "orchestration_late_ms": float(np.median(late)),
        "orchestration_cpu_ms_per_step": float(1000 * np.diff(diary.cpu_s)[SETTLED - 1 :].mean()),
        "rss_mb_at_step_1000": float(diary.rss_kb[LEVEL - 1] / 1024),
        "rss_mb_at_step_3000": float(diary.rss_kb[-1] / 1024),
    }


def _run() -> tuple[null_engine.Diary, dict[int, float]]:
    """The diary of a finished run, and the processor time of every child once the servers are idle again."""
    diary = null_engine.Diary(STEPS, watched=[SETTLED])
    null_engine.install(diary)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ["PREFECT_HOME"] = f"{name}/prefect"
        from flows.embedded_server import EmbeddedServer
        from flows.environment import set_defaults

        set_defaults()
        server = EmbeddedServer.start()
        server.announce()
        importlib.import_module("mlflow")  # as the command does, while the server starts
        from flows.train import train

        server.wait_until_ready()
        finished = asyncio.run(train(_config(Path(name))))
        assert isinstance(finished, dict), finished
        return diary, _drained_cpu_s()


def _config(folder: Path) -> Config:
    questions = [{"question": f"Say {null_engine.RESPONSE} ({n})", "answer": null_engine.RESPONSE} for n in range(64)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    taskset = {"source": "jsonl", "dataset": str(folder / "tasks.jsonl"), "held_out_share": 0.0}
    return Config.model_validate(
        {
            "name": "orchestration",
            "checkpoint_root_dir": str(folder / "runs"),
            "model": {"architecture": workload.SMALL, "tokenizer": workload.TOKENIZER.model_dump()},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": SAMPLES},
            "buffer": {"batch_size": TASKS, "explorer_input": {"taskset": taskset}},
            "trainer": {"trainer_type": null_engine.NAME, "total_steps": STEPS},
        }
    )


def _drained_cpu_s() -> dict[int, float]:
    """Wait until the children have next to nothing to do; their processor time then."""
    end = time.monotonic() + LONGEST_DRAIN_S
    before = machine.children_cpu_s()
    while time.monotonic() < end:
        time.sleep(2)
        now = machine.children_cpu_s()
        if sum(now.values()) - sum(before.values()) < 2 * IDLE_CPU_S:
            break
        before = now
    return machine.children_cpu_s()
