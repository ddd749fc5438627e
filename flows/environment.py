"""Defaults of the embedded servers, set before Prefect or MLflow is imported. What the user has set wins.

The values are those that cost least by measurement: the embedded Prefect server writes task runs in batches (a fifth of
the processor time). Nothing phones home.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from importlib import import_module

COMMAND_STARTED: float | None = None
"""`time.monotonic` when the command line was started; None where a flow was started otherwise."""

DEFAULTS = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    # Nobody watches the events of a server that ends with its command, and no automation could act on them.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
    # "Finished in state Completed()" for every task run: the task run says that itself.
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    # A line per task run on the console would drown the progress display; the Prefect UI still gets all of them.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def set_defaults() -> None:
    """Fill in what the user has not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect 3.9 on pydantic 2.14 says so at every import; nothing that a user could act on.
    warnings.filterwarnings("ignore", message="The 'alias' attribute with value")
    # The command itself says in one line how a run ended; Prefect would print a traceback before it, foreseen or not.
    for runs in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(runs).propagate = False
    for worker in ("EventsWorker", "APILogWorker"):  # warn at the end of a short run of what they are about to send
        logging.getLogger(worker).setLevel(logging.ERROR)
    # A heartbeat that comes while the command ends finds Prefect's sender stopped; it says so with a traceback.
    logging.getLogger("prefect.events.utilities").addFilter(lambda record: "heartbeat" not in record.getMessage())


def preload(*modules: str) -> threading.Thread:
    """Import slow modules in the background, while the embedded server starts.

    Join it before anything uses them: transformers fills itself lazily, and a second thread may find it half filled.
    """

    def load() -> None:
        for module in modules:
            import_module(module)

    thread = threading.Thread(target=load, name="preload", daemon=True)
    thread.start()
    return thread
