"""Fixtures of the integration tests: folders in which whole jobs run in a second."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to make."""
    from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def job_root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for jobs, MLflow's tables in it; what cannot be delivered is kept in the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(empty_database, root / "mlflow.db")
    return root
