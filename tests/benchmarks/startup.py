"""From the command to the beginning of the first train step: `trinity-flows finetune` on the shipped spelling recipe.

Embedded Prefect server, in a home and a root folder that an earlier run of another name has prepared. The first train
step begins when its ledger entry appears; the run is then asked to stop.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks import machine

RECIPE = machine.REPOSITORY / "infra" / "configs" / "spell.yaml"
REPETITIONS = 3
LONGEST_START_S = 180
LONGEST_STOP_S = 120
POLL_S = 0.01


def startup() -> dict[str, float]:
    """Median of three starts in a prepared home, and the first one, which prepares it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        first = _seconds_to_first_step(Path(folder), "prepare")
        times = [_seconds_to_first_step(Path(folder), f"start-{number}") for number in range(REPETITIONS)]
    return {"startup_s": statistics.median(times), "startup_longest_s": max(times), "startup_fresh_home_s": first}


def _seconds_to_first_step(folder: Path, name: str) -> float:
    command = [str(Path(sys.executable).with_name("trinity-flows")), "finetune", "-c", str(RECIPE)]
    command += ["--set", f"name={name}", "--set", f"checkpoint_root_dir={folder / 'runs'}"]
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect")}
    with (folder / f"{name}.log").open("w+") as log:
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            while not list(folder.glob(f"runs/**/{name}/**/ledger/step_*.json")):
                if process.poll() is not None or time.monotonic() - start > LONGEST_START_S:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} reached no train step:\n{log.read()[-3000:]}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - start
            process.send_signal(signal.SIGTERM)
            process.wait(LONGEST_STOP_S)
        finally:
            process.kill()
            process.wait()
    return seconds
