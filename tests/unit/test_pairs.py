"""Preference pairs through the engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from engines.errors import DataError
from engines.experience import Experience
from engines.hf.engine import HfEngine
from tests.tiny_llama import engine_config

PAIRS = [
    Experience(tokens=np.array([7, 8, 9]), chosen=np.array([10, 11, 12]), rejected=np.array([13, 14])),
    Experience(tokens=np.array([17]), chosen=np.array([18]), rejected=np.array([19, 20, 21, 22])),
]


def steps(pairs: list[Experience], num_steps: int = 1) -> list[dict[str, float]]:
    async def run() -> list[dict[str, float]]:
        engine = HfEngine(engine_config({"algorithm_type": "dpo", "kl_loss_fn": "none"}))
        await engine.prepare()
        try:
            return [await engine.train_step(pairs) for _ in range(num_steps)]
        finally:
            await engine.shutdown()

    return asyncio.run(run())


def test_first_loss_is_that_of_a_coin_and_then_it_falls() -> None:
    first, second = steps(PAIRS, 2)
    assert first["loss/policy"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert second["loss/policy"] < math.log(2) - 0.01
    assert second["dpo/margin"] > 0.01


@pytest.mark.parametrize("empty", ["chosen", "rejected"])
def test_an_empty_response_is_refused(empty: str) -> None:
    responses: dict[str, Any] = {"chosen": np.array([10]), "rejected": np.array([11])}
    responses[empty] = np.array([], np.int32)
    pair = Experience(tokens=np.array([7, 8]), **responses)
    with pytest.raises(DataError, match=f"{pair.eid.uid}: a response of the pair is empty"):
        steps([*PAIRS, pair])
