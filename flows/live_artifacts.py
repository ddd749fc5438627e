"""`LiveArtifacts`: artifacts of the Prefect run that is active, kept up to date while it runs.

Owns: one thread, when it publishes, and that a Prefect server which is slow or gone costs the run nothing. Does not own
what an artifact shows: its content is asked for in that thread.
"""

from __future__ import annotations

import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
"""Longest wait at the end for a Prefect server that hangs."""


class Content(NamedTuple):
    """What an artifact shows."""

    data: Any
    description: str


@dataclass
class LiveArtifact:
    """One artifact."""

    kind: str
    """Type that the UI knows: progress, table."""
    key: str
    content: Callable[[], Content | None]
    """What it shows now; None: nothing yet."""
    interval_s: float
    """Shortest time between two updates, but for the last one."""
    _id: Any = field(default=None, init=False)
    _shown: Content | None = field(default=None, init=False)
    _published_at: float = field(default=float("-inf"), init=False)

    def publish(self, client: Any, flow_run_id: Any, *, is_last: bool) -> None:
        """Make or update it, if there is anything new and it is time."""
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        if not is_last and time.monotonic() - self._published_at < self.interval_s:
            return
        content = self.content()
        if content is None or content == self._shown:
            return
        if self._id is None:
            new = ArtifactCreate(type=self.kind, key=self.key, flow_run_id=flow_run_id, **content._asdict())
            self._id = client.create_artifact(new).id
        else:
            client.update_artifact(self._id, ArtifactUpdate(**content._asdict()))
        self._shown, self._published_at = content, time.monotonic()


class LiveArtifacts:
    """Publishes as a context manager; does nothing outside of a Prefect run."""

    def __init__(self, artifacts: Sequence[LiveArtifact], flow_run_id: Any = None) -> None:
        """flow_run_id: the run that they are of; None: the one that is active when it is entered, if there is one."""
        self._artifacts = artifacts
        self._flow_run_id = flow_run_id
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._flow_run_id is None:
            self._flow_run_id = _active_flow_run()
        if self._flow_run_id is not None:
            context = contextvars.copy_context()  # Prefect keeps its settings there, the server's address among them
            self._thread = threading.Thread(
                target=context.run, args=(self._publish_all,), name="live-artifacts", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)

    def _publish_all(self) -> None:
        from prefect.client.orchestration import get_client

        wait_s = min(artifact.interval_s for artifact in self._artifacts)
        with get_client(sync_client=True) as client:
            done = False
            while not done:
                done = self._done.wait(wait_s)
                for artifact in self._artifacts:
                    self._publish(artifact, client, done)

    def _publish(self, artifact: LiveArtifact, client: Any, is_last: bool) -> None:
        import httpx
        from prefect.exceptions import PrefectException

        try:
            artifact.publish(client, self._flow_run_id, is_last=is_last)
        except (httpx.HTTPError, PrefectException, OSError) as error:
            logger.debug("artifact %s was not updated, trying again later: %s", artifact.key, error)


def artifact_key(*parts: str) -> str:
    """A key as Prefect allows it.

    Example:
        >>> artifact_key("progress", "Spell/grpo_1")
        'progress-spell-grpo-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _active_flow_run() -> Any:
    """Id of the Prefect flow run in whose body this is called, or None."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return context.flow_run.id if context is not None and context.flow_run is not None else None
