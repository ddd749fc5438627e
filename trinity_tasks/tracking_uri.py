"""Where metrics go: which MLflow server or database. Owns the defaults and what is refused; opens nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from engines import plugins
from engines.errors import ConfigError
from trinity_tasks.tracked_values import mask_secrets

SCHEMES = frozenset({"http", "https", "databricks", "databricks-uc", "uc", "sqlite", "postgresql", "mysql", "mssql"})
"""Stores that MLflow brings itself; for others there are plug-ins."""


class MonitorLike(Protocol):
    """What is read of `trinity_tasks.config.MonitorConfig`."""

    @property
    def tracking_uri(self) -> str | None: ...
    @property
    def experiment(self) -> str | None: ...


def tracking_uri(monitor: MonitorLike, root_dir: str) -> str:
    """Where metrics go: the config's URI, else MLFLOW_TRACKING_URI, else a sqlite file in `root_dir`.

    `root_dir` on a remote store leaves the current folder for the sqlite file. Raises ConfigError for a file store, and
    for a scheme that MLflow does not know.
    """
    uri = monitor.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        root = urlsplit(root_dir)
        folder = root_dir if "://" not in root_dir else root.path if root.scheme in ("file", "local") else "."
        return f"sqlite:///{Path(folder).expanduser().resolve() / 'mlflow.db'}"
    if urlsplit(uri).scheme in ("", "file") and uri != "databricks":
        raise ConfigError(
            f"monitor.tracking_uri is {mask_secrets(uri)!r}: MLflow's file store cannot write a step atomically; "
            "use a server (http://host:5000) or a database (sqlite:////folder/mlflow.db)"
        )
    known = SCHEMES | plugins.installed("mlflow.tracking_store").keys()
    if (scheme := urlsplit(uri).scheme.partition("+")[0]) not in {*known, ""}:
        raise ConfigError(
            f"monitor.tracking_uri is {mask_secrets(uri)!r}; MLflow knows no {scheme}://, {plugins.hint(scheme, known)}"
        )
    return uri


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite database; artifacts lie beside it. None for anything else."""
    name = uri.removeprefix("sqlite:///").partition("?")[0]  # after it come the driver's options
    return None if name in (uri.partition("?")[0], "", ":memory:") else Path(name).absolute()
