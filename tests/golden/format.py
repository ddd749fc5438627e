"""Reads golden files: {source, function, note, torch, cases: [{name, init_args, inputs, outputs, ...}]}.

Owns: what a file must look like. Non-finite numbers are the strings "nan", "inf" and "-inf". Does not own: what the
numbers mean (`losses`, `advantages`, `terms`, `schedules`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Unreadable(ValueError):
    """A file or a case is not what this format says."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a function of the reference system."""

    name: str
    init_args: dict[str, Any]
    inputs: Any
    outputs: Any
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else the case has: a seed, the reference of a pair."""

    @property
    def error(self) -> str | None:
        """What the function raised, if it did."""
        return self.outputs.get("error") if isinstance(self.outputs, dict) else None


def read(path: Path) -> list[Case]:
    """The cases of one file. Raises Unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path.name} cannot be read: {error}") from error
    cases = content.get("cases") if isinstance(content, dict) else None
    if not isinstance(cases, list) or not cases:
        raise Unreadable(f"{path.name} has no list `cases` with at least one case")
    return [_case(path, index, case) for index, case in enumerate(cases)]


def _case(path: Path, index: int, case: Any) -> Case:
    if not isinstance(case, dict) or not isinstance(case.get("name"), str) or "outputs" not in case:
        raise Unreadable(f"{path.name}: case {index} has no name, or no outputs")
    known = {"name", "init_args", "inputs", "outputs"}
    extra = {key: value for key, value in case.items() if key not in known}
    return Case(case["name"], case.get("init_args") or {}, case.get("inputs"), case["outputs"], extra)


def floats(values: Any) -> Floats:
    """A float64 array of these numbers, which may be strings. Raises Unreadable."""
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError) as error:
        raise Unreadable(f"not an array of numbers: {str(values)[:80]}") from error


def padded(inputs: dict[str, Any], key: str) -> Floats:
    """[B, T] of this key. Raises Unreadable if it is not there."""
    if inputs.get(key) is None:
        raise Unreadable(f"inputs have no {key}")
    return floats(inputs[key]).reshape(len(inputs[key]), -1)


def mask_of(inputs: dict[str, Any]) -> Bools:
    """[B, T] which tokens train. Raises Unreadable if it is not there."""
    for key in ("action_mask", "response_mask", "loss_mask", "mask"):
        if inputs.get(key) is not None:
            return padded(inputs, key).astype(np.bool_)
    raise Unreadable("inputs have no mask")


def known_args(case: Case, known: set[str]) -> dict[str, Any]:
    """The case's init_args. Raises Unreadable for one that is not known."""
    if unknown := case.init_args.keys() - known:
        raise Unreadable(f"init_args {sorted(unknown)} are not known; known: {sorted(known)}")
    return dict(case.init_args)
