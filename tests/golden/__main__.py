"""`python -m tests.golden DIR`: every case of every numeric golden file in DIR, evaluated with our functions.

One line for each file: its name, cases, largest absolute and relative error, and how many cases deviate by which of the
listed differences. Exit code 1 if a case exceeds its tolerance, or if anything cannot be evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.evaluate import evaluate_folder
from tests.golden.format import Unreadable

DIFFERENCES = {
    1: "one denominator for an update, not means of micro-batches",
    2: "DPO: a sigmoid for each pair, not one for the batch",
    3: "SAPO is differentiated through its gate",
    4: "rows without an action token do not count, and no epsilon is added to a denominator",
    5: "GAE and REINFORCE++ skip masked positions",
    6: "the advantage of a group of one is 0",
    7: "works, or is refused before the start, where that system crashes",
    8: "presets are complete, and a partial override changes what it names",
    9: "mix and CHORD: each component has its own denominator",
    10: "step-wise GRPO takes the step with the largest number",
    11: "the rank penalty applies throughout",
    12: "every metric declares its reduction",
    13: "corrected k3: a documented choice of gradient",
}


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
    if num_deviating:
        print("deviates: wanted differences, by number; ours is then that of an independent derivation:")
        for number in sorted({number for report in evaluated for number in report.differences}):
            print(f"    #{number} {DIFFERENCES[number]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
