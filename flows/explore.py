"""The flow `explore`: write experiences for a trainer that runs elsewhere."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from flows.progress import Progress
from flows.signals import stop_on_signals
from trinity_tasks.config import Config
from trinity_tasks.standalone import StandaloneExplorer
from trinity_tasks.tasks import explore_step, forgotten


@flow(name="explore", flow_run_name="{config.name}", persist_result=False)
async def explore(config: Config) -> dict[str, Any] | State[Any]:
    """Sample tasks with the newest published weights and write one shard per step, until trainer.total_steps.

    Run it again to go on after the last shard. The last step leaves a marker that no more will come.

    Args:
        config: The job, as its trainer has it.
    """
    explorer = StandaloneExplorer(config)
    num_steps = 0
    try:
        with stop_on_signals(explorer.request_stop), Progress(config.name, config.trainer.total_steps) as progress:
            await explorer.prepare()
            while not explorer.finished and not explorer.stop_requested:
                metrics = await forgotten(explore_step, explorer)
                num_steps += 1
                progress.update(explorer.num_steps, metrics)
            if not explorer.finished:
                return Cancelled(message=f"{config.name}: stopped after {num_steps} steps; run it again to go on")
            explorer.end()
    finally:
        await explorer.shutdown()
    return {"name": config.name, "num_steps": num_steps}
