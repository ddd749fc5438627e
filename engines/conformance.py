"""What every engine must do, ours and a plug-in's, as a test class to inherit from.

Needs no pytest itself: the methods are plain tests, `tmp_path` is an empty folder that pytest (or you) provides.

Example:
    class TestMyEngine(EngineConformance):
        def make_engine(self) -> TrainEngineWrapper: return MyEngine(config)
        def batch(self, seed: int) -> list[Experience]: return [...]
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from engines.base import TrainEngineWrapper, Weights
from engines.errors import DataError, EngineError
from engines.experience import Experience

Result = TypeVar("Result")

TIMINGS = ("time/", "perf/")
"""Groups of metrics that differ between equal runs."""


class EngineConformance(ABC):
    """Inherit, implement the two methods, and let your test runner collect the rest."""

    @abstractmethod
    def make_engine(self) -> TrainEngineWrapper:
        """A new engine, not prepared; equal in each call; its learning rate is not 0."""

    @abstractmethod
    def batch(self, seed: int) -> list[Experience]:
        """A batch that this engine can train on; different for different seeds."""

    def test_step_counts_only_successes(self) -> None:
        """train_step_num is 0 after prepare and goes up by one with each step that returned."""

        async def scenario(engine: TrainEngineWrapper) -> list[int]:
            seen = [engine.train_step_num]
            for seed in range(2):
                await engine.train_step(self.batch(seed))
                seen.append(engine.train_step_num)
            return seen

        assert self._run(scenario) == [0, 1, 2]

    def test_metrics_are_finite_floats_in_groups(self) -> None:
        """Keys are group/name; values are numbers that a tracker can log."""
        metrics = self._run(lambda engine: engine.train_step(self.batch(0)))
        assert metrics
        for key, value in metrics.items():
            assert "/" in key or key == "lr", key
            assert isinstance(value, float), key
            assert math.isfinite(value), key

    def test_equal_runs_are_equal(self) -> None:
        """Two engines with the same config and data end with the same metrics and weights, to the bit."""

        async def scenario(engine: TrainEngineWrapper) -> tuple[dict[str, float], Weights]:
            await engine.train_step(self.batch(0))
            metrics = await engine.train_step(self.batch(1))
            return _comparable(metrics), _uploaded(engine)

        first, second = self._run(scenario), self._run(scenario)
        assert first[0] == second[0]
        assert _equal_weights(first[1][1], second[1][1])

    def test_resumes_to_the_bit(self, tmp_path: Path) -> None:
        """A restored engine is at the snapshot's step and goes on exactly as the one that was not stopped."""
        staging = _folder(tmp_path, "staging")

        async def uninterrupted(engine: TrainEngineWrapper) -> tuple[dict[str, float], Weights]:
            await engine.train_step(self.batch(0))
            engine.staging_dir = staging
            engine.save_checkpoint(block_until_saved=True)
            metrics = await engine.train_step(self.batch(1))
            return _comparable(metrics), _uploaded(engine)

        async def resumed(engine: TrainEngineWrapper) -> tuple[int, dict[str, float], Weights]:
            step = engine.train_step_num
            metrics = await engine.train_step(self.batch(1))
            return step, _comparable(metrics), _uploaded(engine)

        metrics, weights = self._run(uninterrupted)
        step, metrics_after, weights_after = self._run(resumed, restore_dir=staging)
        assert step == 1
        assert metrics == metrics_after
        assert weights[0] == weights_after[0] == 2
        assert _equal_weights(weights[1], weights_after[1])

    def test_a_snapshot_does_not_depend_on_when_it_is_restored(self, tmp_path: Path) -> None:
        """Saving what was just restored gives the same files, byte for byte."""
        first, second = _folder(tmp_path, "first"), _folder(tmp_path, "second")

        async def train_and_save(engine: TrainEngineWrapper) -> None:
            await engine.train_step(self.batch(0))
            engine.staging_dir = first
            engine.save_checkpoint(block_until_saved=True)

        async def save(engine: TrainEngineWrapper) -> None:
            engine.staging_dir = second
            engine.save_checkpoint(block_until_saved=True)

        self._run(train_and_save)
        self._run(save, restore_dir=first)
        assert _digests(first) == _digests(second)

    def test_no_pickle_in_a_snapshot(self, tmp_path: Path) -> None:
        """Only formats that cannot run code when read."""
        staging = _folder(tmp_path, "staging")

        async def scenario(engine: TrainEngineWrapper) -> None:
            engine.staging_dir = staging
            engine.save_checkpoint(block_until_saved=True)

        self._run(scenario)
        suffixes = {path.suffix for path in staging.rglob("*") if path.is_file()}
        assert suffixes
        assert not suffixes & {".pt", ".pth", ".bin", ".pkl", ".pickle"}

    def test_training_changes_weights_and_upload_hands_over_copies(self) -> None:
        """What the sink got before a step is not changed by the step."""

        async def scenario(engine: TrainEngineWrapper) -> tuple[list[str], Weights, Weights]:
            before = _uploaded(engine)
            digest = [_digest_of(before[1][name]) for name in sorted(before[1])]
            await engine.train_step(self.batch(0))
            return digest, before, _uploaded(engine)

        digest, before, after = self._run(scenario)
        assert (before[0], after[0]) == (0, 1)
        assert [_digest_of(before[1][name]) for name in sorted(before[1])] == digest
        assert not _equal_weights(before[1], after[1])

    def test_an_empty_batch_is_refused_and_nothing_changes(self) -> None:
        """DataError leaves the engine usable and its step where it was."""

        async def scenario(engine: TrainEngineWrapper) -> tuple[bool, int]:
            refused = False
            try:
                await engine.train_step([])
            except DataError:
                refused = True
            step = engine.train_step_num
            await engine.train_step(self.batch(0))
            return refused, step

        assert self._run(scenario) == (True, 0)

    def test_unusable_before_prepare_and_after_shutdown(self) -> None:
        """EngineError, not an obscure failure; shutdown may be called twice."""

        async def scenario() -> int:
            engine, refused = self.make_engine(), 0
            for prepare in (False, True):
                if prepare:
                    await engine.prepare()
                    await engine.shutdown()
                    await engine.shutdown()
                try:
                    await engine.train_step(self.batch(0))
                except EngineError:
                    refused += 1
            await engine.shutdown()
            return refused

        assert asyncio.run(scenario()) == 2

    def _run(
        self, scenario: Callable[[TrainEngineWrapper], Awaitable[Result]], restore_dir: Path | None = None
    ) -> Result:
        """`scenario` with a prepared engine that is shut down afterwards."""

        async def life() -> Result:
            engine = self.make_engine()
            engine.restore_dir = restore_dir
            await engine.prepare()
            try:
                return await scenario(engine)
            finally:
                await engine.shutdown()

        return asyncio.run(life())


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(TIMINGS)}


def _uploaded(engine: TrainEngineWrapper) -> tuple[int, Weights]:
    """(version, weights) as `upload_state_dict` hands them over."""
    received: list[tuple[int, Weights]] = []
    engine.weights_sink = lambda version, weights: received.append((version, weights))
    engine.upload_state_dict()
    return received[-1]


def _equal_weights(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(_digest_of(one[name]) == _digest_of(other[name]) for name in one)


def _digest_of(tensor: Weights) -> str:
    """sha256 of a tensor (anything with `numpy()`) or array."""
    array = tensor.numpy() if hasattr(tensor, "numpy") else tensor
    return hashlib.sha256(array.tobytes()).hexdigest()


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
