"""Selectors: which tasks of a finite set come next. A selection is a pure function of the seed and the state.

Owns: the order of tasks, what is known of their difficulty, the JSON of both. Does not own: tasks
(`trinity_tasks.tasksets`), pass rates (`trinity_tasks.operators`), keeping the state (the checkpoint's commit).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, ValidationError, model_validator

from engines.config import Frozen, Resume
from engines.errors import CheckpointError, ConfigError, DataError

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class DifficultyArgs(Frozen):
    """How difficulty_based estimates pass rates, and how it chooses by them."""

    target_reward: Annotated[float, Resume.FORK] = Field(default=1.0, ge=0, le=1)
    """Tasks whose estimated pass rate is nearest to this are preferred."""
    tau: Annotated[float, Resume.FORK] = Field(default=1.0, ge=0, le=100)
    """Temperature of the choice, in units of the pass rate. 0: the nearest ones, always."""
    do_sample: Annotated[bool, Resume.FORK] = False
    """Draw each estimate from its distribution, so that uncertain tasks are tried too. False: take its mean."""
    m: Annotated[int, Resume.FORK] = Field(default=16, ge=1)
    """How many samples one measured pass rate counts for."""
    lamb: Annotated[float, Resume.FORK] = Field(default=0.2, ge=0, le=1)
    """Share of what was known that each measurement, of whichever tasks, makes forgotten."""
    rho: Annotated[float, Resume.FORK] = Field(default=0.2, ge=0, le=1)
    """With feature_keys: weight of a pass rate that is inferred from the features, beside a measured one."""


class SelectorConfig(Frozen):
    """Which tasks of a finite set come next."""

    selector_type: Annotated[
        Literal["sequential", "shuffle", "random", "easy_to_hard", "difficulty_based"], Resume.FORK
    ] = "sequential"
    """sequential: in their order. shuffle: each epoch in another order. random: drawn anew for every batch.
    easy_to_hard: by feature_keys, the greatest first. difficulty_based: by measured pass rates."""
    seed: Annotated[int | None, Resume.FORK] = Field(default=None, ge=0, lt=2**63)
    """Seed of shuffle, random and difficulty_based. None: the job's."""
    feature_keys: Annotated[tuple[str, ...], Resume.FORK] = ()
    """Numbers in each task's record. easy_to_hard: the later ones decide among equals. difficulty_based: none, or two:
    the pass rates of a weak and of a strong model."""
    kwargs: DifficultyArgs = DifficultyArgs()
    """For difficulty_based."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        name, num_keys = self.selector_type, len(self.feature_keys)
        if name == "easy_to_hard" and not num_keys:
            raise ValueError("easy_to_hard needs feature_keys: what is greater the easier a task is")
        if name == "difficulty_based" and num_keys not in (0, 2):
            raise ValueError(
                f"difficulty_based has {num_keys} feature_keys; it takes none, or two: the pass rates of a weak and of "
                "a strong model"
            )
        if name not in ("easy_to_hard", "difficulty_based") and num_keys:
            raise ValueError(f"{name} reads no features; leave feature_keys out, or use easy_to_hard")
        if name != "difficulty_based" and self.kwargs != DifficultyArgs():
            raise ValueError(f"{name} takes no kwargs; leave them out, or use difficulty_based")
        return self


class Selector(Protocol):
    """Chooses tasks by their index, 0 to N - 1."""

    def select(self, n: int) -> list[int]:
        """The next n indices. If n is more than N, some are in it more than once."""
        ...

    def state(self) -> JsonValue:
        """All that the following selections depend on, beside config, seed and features."""
        ...

    def restore(self, state: JsonValue) -> None:
        """Go on where `state()` was taken. Raises CheckpointError if it is that of another selector or task set."""
        ...

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Tell the mean rewards of tasks. Raises DataError if they are not what this selector can use."""
        ...


NotNegative = Annotated[float, Field(ge=0)]


class _State(Frozen):
    """JSON of every selector."""

    selector: str
    num_items: int
    current_index: int = Field(ge=0)
    """How many were selected so far."""
    counts: dict[int, tuple[NotNegative, NotNegative]] = Field(default_factory=dict[int, tuple[float, float]])
    """Index -> alpha - 1 and beta - 1, of the tasks of which anything is known."""
    cap: float | None = None
    """Where the model stands between the weak and the strong one; None: not known."""


class _Counting(ABC):
    """A selector whose selections depend on how many there were."""

    def __init__(self, name: str, num_items: int) -> None:
        self._name = name
        self._num_items = num_items
        self._current = 0

    def select(self, n: int) -> list[int]:
        if n < 0:
            raise DataError(f"{n} tasks were asked of selector {self._name}; it gives 0 or more")
        chosen = self._chosen(n)
        self._current += n
        return chosen

    @abstractmethod
    def _chosen(self, n: int) -> list[int]:
        """n indices, after `_current` others."""

    def state(self) -> JsonValue:
        return self._state().model_dump(mode="json", exclude_defaults=True)

    def _state(self) -> _State:
        return _State(selector=self._name, num_items=self._num_items, current_index=self._current)

    def restore(self, state: JsonValue) -> None:
        try:
            parsed = _State.model_validate(state)
        except ValidationError as error:
            detail = error.errors()[0]
            place = ".".join(str(part) for part in detail["loc"])
            raise CheckpointError(
                f"the state of selector {self._name} cannot be read: {place}: {detail['msg']}; resume from another "
                "checkpoint"
            ) from error
        if (parsed.selector, parsed.num_items) != (self._name, self._num_items):
            raise CheckpointError(
                f"the checkpoint has the state of selector {parsed.selector} over {parsed.num_items} tasks, and this "
                f"job has {self._name} over {self._num_items}: the order would be another one; restore the task set, "
                "or give the job a new name"
            )
        if any(not 0 <= index < self._num_items for index in parsed.counts):
            raise CheckpointError(f"the state of selector {self._name} names tasks beyond its {self._num_items}")
        self._restore(parsed)

    def _restore(self, state: _State) -> None:
        self._current = state.current_index

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Raises DataError for a task that there is not; not used otherwise."""
        for index in pass_rates:
            if not 0 <= index < self._num_items:
                raise DataError(
                    f"a pass rate of task {index} was measured, and there are tasks 0 to {self._num_items - 1}"
                )


class EpochSelector(_Counting):
    """Walks through one order of all tasks after another, each to its end; a batch may reach into the next epoch.

    Each epoch has every task once. A batch that reaches into the next epoch may have a task from both.
    """

    def __init__(self, name: str, num_items: int, order_of: Callable[[int], Int64s]) -> None:
        """order_of: epoch -> all indices."""
        super().__init__(name, num_items)
        self._order_of = order_of
        self._newest = (0, order_of(0))

    def _chosen(self, n: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < n:
            epoch, start = divmod(self._current + len(chosen), self._num_items)
            if self._newest[0] != epoch:
                self._newest = (epoch, self._order_of(epoch))
            chosen += self._newest[1][start : start + n - len(chosen)].tolist()
        return chosen


class RandomSelector(_Counting):
    """Draws every batch from all tasks, without replacement. More than N: whole rounds of all tasks, then the rest."""

    def __init__(self, name: str, num_items: int, seed: int) -> None:
        super().__init__(name, num_items)
        self._seed = seed

    def _chosen(self, n: int) -> list[int]:
        rng = np.random.default_rng(self._seed + self._current)
        return [
            index
            for size in _round_sizes(n, self._num_items)
            for index in rng.choice(self._num_items, size, replace=False).tolist()
        ]


class DifficultySelector(_Counting):
    """Prefers tasks whose estimated pass rate is near a target.

    What is known of the pass rate of a task is Beta(alpha, beta), at first Beta(1, 1). With every feedback, alpha - 1
    and beta - 1 shrink by the factor 1 - lamb. Then a task with a pass rate p gains m p in alpha and m (1 - p) in beta.
    With features w, s (pass rates of a weak and of a strong model), a task without one gains rho times as much, with
    p = w + cap (s - w) within 0 and 1, where cap is what the measured tasks show, averaged over time.

    n tasks are drawn without replacement, with weights exp(-abs(target_reward - estimate) / tau), or are the n nearest.
    Trinity-RFT's estimator, but for LEAST_GAP: there, tasks that both models do alike make cap a large number.
    """

    CAP_KEPT: Final = 0.9
    """Share of the old cap in the new one."""
    LEAST_GAP: Final = 0.01
    """Measured tasks on which the weak and the strong model are nearer than this say nothing of the cap."""

    def __init__(self, name: str, num_items: int, seed: int, args: DifficultyArgs, features: Float64s | None) -> None:
        """features: [N, 2] pass rates of a weak and of a strong model."""
        super().__init__(name, num_items)
        self._seed = seed
        self._args = args
        self._features = features
        self._cap: float | None = None
        self._counts = np.zeros((num_items, 2))
        """[N, 2] alpha - 1 and beta - 1: exactly 0 where nothing is known."""

    def pass_rates(self) -> Float64s:
        """[N] estimates: means of what is known."""
        alphas, betas = 1 + self._counts.T
        return alphas / (alphas + betas)

    def _chosen(self, n: int) -> list[int]:
        rng = np.random.default_rng([self._seed, self._current])
        alphas, betas = 1 + self._counts.T
        rates = rng.beta(alphas, betas) if self._args.do_sample else self.pass_rates()
        # The n greatest of log-weight plus Gumbel noise are n draws without replacement; here both are times tau, which
        # may be 0.
        keys = self._args.tau * rng.gumbel(size=self._num_items) - np.abs(self._args.target_reward - rates)
        ranked = np.argsort(-keys, kind="stable")
        return [index for size in _round_sizes(n, self._num_items) for index in ranked[:size].tolist()]

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Raises DataError for a task that there is not, and for a mean reward that is no pass rate."""
        super().feedback(pass_rates)
        if not pass_rates:
            return
        for index, rate in pass_rates.items():
            if not 0 <= rate <= 1:
                raise DataError(
                    f"the mean reward of task {index} is {rate}; difficulty_based needs rewards of 0 to 1, so that it "
                    "is a pass rate: calculate it before rewards are shaped, or use another selector"
                )
        measured = np.array(sorted(pass_rates), np.int64)
        rates = np.array([pass_rates[index] for index in measured.tolist()], np.float64)
        passed, weights = np.zeros(self._num_items), np.zeros(self._num_items)
        if self._features is not None:
            inferred = self._inferred(self._features, measured, rates)
            if inferred is not None:
                passed[:], weights[:] = inferred, self._args.rho
        passed[measured], weights[measured] = rates, 1
        weights *= self._args.m
        self._counts *= 1 - self._args.lamb
        self._counts += np.stack([weights * passed, weights * (1 - passed)], axis=1)

    def _inferred(self, features: Float64s, measured: Int64s, rates: Float64s) -> Float64s | None:
        """[N] pass rates by the features, where the model stands between the two; None as long as nobody knows."""
        weak, strong = features[measured].mean(axis=0)
        if abs(strong - weak) >= self.LEAST_GAP:
            cap = float((rates.mean() - weak) / (strong - weak))
            self._cap = cap if self._cap is None else self.CAP_KEPT * self._cap + (1 - self.CAP_KEPT) * cap
        if self._cap is None:
            return None
        return np.clip(features[:, 0] + self._cap * (features[:, 1] - features[:, 0]), 0, 1)

    def _state(self) -> _State:
        counts = {
            index: tuple(self._counts[index].tolist()) for index in np.flatnonzero(self._counts.any(axis=1)).tolist()
        }
        return super()._state().model_copy(update={"counts": counts, "cap": self._cap})

    def _restore(self, state: _State) -> None:
        super()._restore(state)
        self._cap = state.cap
        self._counts = np.zeros((self._num_items, 2))
        for index, counts in state.counts.items():
            self._counts[index] = counts


def _round_sizes(n: int, num_items: int) -> Iterable[int]:
    """n in parts of num_items, and the rest."""
    return [min(num_items, n - start) for start in range(0, n, num_items)]


def build_selector(
    config: SelectorConfig, num_items: int, seed: int, features: Sequence[Sequence[float]] | None = None
) -> Selector:
    """The selector that the config names.

    seed: the job's, if the config has none. features: [N, F] one number for each of feature_keys. Raises ConfigError.
    """
    name = config.selector_type
    if num_items < 1:
        raise ConfigError(f"selector {name} has no tasks to choose from; it needs a finite task set that is not empty")
    seed = seed if config.seed is None else config.seed
    matrix = _checked(config, num_items, features)
    match name:
        case "sequential":
            return EpochSelector(name, num_items, lambda _: np.arange(num_items))
        case "shuffle":
            return EpochSelector(
                name, num_items, lambda epoch: np.random.default_rng(seed + epoch).permutation(num_items)
            )
        case "random":
            return RandomSelector(name, num_items, seed)
        case "easy_to_hard":
            assert matrix is not None
            order = np.lexsort(-matrix.T[::-1])
            return EpochSelector(name, num_items, lambda _: order)
        case "difficulty_based":
            return DifficultySelector(name, num_items, seed, config.kwargs, matrix)


def _checked(config: SelectorConfig, num_items: int, features: Any) -> Float64s | None:
    """[N, F] if there are feature_keys. Raises ConfigError for features that are missing, or not what they must be."""
    keys = config.feature_keys
    if not keys:
        return None
    what = f"selector {config.selector_type}, feature_keys {', '.join(keys)}"
    try:
        matrix = np.array(features, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: not a number for every key of every task ({error}); correct the records") from error
    if matrix.shape != (num_items, len(keys)):
        raise ConfigError(
            f"{what}: features have shape {list(matrix.shape)}, and {num_items} tasks with {len(keys)} keys need "
            f"[{num_items}, {len(keys)}]"
        )
    rates = config.selector_type == "difficulty_based"
    good = ((matrix >= 0) & (matrix <= 1)) if rates else np.isfinite(matrix)
    if not good.all():
        task, key = np.argwhere(~good)[0].tolist()
        needed = "a pass rate of 0 to 1" if rates else "finite"
        raise ConfigError(f"{what}: {keys[key]} of task {task} is {matrix[task, key]}; it must be {needed}")
    return matrix
