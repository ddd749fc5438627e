"""What a user waits for: `import flows` costs next to nothing beside Prefect, `--help` and `algorithms` answer at once.

Other work on the machine only ever adds time, so the smallest of a few fresh processes is the measurement; the loop
stops at the first that meets the limit.
"""

import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).parents[2]
TRIES = 10

TIME_IMPORT = """
import time
import prefect
start = time.perf_counter()
import flows
print(time.perf_counter() - start)
"""


def best_of(measure, limit_s: float) -> float:
    """Smallest of at most TRIES measurements, seconds."""
    best = float("inf")
    for _ in range(TRIES):
        best = min(best, measure())
        if best < limit_s:
            break
    return best


def import_flows_s() -> float:
    done = subprocess.run([sys.executable, "-c", TIME_IMPORT], cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def command_s(argument: str, *words: str) -> float:
    """How long `trinity-flows ARGUMENT` takes to print all of these words."""
    start = time.perf_counter()
    command = [str(Path(sys.executable).with_name("trinity-flows")), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
    return time.perf_counter() - start


def help_s() -> float:
    commands = ("finetune", "train", "explore", "evaluate", "compare", "show", "verify", "ledger")
    return command_s("--help", *commands, "experiences", "algorithms")


def algorithms_s() -> float:
    return command_s("algorithms", "grpo", "dpo", "arXiv:2402.03300")


def test_import_flows_adds_little_to_import_prefect() -> None:
    assert best_of(import_flows_s, 0.3) < 0.3


def test_help_answers_in_under_a_second() -> None:
    assert best_of(help_s, 1.0) < 1.0


def test_algorithms_are_listed_in_under_a_second_and_a_half() -> None:
    assert best_of(algorithms_s, 1.5) < 1.5
