"""Fixtures of the integration tests: folders in which whole jobs run in a second."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prefect_server import prefect_server, using_prefect


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


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prefect server, which takes a quarter of a minute to start on a fresh database."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="module")
def api(prefect_api: str) -> Iterator[str]:
    """The same, while flows of the module use it."""
    with using_prefect(prefect_api):
        yield prefect_api
