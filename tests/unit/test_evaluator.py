"""The evaluator: what accuracy means, that a result is kept and never measured twice, and what it is a function of."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Completion
from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.text import build_tokenizer, encode_prompt
from trinity_tasks.config import Config
from trinity_tasks.evaluator import Evaluation, Evaluator, read_evaluation, read_evaluations
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Task

TOKENIZER: Any = build_tokenizer(TokenizerConfig(kind="char"))
STOP: int = TOKENIZER.eos_token_id
SPELLING = {"dataset": "spell_backward", "dataset_args": {"min_word_len": 3, "max_word_len": 4}}


class Speller:
    """Answers the first `right` samples of each prompt correctly and the others with the word itself; counts calls."""

    version = 0

    def __init__(self, right: int) -> None:
        self.right = right
        self.calls: list[dict[str, Any]] = []

    def load(self, version: int, weights: Any) -> None:
        raise AssertionError("an evaluation loads no weights")

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        self.calls.append({"prompts": prompts, "n": n, "temperature": temperature, "seed": seed})
        return [[self._answer(prompt, sample < self.right) for sample in range(n)] for prompt in prompts]

    def _answer(self, prompt: Sequence[int], right: bool) -> Completion:
        word = TOKENIZER.decode(prompt, skip_special_tokens=True).rpartition(": ")[2]
        text = word[::-1] if right else word + "x"
        ids = np.asarray([*TOKENIZER.encode(text, add_special_tokens=False), STOP], np.int32)
        return Completion(ids, np.full(len(ids), -1.0, np.float32), "stop")


def evaluator(store: Storage, sampler: Any, *tasksets: dict[str, Any], seed: int = 42, **model: Any) -> Evaluator:
    config = Config.model_validate(
        {
            "mode": "train",
            "seed": seed,
            "model": {"model_path": "unused", "max_model_len": 64} | model,
            "buffer": {"explorer_input": {"eval_tasksets": tasksets}},
        }
    )
    return Evaluator(config, store, TOKENIZER, sampler)


def measure(evaluator: Evaluator, step: int = 0) -> list[Evaluation]:
    try:
        return asyncio.run(evaluator.evaluate(step))
    finally:
        evaluator.close()


def spelling(**changes: Any) -> dict[str, Any]:
    return {**SPELLING, "name": "held_out", "split": "held_out", "num_tasks": 6, "repeat_times": 4} | changes


# What a user may name as reward_fn.


def only_short_words(task: Task, response: str) -> float | None:
    """Scores words of three letters; leaves the others unscored."""
    return float(response == task.answer) if len(task.answer) == 3 else None


def none_at_all(task: Task, response: str) -> float | None:
    del task, response
    return None


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "job"))


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_accuracy_is_the_share_of_right_samples(store: Storage, right: int) -> None:
    (result,) = measure(evaluator(store, Speller(right), spelling()))
    assert (result.accuracy, result.num_tasks, result.num_samples, result.num_unscored) == (right / 4, 6, 24, 0)


def test_it_measures_held_out_tasks_at_the_models_temperature(store: Storage) -> None:
    sampler = Speller(1)
    measure(evaluator(store, sampler, spelling(), temperature=0.7))
    (call,) = sampler.calls
    assert (call["n"], call["temperature"], len(call["prompts"])) == (4, 0.7, 6)
    assert len({tuple(prompt) for prompt in call["prompts"]}) == 6


def test_mean_length_counts_the_end_of_the_turn(store: Storage) -> None:
    taskset = spelling(dataset_args={"min_word_len": 3, "max_word_len": 3}, repeat_times=2)
    (result,) = measure(evaluator(store, Speller(1), taskset))
    assert result.mean_response_tokens == (4 + 5) / 2


def test_samples_show_the_first_answer_to_the_first_tasks(store: Storage) -> None:
    (result,) = measure(evaluator(store, Speller(1), spelling(num_tasks=20)))
    assert len(result.samples) == 8
    for sample in result.samples:
        assert sample["response"] == sample["prompt"].rpartition(": ")[2][::-1]
        assert sample["reward"] == 1.0


def test_unscored_samples_are_left_out_and_counted(store: Storage) -> None:
    taskset = spelling(num_tasks=40, reward_fn=f"{__name__}:only_short_words")
    (result,) = measure(evaluator(store, Speller(3), taskset))
    assert 0 < result.num_unscored < 160
    assert result.num_unscored % 4 == 0
    assert result.accuracy == 0.75


def test_no_score_at_all_is_an_error(store: Storage) -> None:
    with pytest.raises(DataError, match=r"task set held_out: reward .*:none_at_all scored none of 24 samples"):
        measure(evaluator(store, Speller(3), spelling(reward_fn=f"{__name__}:none_at_all")))
    assert read_evaluations(store) == []


def test_a_result_is_found_again_and_not_measured_twice(store: Storage) -> None:
    (first,) = measure(evaluator(store, Speller(1), spelling()), step=5)
    again = Speller(4)
    assert measure(evaluator(store, again, spelling()), step=5) == [first]
    assert again.calls == []
    assert read_evaluation(store, "held_out", 5) == first
    assert read_evaluation(store, "held_out", 6) is None


def test_one_name_is_one_way_of_measuring(store: Storage) -> None:
    measure(evaluator(store, Speller(1), spelling()), step=5)
    with pytest.raises(ConfigError, match="task set held_out was measured in another way before") as caught:
        evaluator(store, Speller(1), spelling(num_tasks=7), temperature=0.5)
    assert "  num_tasks: 6 -> 7" in str(caught.value).splitlines()
    assert "  temperature: 1.0 -> 0.5" in str(caught.value).splitlines()
    (other,) = measure(evaluator(store, Speller(1), spelling(num_tasks=7, name="seven")), step=5)
    assert other.num_tasks == 7


def test_a_result_written_meanwhile_by_another_process_wins(store: Storage) -> None:
    class Overtaken(Speller):
        def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
            (self.theirs,) = measure(evaluator(store, Speller(4), spelling()), step=5)
            return super().generate(*args, **kwargs)

    sampler = Overtaken(1)
    (result,) = measure(evaluator(store, sampler, spelling()), step=5)
    assert result == sampler.theirs == read_evaluation(store, "held_out", 5)
    assert result.accuracy == 1.0


def test_each_step_and_task_set_is_an_object_of_its_own(store: Storage) -> None:
    tasksets = spelling(), spelling(name="other", num_tasks=3)
    for step in (0, 10):
        measure(evaluator(store, Speller(step // 5), *tasksets), step=step)
    kept = [(item.taskset, item.step, item.accuracy) for item in read_evaluations(store)]
    assert kept == [("held_out", 0, 0.0), ("held_out", 10, 0.5), ("other", 0, 0.0), ("other", 10, 0.5)]
    stored: Any = store.read_json("evaluations/other/step_00000010.json")
    assert stored["num_samples"] == 12


def test_seeds_depend_on_the_task_set_alone(store: Storage) -> None:
    def seeds(name: str, **changes: Any) -> list[int]:
        sampler = Speller(1)
        job_seed = changes.pop("job_seed", 42)
        measure(evaluator(store.child(name), sampler, spelling(num_tasks=300, **changes), seed=job_seed))
        return [call["seed"] for call in sampler.calls]

    first = seeds("first")
    assert len(first) == len(set(first)) == 2
    assert seeds("again", job_seed=7) == first
    assert not set(seeds("other", seed=43)) & set(first)


def test_many_tasks_are_sampled_in_batches_in_order(store: Storage) -> None:
    sampler = Speller(1)
    (result,) = measure(evaluator(store, sampler, spelling(num_tasks=600)))
    assert [len(call["prompts"]) for call in sampler.calls] == [256, 256, 88]
    assert (result.num_tasks, result.num_samples) == (600, 2400)


def test_a_file_of_tasks_is_measured_once_through(store: Storage, tmp_path: Path) -> None:
    questions = [{"question": f"backward: {word}", "answer": word[::-1]} for word in ("sun", "moon", "star")]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(question) for question in questions))
    taskset = {"name": "file", "source": "jsonl", "dataset": str(path), "held_out_share": 0.0, "repeat_times": 2}
    sampler = Speller(1)
    (result,) = measure(evaluator(store, sampler, taskset))
    assert (result.num_tasks, result.num_samples, result.accuracy) == (3, 6, 0.5)
    expected = [encode_prompt(TOKENIZER, [{"role": "user", "content": item["question"]}]) for item in questions]
    assert sampler.calls[0]["prompts"] == expected


def test_a_wrong_task_set_is_refused_before_anything_is_measured(store: Storage) -> None:
    with pytest.raises(ConfigError, match="did you mean spell_backward"):
        evaluator(store, Speller(1), spelling(dataset="spell_backwards"))
