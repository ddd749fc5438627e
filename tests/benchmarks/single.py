"""Run one benchmark in this process and write its numbers as JSON: `python -m tests.benchmarks.single NAME FILE`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.registry import BENCHMARKS


def main() -> None:
    """Call the function of benchmark argv[1]; its dict goes to file argv[2]."""
    name, target = sys.argv[1], Path(sys.argv[2])
    module, function = BENCHMARKS[name].function.split(":")
    run: Callable[[], dict[str, float]] = getattr(importlib.import_module(module), function)
    target.write_text(json.dumps(run()))


if __name__ == "__main__":
    main()
