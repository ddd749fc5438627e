"""`Synchronizer`: how trained weights reach samplers. Methods `memory` (this process) and `checkpoint` (storage).

Owns: who asked for weights, which version everyone may use. Does not own: making the weights (engines) or storing them
(`weights.py`). After a resume, current weights are published before anyone waits for them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from engines.base import Sampler, Weights
from trinity_tasks.weights import WeightStore

KEPT_VERSIONS = 3
"""Published versions that stay: a sampler elsewhere may still be fetching the last but one."""


class RunningStatus(StrEnum):
    """What a side of the exchange is doing."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


class Synchronizer:
    """Hands versions of the weights from one trainer to its samplers.

    Example:
        >>> synchronizer = Synchronizer(weights=None)
        >>> synchronizer.model_version
        0
    """

    def __init__(self, weights: WeightStore | None) -> None:
        self.model_version = 0
        """Train step of the weights that were published last."""
        self.trainer_status = RunningStatus.STOPPED
        self._store = weights
        self._samplers: list[Sampler] = []
        self._explorer_asks = False

    def subscribe(self, sampler: Sampler) -> None:
        """Weights handed over in memory go to this sampler too. It has those of its own `version` already."""
        self._samplers.append(sampler)
        self.model_version = max(self.model_version, sampler.version)

    @property
    def has_samplers(self) -> bool:
        """Whether samplers of this process take weights."""
        return bool(self._samplers)

    def publish_memory(self, version: int, weights: Weights) -> None:
        """Method `memory`: give the weights to every sampler of this process."""
        for sampler in self._samplers:
            sampler.load(version, weights)
        self._published(version)

    def publish_checkpoint(self, staged: Path, version: int) -> None:
        """Method `checkpoint`: publish a staged HF folder on storage; complete or absent. Raises StorageError."""
        if self._store is None:
            raise ValueError("this synchronizer was made without a weight store")
        self._store.publish(staged, version)
        self._store.collect(KEPT_VERSIONS)
        self._published(version)

    def _published(self, version: int) -> None:
        self.model_version = version
        self._explorer_asks = False

    def request_sync(self) -> None:
        """An explorer asks for newer weights (style explorer_driven)."""
        self._explorer_asks = True

    async def explorer_requires_sync(self) -> bool:
        """Whether an explorer waits for newer weights."""
        return self._explorer_asks

    async def notify_no_new_model_state_dict(self) -> None:
        """Release explorers that wait: the version that they have is still the newest."""
        self._explorer_asks = False

    async def ready_to_nccl_sync(self, module: str, step: int) -> int | None:
        """Version to broadcast, or None when no peer is there to receive it."""
        return None if not self._samplers else step

    async def set_trainer_status(self, status: RunningStatus) -> None:
        """Announce what the trainer does; STOPPED releases every waiting explorer."""
        self.trainer_status = status
        if status is RunningStatus.STOPPED:
            self._explorer_asks = False
