"""The life of an explorer in a test."""

import asyncio

from trinity_tasks.explorer import Explorer


def explored(explorer: Explorer, num_steps: int) -> list[dict[str, float]]:
    """Metrics of so many steps; the explorer is closed, whatever happens."""

    async def steps() -> list[dict[str, float]]:
        return [await explorer.explore_step() for _ in range(num_steps)]

    try:
        return asyncio.run(steps())
    finally:
        explorer.close()
