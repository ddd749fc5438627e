"""The built wheel works by itself: installed into a clean environment, run from another folder."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.integration.small_job import small_config

REPO = Path(__file__).parents[2]
PACKAGES = ("engines", "trinity_tasks", "flows")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

IMPORT_ALL = """
import importlib, pathlib, sys
for package in ("engines", "trinity_tasks", "flows"):
    root = pathlib.Path(importlib.import_module(package).__file__).parent
    assert root.is_relative_to(sys.prefix), f"{package} comes from {root}, not from the wheel in {sys.prefix}"
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        if name not in OPTIONAL:
            importlib.import_module(name)
            print(name)
"""
OPTIONAL = {"engines.ray_fsdp"}  # needs the extra `ray`


def run(*command: str | Path, cwd: Path, **extra: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | extra
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPO, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a new environment with the wheel in it.

    Its dependencies are those of the environment that runs the tests, by a path file. Path files that lie there are not
    followed, so the editable checkout is out of sight.
    """
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    (site_packages,) = home.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops - {metadata} == set(PACKAGES)
    assert f"{metadata}/licenses/LICENSE" in names
    sources = {path.relative_to(REPO).as_posix() for package in PACKAGES for path in (REPO / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert not [name for name in names if name.endswith((".pyc", ".pkl", ".ipynb"))]


def test_every_module_imports_from_the_wheel(clean_bin: Path, tmp_path: Path) -> None:
    imported = run(clean_bin / "python", "-c", f"OPTIONAL = {OPTIONAL!r}\n{IMPORT_ALL}", cwd=tmp_path).split()
    assert {"engines.base", "engines.hf.engine", "trinity_tasks.trainer", "flows.cli"} <= set(imported)


def test_command_line_runs_from_another_folder(clean_bin: Path, tmp_path: Path) -> None:
    assert "finetune" in run(clean_bin / "trinity-flows", "--help", cwd=tmp_path)
    assert "--set" in run(clean_bin / "trinity-flows", "finetune", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wheel_trains_and_verifies_a_job_in_another_folder(clean_bin: Path, tmp_path: Path) -> None:
    config = small_config("runs", "trainer.total_steps=2", "trainer.save_interval=2")
    (tmp_path / "small.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    command = clean_bin / "trinity-flows"
    trained = run(command, "train", "-c", "small.yaml", cwd=tmp_path, PREFECT_HOME=str(tmp_path / "prefect"))
    assert "step 2 of 2" in trained
    assert sorted(path.name for path in (tmp_path / "runs/tests/small/commits").iterdir()) == ["00000001.json"]
    run(command, "verify", "runs/tests/small", cwd=tmp_path)
