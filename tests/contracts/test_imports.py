"""The walls between the packages: the import-linter contracts hold, and they notice when one is broken."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("engines", "trinity_tasks", "flows")
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in `root`, whatever else is installed."""
    command = [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)


def run_python(code: str, cwd: Path = REPO) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_contracts_hold() -> None:
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


FORBIDDEN = [
    ("engines", "import prefect", "engines see"),
    ("engines", "import fsspec", "engines see"),
    ("engines", "from trinity_tasks import config", "one way"),
    ("engines/algorithms", "import mlflow", "engines see"),
    ("trinity_tasks", "import torch", "no torch"),
    ("trinity_tasks", "import fsspec", "object storage"),
    ("trinity_tasks", "import botocore", "object storage"),
    ("trinity_tasks", "import mlflow", "door to mlflow"),
    ("trinity_tasks", "from prefect import task", "door to prefect"),
    ("trinity_tasks", "from flows import cli", "one way"),
    ("trinity_tasks", "from engines.hf import engine", "inside of one engine"),
    ("flows", "from transformers import AutoModel", "no torch"),
    ("flows", "def late():\n    import mlflow", "flows reach storage"),
]


def test_each_contract_is_broken_by_what_it_forbids(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    intruders = {
        f"{folder.replace('/', '.')}.intruder_{index}": contract
        for index, (folder, _, contract) in enumerate(FORBIDDEN)
    }
    for index, (folder, code, _) in enumerate(FORBIDDEN):
        (tmp_path / folder / f"intruder_{index}.py").write_text(code + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    details = done.stdout.lower().split("broken contracts", 1)[1]
    sections = re.split(r"\n(?=[^\n]+\n-{10,}\n)", details)
    for module, contract in intruders.items():
        (section,) = (part for part in sections if contract in part.lstrip().split("\n")[0])
        assert module in section, f"{module} did not break the contract {contract!r}:\n{section}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import flows", {"torch", "transformers", "mlflow"}),
        ("import trinity_tasks", {"torch", "transformers", "mlflow", "prefect"}),
        ("import engines", {"torch", "transformers"}),
        (
            "import engines.config, engines.base, engines.experience, engines.registry, engines.errors, "
            "engines.algorithms.spec, engines.algorithms.presets",
            {"torch", "transformers"},
        ),
        ("import trinity_tasks.config, trinity_tasks.storage", {"torch", "transformers", "mlflow", "prefect"}),
        ("import flows.cli", {"torch", "transformers", "mlflow", "prefect", "pandas", "pyarrow"}),
        ("import flows.experiences_page", {"torch", "transformers", "mlflow", "prefect"}),
        (
            "import flows.cli, flows.algorithms_page; from engines.algorithms.describe import listing; listing()",
            {"torch", "transformers", "mlflow", "prefect", "fsspec", "pyarrow", "numpy"},
        ),
    ],
)
def test_light_modules_stay_light(statement: str, absent: set[str]) -> None:
    loaded = run_python(f"{statement}\nimport sys; print(*sorted({absent!r} & set(sys.modules)))")
    assert loaded == "", f"`{statement}` also imports {loaded}"
