"""Compares numbers and sums up cases. Owns: tolerances, and what a deviation is.

A case deviates if one of the listed differences applies to its inputs. Then our number must be that of an independent
derivation, and the reference's number that of its own formula, faults included: both are checks like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.golden.format import floats

RTOL, ATOL = 1e-9, 1e-13
"""Of everything that was computed in float64."""
LOOSE = 1e-6
"""Of advantages: whole groups were computed in float32."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    what: str
    abs_error: float
    rel_error: float
    """|a - b| / (|b| + atol / rtol): at most rtol if the check passes."""
    passed: bool
    shown: str
    """The worst pair."""


@dataclass(slots=True)
class Verdict:
    """All comparisons of one case."""

    checks: list[Check] = field(default_factory=list[Check])
    differences: set[int] = field(default_factory=set[int])
    """Numbers of the listed differences that apply to the inputs."""

    def compare(self, what: str, ours: Any, wanted: Any, rtol: float = RTOL, atol: Any = ATOL) -> None:
        """Add a comparison of two arrays; NaN equals NaN, and infinities equal themselves."""
        self.checks.append(compared(what, ours, wanted, rtol, atol))

    def require(self, what: str, holds: bool, shown: str = "") -> None:
        """Add a fact."""
        self.checks.append(Check(what, 0.0 if holds else np.inf, 0.0 if holds else np.inf, holds, shown))

    def compare_metrics(
        self, metrics: Mapping[str, Any], ours: Mapping[str, float], unmatched: set[str], rtol: float = RTOL
    ) -> None:
        """Compare the reference's metrics with ours of the same name; `unmatched` have no counterpart of ours."""
        for key, value in metrics.items():
            if key in ours:
                self.compare(f"metric {key}", ours[key], value, rtol, atol=rtol * 1e-3)
            else:
                self.require(f"metric {key} is known", key in unmatched)

    @property
    def failures(self) -> list[Check]:
        """What does not hold."""
        return [check for check in self.checks if not check.passed]


def compared(what: str, ours: Any, wanted: Any, rtol: float, atol: Any) -> Check:
    """Compare elementwise; atol is a number or an array."""
    a, b, allowed = floats(ours), floats(wanted), np.asarray(atol, np.float64)
    if a.shape != b.shape:
        return Check(what, np.inf, np.inf, False, f"shapes {a.shape} and {b.shape}")
    if not a.size:
        return Check(what, 0.0, 0.0, True, "")
    a, b, allowed = (part.ravel() for part in np.broadcast_arrays(a, b, allowed))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
        error = np.where(np.isnan(error), np.inf, error)
        size = np.where(np.isfinite(b), np.abs(b), 0.0) + allowed / rtol
    relative = error / np.maximum(size, 1e-300)
    worst = int(np.argmax(relative))
    passed = bool((error <= rtol * size * (1 + 1e-12)).all())
    return Check(
        what, float(error.max()), float(relative.max()), passed, f"ours {float(a[worst])!r}, wanted {float(b[worst])!r}"
    )
