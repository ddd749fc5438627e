"""What the numbers were measured on, and this process's own use of memory and processor. Linux (/proc)."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def describe_machine() -> str:
    """Processor, cores, memory, versions: one line."""
    cpu = _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {memory_gib:.0f} GiB, python {platform.python_version()}, torch {version('torch')}"


def python_loop_ms(clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of two million additions in Python, the fastest of five: how fast this machine is at such work now.

    Times in milliseconds mean little without it; about 100 on a core of 2023 that nobody else uses. clock:
    `time.process_time` for measures of processor time.
    """

    def once() -> float:
        total, start = 0, clock()
        for number in range(2_000_000):
            total += number
        return 1000 * (clock() - start)

    return min(once() for _ in range(5))


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    flags = (_field(Path("/proc/cpuinfo"), "flags") or "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"}.intersection(flags))


def describe_commit() -> str:
    """Revision of the working tree, with -dirty for uncommitted changes; unknown outside git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load_average() -> float:
    """Runnable processes, average of the last minute: over 0.5 before a run, times are not to be trusted."""
    return os.getloadavg()[0]


def rss_kb() -> int:
    """Resident memory of this process, KB."""
    return _status_kb("VmRSS")


def reset_peak_rss() -> None:
    """Let `peak_rss_kb` start from now, where the kernel allows it; else the peak includes what went before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_kb() -> int:
    """Highest resident memory of this process since its start or the last reset, KB."""
    return _status_kb("VmHWM")


def children_cpu_s() -> dict[int, float]:
    """User and system time of every living descendant of this process, by pid, seconds."""
    children: dict[int, list[tuple[int, float]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parent, ticks = int(fields[1]), int(fields[11]) + int(fields[12])
            children.setdefault(parent, []).append((int(stat.parent.name), ticks / os.sysconf("SC_CLK_TCK")))
    found: dict[int, float] = {}
    queue = [os.getpid()]
    while queue:
        for pid, seconds in children.get(queue.pop(), []):
            found[pid] = seconds
            queue.append(pid)
    return found


def _status_kb(key: str) -> int:
    value = _field(Path("/proc/self/status"), key)
    if value is None:
        raise OSError(f"/proc/self/status has no {key}: the benchmarks read memory from the Linux kernel")
    return int(value.split()[0])


def _field(path: Path, key: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return None
