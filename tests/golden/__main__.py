"""`python -m tests.golden DIR`: every case of every numeric golden file in DIR, evaluated with our functions.

One line for each file: its name, cases, largest absolute and relative error, and how many cases deviate by which of the
listed differences. Exit code 1 if a case exceeds its tolerance, or if anything cannot be evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.evaluate import evaluate_folder
from tests.golden.format import Unreadable


def main(arguments: list[str]) -> int:
    """The exit code."""
    if len(arguments) != 1:
        print("usage: python -m tests.golden DIR", file=sys.stderr)
        return 2
    try:
        reports = evaluate_folder(Path(arguments[0]))
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{'file':<32} cases  max_abs_error  max_rel_error")
    for report in reports:
        print(report.line)
        for failure in report.failures:
            print(f"    {failure}")
    evaluated = [report for report in reports if not report.skipped]
    failed = [report for report in evaluated if report.failures]
    num_cases, num_deviating = (sum(getattr(r, name) for r in evaluated) for name in ("num_cases", "num_deviating"))
    print(f"{len(evaluated)} files, {num_cases} cases, of which {num_deviating} deviate; {len(failed)} files failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
