"""A flow in a process of its own, on a given Prefect server. Imports Prefect only there, after it knows the server."""

from __future__ import annotations

import asyncio
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.integration.kill_target import context
from trinity_tasks.config import Config


def start_flow(name: str, config: Config, api: str, out: Path) -> Any:
    """The process; `out` then holds the flow's last state and result."""
    process = context.Process(target=_run, args=(name, config.model_dump(mode="json"), api, str(out)))
    process.start()
    return process


def _run(name: str, config: dict[str, Any], api: str, out: str) -> None:
    os.environ["PREFECT_API_URL"] = api
    from flows.environment import set_defaults

    set_defaults()

    async def session() -> dict[str, Any]:
        state = await getattr(import_module(f"flows.{name}"), name)(Config.model_validate(config), return_state=True)
        return {"state": state.name, "result": await state.aresult()}

    Path(out).write_text(json.dumps(asyncio.run(session())))
