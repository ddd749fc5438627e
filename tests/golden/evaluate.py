"""From a folder of golden files to one report for each. Owns: which file is evaluated by what, and what is an error.

A file of a numeric group that nothing here knows, that cannot be read, or in which a case cannot be evaluated, is an
error: nothing passes in silence. Files of other groups are skipped, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engines.algorithms.presets import KINDS
from tests.golden.advantages import advantage
from tests.golden.checks import Verdict
from tests.golden.format import Case, Unreadable, read
from tests.golden.losses import policy_loss
from tests.golden.schedules import algorithm_defaults, algorithm_grpo_verl_quirk, chord_mu_schedule, lr_schedules
from tests.golden.terms import entropy, kl, utils_aggregate, verl_agg_loss, verl_value_loss

Evaluator = Callable[[Case], Verdict]

WHOLE_NAMES: dict[str, Evaluator] = {
    "utils_aggregate": utils_aggregate,
    "verl_agg_loss": verl_agg_loss,
    "verl_value_loss": verl_value_loss,
    "chord_mu_schedule": chord_mu_schedule,
    "lr_schedules": lr_schedules,
    "algorithm_defaults": algorithm_defaults,
    "algorithm_grpo_verl_quirk": algorithm_grpo_verl_quirk,
}
GROUPS: dict[str, tuple[Callable[[str, Case], Verdict], set[str]]] = {
    "policy_loss_": (policy_loss, set(KINDS["policy_loss_fn"][1])),
    "advantage_": (
        advantage,
        set(KINDS["advantage_fn"][1]) | {f"{name}_verl" for name in ("grpo", "opmd", "asymre")},
    ),
    "kl_": (kl, {"none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"}),
    "entropy_": (entropy, {"none", "default", "mix"}),
}
"""Beginning of a file's name -> what evaluates it, and what may follow."""
NUMERIC = (*GROUPS, "utils_", "verl_", "chord_", "lr_", "algorithm_")


@dataclass(slots=True)
class Report:
    """What one file came to."""

    file: str
    num_cases: int = 0
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    num_deviating: int = 0
    differences: set[int] = field(default_factory=set[int])
    failures: list[str] = field(default_factory=list[str])
    """Case and comparison, or why the file cannot be evaluated."""
    skipped: bool = False

    @property
    def line(self) -> str:
        """One line for the terminal."""
        if self.skipped:
            return f"{self.file:<32} skipped: not of a numeric group"
        numbers = f"{self.file:<32} {self.num_cases:>4} {self.max_abs_error:>9.1e} {self.max_rel_error:>9.1e}"
        listed = " ".join(f"#{number}" for number in sorted(self.differences))
        deviating = f"  deviates {self.num_deviating} ({listed})" if self.num_deviating else ""
        return f"{numbers}{deviating}{'  FAILED' if self.failures else ''}"


def evaluator_of(name: str) -> Evaluator | None:
    """None for a file of another group. Raises Unreadable for a numeric one that is not known."""
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    for prefix, (evaluate, known) in GROUPS.items():
        if name.startswith(prefix) and (rest := name.removeprefix(prefix)) in known:
            return lambda case: evaluate(rest, case)
    if name.startswith(NUMERIC):
        raise Unreadable(f"{name} is of a numeric group, but nothing here evaluates it")
    return None


def evaluate_file(path: Path) -> Report:
    """Evaluate every case of one file."""
    report = Report(path.stem)
    try:
        evaluator = evaluator_of(path.stem)
        report.skipped = evaluator is None
        cases = [] if evaluator is None else read(path)
    except Unreadable as error:
        report.failures.append(str(error))
        return report
    for case in cases:
        assert evaluator is not None
        report.num_cases += 1
        try:
            verdict = evaluator(case)
        except Exception as error:  # a case that cannot be evaluated has failed, and the others are wanted all the same
            report.failures.append(f"{case.name}: cannot be evaluated: {type(error).__name__}: {error}")
            continue
        _enter(report, case, verdict)
    return report


def _enter(report: Report, case: Case, verdict: Verdict) -> None:
    if not verdict.checks:
        report.failures.append(f"{case.name}: nothing was compared")
    for check in verdict.checks:
        report.max_abs_error = float(np.maximum(report.max_abs_error, check.abs_error))
        report.max_rel_error = float(np.maximum(report.max_rel_error, check.rel_error))
    for check in verdict.failures:
        report.failures.append(f"{case.name}: {check.what}: {check.shown}, off by {check.rel_error:.1e}")
    if verdict.differences:
        report.num_deviating += 1
        report.differences |= verdict.differences


def evaluate_folder(folder: Path) -> list[Report]:
    """One report for each file, by name. Raises Unreadable for a folder without a numeric file."""
    if not folder.is_dir():
        raise Unreadable(f"{folder} is no folder")
    reports = [evaluate_file(path) for path in sorted(folder.glob("*.json"))]
    if all(report.skipped for report in reports):
        raise Unreadable(f"{folder} has no numeric golden file, such as policy_loss_ppo.json")
    return reports
