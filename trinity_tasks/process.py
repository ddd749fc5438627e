"""`Process`: which process on which machine, and whether it has ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from engines.config import Frozen


class Process(Frozen):
    """A process, named so that its pid cannot be mistaken for a later one or one in another container."""

    host: str
    boot_id: str
    """Of the kernel's boot; empty where the system does not tell."""
    pid_namespace: str
    """Containers on one machine share the boot id but not the pids."""
    pid: int
    started: str
    """Kernel clock ticks since boot."""

    @classmethod
    def current(cls) -> Process:
        """This process."""
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or "",
        )

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if that cannot be seen from here."""
        if not self.boot_id or (self.boot_id, self.pid_namespace) != (_boot_id(), _pid_namespace()):
            return None
        return _start_of(self.pid) != self.started


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Start time of a running process; None if there is none (a zombie has ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZXx" else fields[19]
