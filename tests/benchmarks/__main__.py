"""`python -m tests.benchmarks [NAME ...]`: run, print a table beside the bounds, write one flat JSON object.

The file holds the measures' keys, `machine` and `commit`. Running some of the benchmarks replaces their keys and keeps
the others, if those are of the same machine. It is written whole, at the end, and only if nothing failed.
Exit codes: 0 all ran (a bound that is missed is shown, not an error), 1 a benchmark failed, 2 no such benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.machine import REPOSITORY, describe_commit, describe_machine, load_average
from tests.benchmarks.registry import BENCHMARKS, Benchmark, Measure, select

STDERR_LINES_SHOWN = 30


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen benchmarks one after another; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or keys to run; all by default")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "bench.json", help="file to write")
    options = parser.parse_args(arguments)
    try:
        chosen = select(options.names)
    except KeyError as error:
        parser.error(error.args[0])
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, benchmark in chosen.items():
        start = time.monotonic()
        sys.stderr.write(f"{name} ... load {load_average():.1f}\n")
        try:
            figures |= run_in_subprocess(name, benchmark.timeout_s)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[name] = _tail(error)
        sys.stderr.write(f"{name}: {time.monotonic() - start:.0f} s, load {load_average():.1f}\n")
    _print_table(chosen, figures)
    for name, tail in failed.items():
        sys.stderr.write(f"\n{name} failed:\n{tail}\n")
    if failed:
        sys.stderr.write(f"\nfailed: {', '.join(failed)}; {options.out} is as it was\n")
        return 1
    write(options.out, merged(_read(options.out), figures, describe_machine(), describe_commit()))
    return 0


def run_in_subprocess(name: str, timeout_s: float) -> dict[str, float]:
    """The numbers of one benchmark, measured in a fresh process.

    Raises subprocess.CalledProcessError or TimeoutExpired, stderr included.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.benchmarks.single", name, str(target)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=timeout_s)
        return json.loads(target.read_text())


def merged(old: Mapping[str, object], figures: Mapping[str, float], machine: str, commit: str) -> dict[str, object]:
    """What the file is to hold: the measures among `figures`, and the other ones of `old` from the same machine."""
    known = [measure.key for benchmark in BENCHMARKS.values() for measure in benchmark.measures]
    values: dict[str, object] = {**(old if old.get("machine") == machine else {}), **figures}
    return {**{key: values[key] for key in known if key in values}, "machine": machine, "commit": commit}


def write(target: Path, results: Mapping[str, object]) -> None:
    """Replace the file, whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    partial.replace(target)


def _read(target: Path) -> dict[str, object]:
    return json.loads(target.read_text()) if target.exists() else {}


def _print_table(chosen: Mapping[str, Benchmark], figures: Mapping[str, float]) -> None:
    measures = {measure.key: measure for benchmark in chosen.values() for measure in benchmark.measures}
    table = Table("measure", "value", "bound", "", title=f"{describe_commit()} on {describe_machine()}")
    for key, measure in measures.items():
        table.add_row(key, *_cells(measure, figures.get(key)))
    console = Console()
    console.print(table)
    raw = [f"{key} {value:.4g}" for key, value in figures.items() if key not in measures]
    console.print("raw figures: " + ", ".join(raw), highlight=False)


def _cells(measure: Measure, value: float | None) -> tuple[str, str, str]:
    if value is None:
        return "-", measure.bound, "failed"
    verdict = ("ok" if measure.holds(value) else "MISSED") if measure.bound else ""
    return f"{value:.3g} {measure.unit}", measure.bound, verdict


def _tail(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    text = error.stderr or ""
    lines = (text.decode(errors="replace") if isinstance(text, bytes) else text).splitlines()
    return "\n".join([str(error), *lines[-STDERR_LINES_SHOWN:]])


if __name__ == "__main__":
    sys.exit(main())
