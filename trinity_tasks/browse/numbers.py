"""Statistics of one column of numbers. Pure functions; does not own where the numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engines.config import Frozen

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_BARS: Final = 12


class Bar(Frozen):
    """How many numbers lie in an interval."""

    low: float
    high: float
    """Belongs to the interval only of the last bar; equal to `low`: the bar is of this one value."""
    count: int


class Numbers(Frozen):
    """A column of finite numbers, at least one."""

    count: int
    mean: float
    std: float
    """Of the numbers themselves: the sum of squares is divided by `count`."""
    min: float
    max: float
    quantiles: dict[str, float]
    """"0.05" and so on; between two numbers, linearly."""
    bars: tuple[Bar, ...]
    """Ascending: one for each value, or equal intervals if there are more than 12 values."""


def numbers_of(values: npt.NDArray[Any]) -> Numbers | None:
    """None if there are no finite numbers among the values."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return None
    return Numbers(
        count=finite.size,
        mean=float(finite.mean()),
        std=float(finite.std()),
        min=float(finite.min()),
        max=float(finite.max()),
        quantiles={f"{share:g}": float(np.quantile(finite, share)) for share in QUANTILES},
        bars=_bars(finite),
    )


def _bars(values: npt.NDArray[np.float64]) -> tuple[Bar, ...]:
    singles, counts = np.unique(values, return_counts=True)
    if singles.size <= MAX_BARS:
        return tuple(Bar(low=float(x), high=float(x), count=int(n)) for x, n in zip(singles, counts, strict=True))
    heights, edges = np.histogram(values, MAX_BARS)
    return tuple(
        Bar(low=float(low), high=float(high), count=int(count))
        for low, high, count in zip(edges[:-1], edges[1:], heights, strict=True)
    )


class Versions(Frozen):
    """Train steps of the weights that sampled the rows."""

    min: int
    median: float
    max: int
    num_rows: dict[int, int]
    """By version, ascending."""


def versions_of(counts: Mapping[int, int]) -> Versions | None:
    """None if no row has a version."""
    if not counts:
        return None
    ordered = dict(sorted(counts.items()))
    versions, ends = list(ordered), np.cumsum(list(ordered.values()))
    middle = [versions[int(np.searchsorted(ends, half, side="right"))] for half in _middle(int(ends[-1]))]
    return Versions(min=versions[0], median=sum(middle) / 2, max=versions[-1], num_rows=ordered)


def _middle(count: int) -> tuple[int, int]:
    """Positions of the two numbers in the middle of so many, which are one if the count is odd."""
    return (count - 1) // 2, count // 2
