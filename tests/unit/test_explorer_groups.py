"""What an algorithm asks of the explorer beyond samples: groups that pass its filters, a baseline, an expert's rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engines.base import Completion
from engines.config import TokenizerConfig
from engines.errors import ConfigError, StarvedError
from engines.experience import Experience
from engines.text import build_tokenizer
from tests.exploring import explored
from tests.fake_engine import FakeSampler
from trinity_tasks.buffer.choose import strategy_for
from trinity_tasks.buffer.cursor import Cursor, Position
from trinity_tasks.config import Config
from trinity_tasks.config_source import parse_config
from trinity_tasks.explorer import ROUND_STRIDE, Explorer, derive_seed
from trinity_tasks.job import Job, job_store
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Task

TOKENIZER: Any = build_tokenizer(TokenizerConfig(kind="char"))
STOP: int = TOKENIZER.eos_token_id
GROUP, TASKS = 4, 3
WORDS = {"dataset": "spell_backward", "dataset_args": {"min_word_len": 3, "max_word_len": 4}}


def config(root: Path, algorithm: dict[str, Any], **buffer: Any) -> Config:
    explorer_input = {"taskset": WORDS | {"reward_fn": buffer.pop("reward_fn", "verifier_exact")}}
    return parse_config(
        {
            "checkpoint_root_dir": str(root),
            "model": {"model_path": "unused", "max_model_len": 70},
            "algorithm": {"repeat_times": GROUP} | algorithm,
            "buffer": {"batch_size": TASKS, "explorer_input": explorer_input | buffer.pop("explorer_input", {})}
            | buffer,
            "trainer": {"total_steps": 10},
        }
    )


class CountingSampler(FakeSampler):
    """Notes (n, temperature) of every call."""

    def __init__(self) -> None:
        super().__init__(np.zeros(8), STOP, len(TOKENIZER))
        self.calls: list[tuple[int, float]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        self.calls.append((n, temperature))
        return super().generate(prompts, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)


def explore(store: Storage, settings: Config, sampler: FakeSampler, num_steps: int = 1) -> list[dict[str, float]]:
    return explored(Explorer(settings, store, TOKENIZER, sampler), num_steps)


def batch(settings: Config, cursor: Cursor) -> tuple[list[Experience], Cursor]:
    """The next batch that a trainer of this config would take."""
    strategy = strategy_for(settings, job_store(settings))
    claim = strategy.claim(Position(cursor), 1)
    assert claim is not None
    return strategy.read(claim.ref), claim.after.cursor


# What a user may name as reward_fn: right for the second half of the tasks of a round only, by run or for all runs.


def varied_for_odd_tasks(task: Task, response: str) -> float:
    return float(len(response) > 1) if task.index % 2 else 0.0


def never_right(task: Task, response: str) -> float:
    del task, response
    return 0.0


FILTER = [{"name": "dynamic_sampling", "args": {"max_rounds": 8}}]


def test_a_step_samples_until_the_batch_holds_groups_that_vary(tmp_path: Path) -> None:
    settings = config(
        tmp_path, {"algorithm_type": "dapo", "filters": FILTER}, reward_fn=f"{__name__}:varied_for_odd_tasks"
    )
    sampler = CountingSampler()
    job = Job.open(settings)
    (metrics,) = explore(job.store, settings, sampler)
    job.close()
    rows, _ = batch(settings, Cursor.start())
    rewards = np.array([row.reward for row in rows]).reshape(TASKS, GROUP)
    assert (rewards.min(1) == 0).all()
    assert (rewards.max(1) == 1).all()
    numbers = [row.info["task_index"] for row in rows[::GROUP]]
    assert all(number % 2 for number in numbers)
    rounds = [number // ROUND_STRIDE for number in numbers]
    assert rounds == sorted(rounds)
    assert len({row.eid.uid for row in rows}) == TASKS * GROUP
    assert [row.eid.task for row in rows[::GROUP]] == [
        number % ROUND_STRIDE + number // ROUND_STRIDE * TASKS for number in numbers
    ]
    num_rounds = len(sampler.calls)
    assert num_rounds == rounds[-1] + 1 > 1
    assert {row.metrics["num_rounds"] for row in rows} == {num_rounds}
    assert {row.metrics["unused_share"] for row in rows} == {1 - 1 / num_rounds}
    assert metrics["explore/num_unused"] == (num_rounds - 1) * TASKS * GROUP


def test_a_step_with_refills_is_a_function_of_weights_step_and_seed(tmp_path: Path) -> None:
    content: list[dict[str, bytes]] = []
    for name, parts in (("one", [2]), ("other", [1, 1])):
        settings = config(
            tmp_path / name, {"algorithm_type": "dapo", "filters": FILTER}, reward_fn=f"{__name__}:varied_for_odd_tasks"
        )
        store = Storage(str(tmp_path / name))
        for num_steps in parts:
            explore(store, settings, CountingSampler(), num_steps)
        content.append({item.name: store.read_bytes(item.name) for item in store.list("experiences/main")})
    assert len(content[0]) == 2
    assert content[0] == content[1]


def test_an_explorer_that_finds_no_group_says_so_and_writes_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path, {"algorithm_type": "dapo", "filters": FILTER}, reward_fn=f"{__name__}:never_right")
    store, sampler = Storage(str(tmp_path)), CountingSampler()
    with pytest.raises(StarvedError, match=r"8 rounds of 3 tasks gave 0 groups that dynamic_sampling let through"):
        explore(store, settings, sampler)
    assert len(sampler.calls) == 8
    assert store.list("experiences/main") == []


@pytest.mark.parametrize("filters", [[], [{"name": "reward_std_filter"}], [{"name": "best_of_group"}]])
def test_only_filters_that_refill_act_in_the_explorer(tmp_path: Path, filters: list[Any]) -> None:
    settings = config(tmp_path, {"algorithm_type": "grpo", "filters": filters}, reward_fn=f"{__name__}:never_right")
    sampler = CountingSampler()
    (metrics,) = explore(Storage(str(tmp_path)), settings, sampler)
    assert sampler.calls == [(GROUP, 1.0)]
    assert (metrics["explore/num_rows"], metrics["explore/num_unused"]) == (TASKS * GROUP, 0)


def test_remax_rows_carry_the_reward_of_the_greedy_answer(tmp_path: Path) -> None:
    settings = config(tmp_path, {"algorithm_type": "remax"}, reward_fn=f"{__name__}:varied_for_odd_tasks")
    sampler = CountingSampler()
    job = Job.open(settings)
    explore(job.store, settings, sampler)
    job.close()
    assert sampler.calls == [(GROUP, 1.0), (1, 0.0)]
    rows, _ = batch(settings, Cursor.start())
    prompts = [row.tokens[: row.prompt_length].tolist() for row in rows[::GROUP]]
    seed = CountingSampler()
    greedy = seed.generate(prompts, n=1, max_tokens=70, temperature=0.0, seed=_seed_of(settings))
    expected = [
        float(len(answers[0].tokens) > 2) if row.info["task_index"] % 2 else 0.0
        for answers, row in zip(greedy, rows[::GROUP], strict=True)
    ]
    assert [row.info["reward_baseline"] for row in rows] == [value for value in expected for _ in range(GROUP)]


def _seed_of(settings: Config) -> int:
    return derive_seed(settings.seed, settings.explorer.name, 0)


def test_an_experts_rows_follow_the_sampled_ones_of_each_batch(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        {"algorithm_type": "mix"},
        explorer_input={"expert_taskset": WORDS | {"seed": 7}},
        trainer_input={"expert_data_ratio": 0.25},
    )
    assert (settings.expert_batch_size, settings.train_batch_size) == (4, 16)
    job = Job.open(settings)
    explore(job.store, settings, CountingSampler(), 2)
    job.close()
    seen: list[str] = []
    cursor = Cursor.start()
    for step in range(2):
        rows, cursor = batch(settings, cursor)
        sampled, experts = rows[: TASKS * GROUP], rows[TASKS * GROUP :]
        assert {row.eid.batch for row in sampled} == {step}
        assert not any(row.info.get("is_expert") for row in sampled)
        assert [(row.eid.batch, row.info["is_expert"], row.logprobs) for row in experts] == [
            (f"expert-{step}", True, None)
        ] * 4
        for row in experts:
            assert row.response_text == str(row.prompt_text).rpartition(": ")[2][::-1]
        seen += [row.eid.uid for row in rows]
    assert len(set(seen)) == 32
    assert cursor.to_json() == {"experts/explorer": [2, 0], "explorer": [2, 0]}


@pytest.mark.parametrize(
    ("algorithm", "explorer_input", "words"),
    [
        ({"algorithm_type": "dpo"}, {}, "dpo trains on pairs .* mode: train"),
        ({"algorithm_type": "mix"}, {}, "set buffer.explorer_input.expert_taskset"),
        ({"algorithm_type": "on_policy_distill"}, {}, "needs a teacher; set model.teacher_model_path"),
        ({"algorithm_type": "grpo"}, {"default_workflow_type": "demonstrate"}, "grpo needs rewards"),
        ({"algorithm_type": "sft"}, {}, "sft imitates .* sample gives it the model's own; set .*: demonstrate"),
        ({"algorithm_type": "grpo", "overlong_shaping": {"name": "overlong"}}, {}, "needs model.max_response_tokens"),
    ],
)
def test_what_the_explorer_cannot_give_is_refused_before_the_start(
    tmp_path: Path, algorithm: dict[str, Any], explorer_input: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, ValidationError), match=words):
        config(tmp_path, algorithm, explorer_input=explorer_input)


def test_shares_of_a_batch_are_counted(tmp_path: Path) -> None:
    experts = {"expert_taskset": WORDS}
    settings = config(tmp_path, {"algorithm_type": "mix"}, explorer_input=experts, train_batch_size=24)
    assert (settings.expert_batch_size, settings.train_batch_size) == (12, 24)
    with pytest.raises(ConfigError, match=r"train_batch_size = 25 less 13 of experts|whole groups"):
        config(
            tmp_path,
            {"algorithm_type": "mix"},
            explorer_input=experts,
            train_batch_size=25,
            trainer_input={"expert_data_ratio": 0.4},
        )
    with pytest.raises(ConfigError, match="have the same name, 'main'"):
        config(
            tmp_path,
            {"algorithm_type": "mix"},
            explorer_input=experts,
            trainer_input={"expert_buffer": {"name": "main"}},
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm_type": "grpo", "repeat_times": 1}, r"grpo compares the samples of a task.*repeat_times = 1"),
        ({"algorithm_type": "rloo", "repeat_times": 1}, "every advantage would be 0"),
    ],
)
def test_groups_of_one_are_refused_where_samples_are_compared(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, changes)
    assert config(tmp_path, {"algorithm_type": "remax", "repeat_times": 1}).group_size == 1


def test_a_warm_up_that_leaves_no_step_to_the_policy_is_refused(tmp_path: Path) -> None:
    raw = config(tmp_path, {"algorithm_type": "ppo"}).model_dump(exclude_unset=True)
    raw["trainer"] |= {"critic_warmup": 9}
    assert parse_config(raw).engine.critic_warmup == 9
    raw["trainer"] |= {"critic_warmup": 10}
    with pytest.raises(ConfigError, match="critic_warmup = 10 leaves none of 10 total_steps"):
        parse_config(raw)
