"""`python -m tests.benchmarks [NAME ...] [--out build/bench.json]`: run, print a table, write one flat JSON object.

Exit codes: 0 all ran (a bound that is missed is shown, not an error), 1 a benchmark failed, 2 no such benchmark.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.machine import REPOSITORY, describe_commit, describe_machine, load_average
from tests.benchmarks.registry import Benchmark, Measure, select

STDERR_LINES_SHOWN = 30


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen benchmarks one after another; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or keys to run; all by default")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="the same")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "bench.json", help="file to write")
    options = parser.parse_args(arguments)
    try:
        chosen = select([*options.names, *options.only])
    except KeyError as error:
        parser.error(error.args[0])
    results: dict[str, object] = {
        "machine": describe_machine(),
        "commit": describe_commit(),
        "load_average_at_start": load_average(),
    }
    failed: dict[str, str] = {}
    for name, benchmark in chosen.items():
        start = time.monotonic()
        sys.stderr.write(f"{name} ...\n")
        try:
            results |= run_in_subprocess(name, benchmark.timeout_s)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[name] = _tail(error)
        sys.stderr.write(f"{name}: {time.monotonic() - start:.0f} s\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    _print_table(chosen, results)
    for name, tail in failed.items():
        sys.stderr.write(f"\n{name} failed:\n{tail}\n")
    return 1 if failed else 0


def run_in_subprocess(name: str, timeout_s: float) -> dict[str, float]:
    """The numbers of one benchmark, measured in a fresh process.

    Raises subprocess.CalledProcessError or TimeoutExpired, stderr included.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.benchmarks.single", name, str(target)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=timeout_s)
        return json.loads(target.read_text())


def _print_table(chosen: dict[str, Benchmark], results: dict[str, object]) -> None:
    table = Table("measure", "value", "bound", "", title=f"{results['commit']} on {results['machine']}")
    for measure in (measure for benchmark in chosen.values() for measure in benchmark.measures):
        table.add_row(measure.key, *_cells(measure, results.get(measure.key)))
    Console().print(table)


def _cells(measure: Measure, value: object) -> tuple[str, str, str]:
    if not isinstance(value, int | float):
        return "-", measure.bound, "failed"
    verdict = ("ok" if measure.holds(value) else "MISSED") if measure.bound else ""
    return f"{value:.3g} {measure.unit}", measure.bound, verdict


def _tail(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    text = error.stderr or ""
    lines = (text.decode(errors="replace") if isinstance(text, bytes) else text).splitlines()
    return "\n".join([str(error), *lines[-STDERR_LINES_SHOWN:]])


if __name__ == "__main__":
    sys.exit(main())
