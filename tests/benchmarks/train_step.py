"""The train step against TRL's GRPO optimisation step: same weights, sequences, rewards, optimizer and threads.

All sides run in turns in one run. Each side's ratio is taken at its best precision, float32 or bfloat16; both are
reported. A processor without bfloat16 instructions runs float32 alone: it emulates the other, many times slower. TRL
runs without its default gradient checkpointing: with it, one sample took an eighth more processor time and a ninth less
memory. That all do the same work is checked before anything is reported: number of trained tokens, loss and gradient
norm of the first step.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks import machine, workload
from tests.benchmarks.pairs import Side, Worker, interleave, median_ratio

NUM_THREADS = 2
LOSS_TOLERANCE = 1e-3
"""TRL divides by std + 1e-4, we by std + 1e-6; bfloat16 adds its own rounding to the gradient norm."""
GRADIENT_TOLERANCE = 2e-2

WHO = ("trl", "ours")
SIDES = {
    "trl_float32": ("tests.benchmarks.trl_worker", {"dtype": "float32", "gradient_checkpointing": False}),
    "ours_float32": ("tests.benchmarks.engine_worker", {"dtype": "float32"}),
}
BFLOAT16_SIDES = {
    "trl_bfloat16": ("tests.benchmarks.trl_worker", {"dtype": "bfloat16", "gradient_checkpointing": False}),
    "ours_bfloat16": ("tests.benchmarks.engine_worker", {"dtype": "bfloat16"}),
}


def heavy_tailed() -> dict[str, float]:
    """35.7M parameters, 16 sequences of 50 to 500 tokens: speed and memory."""
    measured = _measure(workload.LARGE, workload.LENGTHS_LARGE, pairs=3)
    return _figures("train_step", measured) | {
        "train_step_vs_trl": _speed_ratio(measured),
        "train_step_memory_vs_trl": _best(measured, "ours").growth_mb / _best(measured, "trl").growth_mb,
    }


def uniform() -> dict[str, float]:
    """35.7M parameters, 16 sequences of 135 tokens: nothing to gain from less padding."""
    measured = _measure(workload.LARGE, workload.LENGTHS_UNIFORM, pairs=3)
    return _figures("train_step_uniform", measured) | {"train_step_vs_trl_uniform": _speed_ratio(measured)}


def tiny() -> dict[str, float]:
    """0.87M parameters, 64 sequences of 50 to 500 tokens."""
    measured = _measure(workload.TINY, workload.LENGTHS_TINY, pairs=7)
    return _figures("train_step_tiny", measured) | {"train_step_vs_trl_tiny": _speed_ratio(measured)}


def _measure(model: dict[str, Any], lengths: list[int], pairs: int) -> dict[str, Side]:
    sides = SIDES | (BFLOAT16_SIDES if machine.has_bfloat16() else {})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        workload.write_workload(Path(name), model, lengths)
        workers = {
            side: stack.enter_context(Worker(module, spec | {"folder": name, "num_threads": NUM_THREADS}, NUM_THREADS))
            for side, (module, spec) in sides.items()
        }
        measured = interleave(workers, pairs)
    _check_same_work(measured, sum(length - workload.PROMPT_TOKENS for length in lengths))
    return measured


def _check_same_work(measured: dict[str, Side], num_response_tokens: int) -> None:
    reference = measured["trl_float32"].first
    for name, side in measured.items():
        same = (
            side.first["num_trained_tokens"] == num_response_tokens
            and math.isclose(side.first["loss"], reference["loss"], rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE)
            and math.isclose(side.first["grad_norm"], reference["grad_norm"], rel_tol=GRADIENT_TOLERANCE)
        )
        if not same:
            raise AssertionError(f"{name} does not do TRL's work: {side.first}, TRL in float32: {reference}")


def _best(measured: dict[str, Side], who: str) -> Side:
    return min((side for name, side in measured.items() if name.startswith(who)), key=lambda side: side.median_s)


def _speed_ratio(measured: dict[str, Side]) -> float:
    return median_ratio(_best(measured, "trl").wall_s, _best(measured, "ours").wall_s)


def _figures(prefix: str, measured: dict[str, Side]) -> dict[str, float]:
    """The raw figures: those of the best precisions, then all."""
    best = {who: _best(measured, who) for who in WHO}
    figures: dict[str, float] = {}
    for name, side in (best | measured).items():
        figures[f"{prefix}_{name}_s"] = side.median_s
        figures[f"{prefix}_{name}_cpu_s"] = side.median_cpu_s
        figures[f"{prefix}_{name}_growth_mb"] = side.growth_mb
    for name, side in measured.items():
        figures[f"{prefix}_{name}_loss"] = side.first["loss"]
        figures[f"{prefix}_{name}_grad_norm"] = side.first["grad_norm"]
    return figures
