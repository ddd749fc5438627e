"""The loop's steps as Prefect tasks: what is retried, what is a task run at all, and that Prefect keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.context import FlowRunContext
from prefect.states import Failed
from prefect.tasks import Task
from prefect.utilities.collections import visit_collection

from engines.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LeaseLost,
    StorageError,
)
from tests.fake_job import fake_config
from trinity_tasks import tasks
from trinity_tasks.standalone import StandaloneExplorer
from trinity_tasks.tasks import forgotten, prefect_steps
from trinity_tasks.trainer import Trainer

TASKS: dict[str, Task[Any, Any]] = {name: value for name, value in vars(tasks).items() if isinstance(value, Task)}


def test_a_step_is_repeated_only_where_that_is_harmless() -> None:
    """A second call of train_step would train a batch twice; a second `prepare` would find its own lease."""
    assert {name: task.retries for name, task in TASKS.items()} == {
        "prepare": 0,
        "explore_step": 3,
        "train_step": 0,
        "sync_weight": 3,
        "save_checkpoint": 3,
        "evaluate": 3,
    }
    assert all(task.name == name for name, task in TASKS.items())
    for task in TASKS.values():
        assert task.retry_delay_seconds == ([2, 4, 8] if task.retries else 0)


@pytest.mark.parametrize("name", TASKS)
def test_nothing_is_cached_or_kept(name: str) -> None:
    assert TASKS[name].cache_policy is NO_CACHE
    assert TASKS[name].persist_result is False
    assert TASKS[name].log_prints is not True


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConfigError("x"), False),
        (DataError("x"), False),
        (LeaseLost("x"), False),
        (StorageError("x"), True),
        (CheckpointError("x"), True),
        (EngineError("x"), True),
        (OSError("x"), True),
    ],
)
def test_what_repeating_cannot_help_is_not_repeated(error: Exception, again: bool) -> None:
    for task in TASKS.values():
        if task.retries:
            may_help = cast("Callable[..., Any]", task.retry_condition_fn)
            assert asyncio.run(may_help(task, cast("TaskRun", None), Failed(data=error))) is again


@pytest.mark.parametrize("worker", [Trainer, StandaloneExplorer])
def test_prefect_finds_nothing_inside_of_what_it_is_handed(
    worker: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It walks into collections, dataclasses and pydantic models of every task's arguments: seconds for a batch."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    visited: list[object] = []
    handed = worker(fake_config(tmp_path))
    visit_collection(handed, visited.append, return_data=False)
    assert visited == [handed]


# -- which calls become task runs --------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tasks that were called, in order; each calls its body, once."""
    called: list[str] = []

    async def call(self: Task[Any, Any], worker: Any) -> Any:
        called.append(self.name)
        return await self.fn(worker)

    monkeypatch.setattr(Task, "__call__", call)
    return called


class Stub:
    """Answers as a trainer does, without training."""

    def __init__(self, sync_method: str, *failures: Exception) -> None:
        self.config = fake_config("/nowhere", f"synchronizer.sync_method={sync_method}")
        self.calls: list[str] = []
        self._failures = list(failures)

    async def explore_step(self) -> dict[str, float]:
        self.calls.append("explore_step")
        if self._failures:
            raise self._failures.pop(0)
        return {"explore/num_rows": 4.0}

    def __getattr__(self, name: str) -> Any:
        async def answer() -> dict[str, float]:
            self.calls.append(name)
            return {name: 1.0}

        return answer


def all_steps(stub: Stub) -> list[object]:
    async def call_each() -> list[object]:
        return [await step() for step in prefect_steps(cast("Trainer", stub))]

    return asyncio.run(call_each())


@pytest.mark.parametrize(("sync_method", "with_sync"), [("memory", []), ("checkpoint", ["sync_weight"])])
def test_what_cannot_fail_is_no_task_run(sync_method: str, with_sync: list[str], runs: list[str]) -> None:
    """Exploring and a hand-over in memory are plain calls; the rest is a task run each."""
    stub = Stub(sync_method)
    results = all_steps(stub)
    assert stub.calls == ["explore_step", "train_on_next_batch", "sync_weight", "save_now", "evaluate"]
    assert runs == ["train_step", *with_sync, "save_checkpoint", "evaluate"]
    assert results == [{"explore/num_rows": 4.0}, *({name: 1.0} for name in stub.calls[1:])]


def test_exploring_becomes_a_task_run_once_it_fails(
    runs: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.logger, "propagate", True)
    stub = Stub("memory", StorageError("s3://b/job: gone for a moment"))
    assert all_steps(stub)[0] == {"explore/num_rows": 4.0}
    assert stub.calls[:2] == ["explore_step", "explore_step"]
    assert runs[0] == "explore_step"
    assert "tried again as a task run: s3://b/job: gone for a moment" in caplog.text


@pytest.mark.parametrize("error", [ConfigError("x"), DataError("x"), LeaseLost("x"), ZeroDivisionError("x")])
def test_an_error_that_stays_is_raised_at_once(error: Exception, runs: list[str]) -> None:
    stub = Stub("memory", error)
    with pytest.raises(type(error)):
        all_steps(stub)
    assert (stub.calls, runs) == (["explore_step"], [])


def test_prefect_forgets_what_a_task_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep each number of each result until the flow ends."""
    context = FlowRunContext.model_construct(run_results={})

    async def returns(self: Task[Any, Any], worker: Any) -> Any:
        result = await self.fn(worker)
        for value in (result, *result.values()):
            context.run_results[id(value)] = (Failed(), cast("Any", None), None)
        return result

    monkeypatch.setattr(Task, "__call__", returns)
    with context:
        stub = Stub("checkpoint")
        all_steps(stub)
        assert len(stub.calls) == 5
        assert len(context.run_results) == 0
        assert asyncio.run(forgotten(cast("Any", tasks.explore_step), stub)) == {"explore/num_rows": 4.0}
        assert len(context.run_results) == 0
