"""HfEngine with algorithms that need other rows than sampled ones: pairs, a teacher's logprobs, rows of experts."""

import math

import pytest

from engines.experience import EID
from engines.hf.engine import HfEngine
from tests.tiny_llama import engine_config, experience, groups
from tests.unit.test_hf_engine import after_one_step, with_engine


def test_pairs_train_a_preference() -> None:
    """Responses of several tokens: the preferred one becomes the likelier."""
    rows = [
        experience(tokens=[5, 6, 7], chosen=[20 + task, 21, 22], rejected=[40 + task, 41], eid=EID(0, task))
        for task in range(4)
    ]

    async def scenario(engine: HfEngine) -> list[dict[str, float]]:
        return [await engine.train_step(rows) for _ in range(5)]

    history = with_engine(engine_config({"algorithm_type": "dpo"}), scenario)
    assert history[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-6)
    assert history[-1]["dpo/accuracy"] == 1
    assert history[-1]["dpo/margin"] > 0.1


def test_a_teachers_logprobs_in_the_rows_are_compared_to_the_samplers() -> None:
    """A = teacher - old, and the old logprobs are the sampler's: loss = -mean(A r)."""
    rows = groups(0, num_groups=1, group_size=1)
    assert rows[0].logprobs is not None
    rows[0].teacher_logprobs = rows[0].logprobs - 0.5
    metrics, _ = after_one_step(engine_config({"algorithm_type": "on_policy_distill"}), rows)
    assert metrics["kl/teacher"] == pytest.approx(0.5, rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx(0.5 * metrics["policy/ratio_mean"], rel=0.1)


def test_the_kl_penalty_is_measured_on_sampled_rows_alone() -> None:
    rows = groups(0, num_groups=2)
    algorithm = {"algorithm_type": "mix", "kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}}
    alone, _ = after_one_step(engine_config(algorithm), rows)
    expert = experience(tokens=[5, 6, 7, 8], prompt_length=1, eid=EID(0, 0, 9), info={"is_expert": True})
    mixed, _ = after_one_step(engine_config(algorithm), [*rows, expert])
    assert mixed["kl/penalty"] == pytest.approx(alone["kl/penalty"], rel=1e-5)
