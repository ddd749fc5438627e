"""What one soak measured: kills, seconds, resident memory over time.

Owns: `Report` and starting a soak in a process of its own. Does not own: the account of rows (`accounts.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from engines.config import Frozen
from tests.soak.members import Plan


class Sample(Frozen):
    """Resident memory of one process."""

    name: str
    at_s: float
    """Seconds since the start."""
    rss_bytes: int


class Report(Frozen):
    """What `python -m tests.soak` prints."""

    kills: dict[str, int]
    """By name of the process."""
    seconds: float
    samples: tuple[Sample, ...]

    def peaks_mb(self, name: str) -> tuple[float, float, float]:
        """The most resident memory that the processes of this name had, in each third of their samples."""
        sizes = [sample.rss_bytes / 1e6 for sample in self.samples if sample.name == name]
        third = len(sizes) // 3
        return max(sizes[:third]), max(sizes[third:-third]), max(sizes[-third:])


def run_soak(plan: Plan, environment: Mapping[str, str], root: Path) -> Report:
    """Raises CalledProcessError if the soak fails; what its processes say goes to standard error."""
    command = [sys.executable, "-m", "tests.soak", plan.model_dump_json()]
    done = subprocess.run(command, env=dict(environment), cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return Report.model_validate_json(done.stdout)
