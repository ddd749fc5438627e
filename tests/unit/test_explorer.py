"""The explorer: a step is a function of (weights, step, seed), a shard that exists is kept, rows have identities."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Completion
from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.experience import Experience
from engines.text import build_tokenizer
from tests.experience_rows import FifoReader
from tests.exploring import explored
from tests.fake_engine import FakeSampler
from trinity_tasks.buffer.cursor import Cursor
from trinity_tasks.config import Config
from trinity_tasks.config_source import parse_config
from trinity_tasks.explorer import Explorer, derive_seed
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Task

TOKENIZER: Any = build_tokenizer(TokenizerConfig(kind="char"))
STOP: int = TOKENIZER.eos_token_id
GROUP, TASKS = 4, 3


def config(**changes: Any) -> Config:
    raw: dict[str, Any] = {
        "seed": changes.pop("seed", 42),
        "model": {"model_path": "unused", "max_model_len": 70} | changes.pop("model", {}),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": GROUP} | changes.pop("algorithm", {}),
        "buffer": {
            "batch_size": TASKS,
            "explorer_input": {
                "taskset": {"dataset": "spell_backward", "dataset_args": {"min_word_len": 3, "max_word_len": 4}}
                | changes.pop("taskset", {})
            }
            | changes.pop("explorer_input", {}),
        },
        "trainer": {"total_steps": 10},
        "explorer": changes,
    }
    return parse_config(raw)


def demonstrations(**changes: Any) -> Config:
    fields: dict[str, Any] = {
        "algorithm": {"algorithm_type": "sft", "repeat_times": 1},
        "explorer_input": {"default_workflow_type": "demonstrate"},
    }
    return config(**fields | changes)


def sampler(seed: int = 0, version: int = 0) -> FakeSampler:
    made = FakeSampler(np.random.default_rng(seed).standard_normal(8), STOP, len(TOKENIZER))
    made.version = version
    return made


def explore(
    store: Storage, num_steps: int, settings: Config | None = None, sampler: Any = None
) -> list[dict[str, float]]:
    """Steps of one explorer; its metrics."""
    return explored(Explorer(settings or config(), store, TOKENIZER, sampler), num_steps)


def rows(store: Storage, num_rows: int) -> list[Experience]:
    """The first rows of the buffer."""
    reader = FifoReader(store)
    claimed = reader.claim(Cursor.start(), num_rows)
    assert claimed is not None
    return reader.read(claimed[0])


def shards(store: Storage) -> dict[str, bytes]:
    return {item.name: store.read_bytes(item.name) for item in store.list("experiences/main")}


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "job"))


# What a user may name as reward_fn.


def unscored(task: Task, response: str) -> float | None:
    del task, response
    return None


def broken(task: Task, response: str) -> float | None:
    del response
    return float("nan") if task.index == 4 else 0.5


# -- what a row is ----------------------------------------------------------------------------------------------------


def test_a_sampled_row_is_what_was_sampled(store: Storage) -> None:
    (metrics,) = explore(store, 1, sampler=sampler(version=7))
    found = rows(store, TASKS * GROUP)
    again = sampler().generate(
        [row.tokens[: row.prompt_length].tolist() for row in found[::GROUP]],
        n=GROUP,
        max_tokens=16,
        temperature=1.0,
        seed=derive_seed(42, "explorer", 0),
    )
    completions = [completion for group in again for completion in group]
    for row, completion in zip(found, completions, strict=True):
        assert row.tokens[row.prompt_length :].tolist() == completion.tokens.tolist()
        assert row.logprobs is not None
        assert row.logprobs.tolist() == completion.logprobs.tolist()
        assert row.action_mask is not None
        assert row.action_mask.all()
        assert row.response_text == TOKENIZER.decode(completion.tokens[:-1])
        assert row.model_version == 7
        assert row.reward == 0.0
        assert row.truncate_status is None
    assert metrics["explore/model_version"] == 7.0
    assert metrics["explore/num_tokens"] == sum(len(completion.tokens) for completion in completions)


def test_tasks_follow_each_other_over_the_steps(store: Storage) -> None:
    explore(store, 3, sampler=sampler())
    found = rows(store, 3 * TASKS * GROUP)
    assert [row.info["task_index"] for row in found] == [task for task in range(9) for _ in range(GROUP)]
    assert [row.eid.batch for row in found] == [step for step in range(3) for _ in range(TASKS * GROUP)]


def test_every_row_has_an_identity_of_its_own_and_groups_share_a_task(store: Storage) -> None:
    explore(store, 4, sampler=sampler())
    found = rows(store, 4 * TASKS * GROUP)
    assert len({row.eid.uid for row in found}) == len(found)
    assert len({row.eid.suffix for row in found}) > 40
    groups: dict[str, set[str | None]] = {}
    for row in found:
        groups.setdefault(row.eid.tid, set()).add(row.prompt_text)
    assert len(groups) == 4 * TASKS
    assert all(len(prompts) == 1 for prompts in groups.values())


def test_a_response_that_was_cut_says_so(store: Storage) -> None:
    class Endless(FakeSampler):
        def generate(
            self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
        ) -> list[list[Completion]]:
            cut = Completion(np.full(max_tokens, 60, np.int32), np.full(max_tokens, -1.0, np.float32), "length")
            return [[cut] * n for _ in prompts]

    endless = Endless(np.zeros(8), STOP, len(TOKENIZER))
    (metrics,) = explore(store, 1, config(model={"max_response_tokens": 6}), endless)
    found = rows(store, TASKS * GROUP)
    assert {(row.truncate_status, row.response_length) for row in found} == {("response_truncated", 6)}
    assert metrics["explore/truncated_share"] == 1.0


def test_a_demonstration_is_the_tasks_own_answer(store: Storage) -> None:
    (metrics,) = explore(store, 1, demonstrations())
    found = rows(store, TASKS)
    for row in found:
        word = str(row.prompt_text).rpartition(": ")[2]
        assert row.response_text == word[::-1]
        response = row.tokens[row.prompt_length :].tolist()
        assert (TOKENIZER.decode(response[:-1]), response[-1]) == (word[::-1], STOP)
        assert (row.logprobs, row.reward, row.info["is_expert"]) == (None, None, True)
    assert metrics == {"explore/num_rows": 3.0}


def test_sampled_rewards_reach_rows_and_metrics(store: Storage) -> None:
    class Speller(FakeSampler):
        """Spells right in every second sample."""

        def generate(
            self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
        ) -> list[list[Completion]]:
            return [[self._spelt(prompt, sample % 2 == 0) for sample in range(n)] for prompt in prompts]

        def _spelt(self, prompt: Sequence[int], right: bool) -> Completion:
            word = TOKENIZER.decode(prompt, skip_special_tokens=True).rpartition(": ")[2]
            answer = TOKENIZER.encode(word[::-1] if right else f"{word}x", add_special_tokens=False)
            return Completion(np.asarray([*answer, STOP], np.int32), np.full(len(answer) + 1, -1.0, np.float32), "stop")

    (metrics,) = explore(store, 1, sampler=Speller(np.zeros(8), STOP, len(TOKENIZER)))
    assert [row.reward for row in rows(store, TASKS * GROUP)] == [1.0, 0.0] * (TASKS * GROUP // 2)
    assert metrics["explore/reward_mean"] == 0.5
    assert metrics["explore/num_unscored"] == 0.0


# -- a pure function of (weights, step, seed) -------------------------------------------------------------------------


def test_equal_weights_step_and_seed_give_equal_bytes(store: Storage) -> None:
    explore(store.child("one"), 3, sampler=sampler())
    explore(store.child("other"), 3, sampler=sampler())
    assert shards(store.child("one")) == shards(store.child("other"))
    assert len(shards(store.child("one"))) == 3


def test_a_step_does_not_depend_on_who_did_the_ones_before(store: Storage) -> None:
    explore(store.child("whole"), 4, sampler=sampler())
    for _ in range(4):
        explore(store.child("parts"), 1, sampler=sampler())
    assert shards(store.child("whole")) == shards(store.child("parts"))


@pytest.mark.parametrize("changed", ["weights", "seed", "name", "task seed"])
def test_other_weights_or_seeds_give_other_rows(store: Storage, changed: str) -> None:
    explore(store.child("one"), 1, sampler=sampler())
    changes: dict[str, dict[str, Any]] = {
        "seed": {"seed": 7},
        "name": {"name": "b"},
        "task seed": {"taskset": {"seed": 7}},
    }
    other = config(**changes.get(changed, {}))
    explore(store.child("other"), 1, other, sampler(seed=int(changed == "weights")))

    def content(name: str) -> list[list[int]]:
        return [row.tokens.tolist() for row in rows(store.child(name), TASKS * GROUP)]

    assert content("one") != content("other")


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(42, "explorer", 0) == 0x13D5113A56BDCC97
    assert len({derive_seed(42, "explorer", step) for step in range(1000)}) == 1000
    assert all(0 <= derive_seed(step) < 2**63 for step in range(1000))


def test_a_shard_that_exists_is_kept_and_the_next_step_follows_it(store: Storage) -> None:
    explore(store, 2, sampler=sampler())
    before = shards(store)
    explorer = Explorer(config(), store, TOKENIZER, sampler(seed=1))
    assert explorer.num_steps == 2
    asyncio.run(explorer.explore_step())
    explorer.close()
    after = shards(store)
    assert {name: after[name] for name in before} == before
    assert len(after) == 3
    assert [row.eid.batch for row in rows(store, 3 * TASKS * GROUP)][-1] == 2


def test_a_shard_that_another_process_wrote_meanwhile_is_kept(store: Storage) -> None:
    slow = Explorer(config(), store, TOKENIZER, sampler(seed=1))
    explore(store, 1, sampler=sampler(seed=0))
    before = shards(store)
    asyncio.run(slow.explore_step())
    slow.close()
    assert shards(store) == before
    assert slow.num_steps == 1


def test_an_ended_explorer_leaves_a_buffer_with_an_end(store: Storage) -> None:
    explorer = Explorer(config(), store, TOKENIZER, sampler())
    asyncio.run(explorer.explore_step())
    explorer.end()
    explorer.close()
    reader = FifoReader(store)
    assert not reader.availability(Cursor.start(), TASKS * GROUP).ended
    assert reader.availability(Cursor.start(), TASKS * GROUP + 1).ended


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_bad_reward_names_the_task_and_writes_nothing(store: Storage) -> None:
    broken_config = config(taskset={"reward_fn": f"{__name__}:broken"})
    explore(store, 1, broken_config, sampler())
    with pytest.raises(DataError, match=r"broken gave nan for task 4 \('Spell this word backward"):
        explore(store, 1, broken_config, sampler())
    assert len(shards(store)) == 1


def test_a_prompt_that_is_too_long_is_refused(store: Storage) -> None:
    with pytest.raises(DataError, match="tokens"):
        explore(store, 1, config(model={"max_model_len": 30}), sampler())
    assert shards(store) == {}


def test_a_question_that_the_tokenizer_cannot_write_is_refused(store: Storage) -> None:
    tokenizer: Any = build_tokenizer(TokenizerConfig(kind="char", alphabet="abc"))
    explorer = Explorer(config(), store, tokenizer, sampler())
    with pytest.raises(DataError, match=r"no token for .*add it to model\.tokenizer\.alphabet"):
        asyncio.run(explorer.explore_step())
    explorer.close()


def test_an_unknown_reward_is_refused_before_the_first_step(store: Storage) -> None:
    with pytest.raises(ConfigError, match="did you mean verifier_exact"):
        explore(store, 0, config(taskset={"reward_fn": "verifier_exakt"}), sampler())
