"""Task sets: which task has which number, that the splits share no question, and what a bad source is told."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError, DataError
from trinity_tasks.buffer_config import TasksetConfig
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Taskset, build_taskset

SHORT: dict[str, Any] = {"min_word_len": 3, "max_word_len": 4}


def words(**changes: Any) -> TasksetConfig:
    return TasksetConfig(**{"dataset": "spell_backward", "dataset_args": SHORT} | changes)


def lines(tmp_path: Path, *entries: Any, **changes: Any) -> TasksetConfig:
    """A JSONL file of these entries; text is written as it is."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return TasksetConfig(**{"source": "jsonl", "dataset": str(path), "held_out_share": 0.0} | changes)


def question(number: int) -> dict[str, Any]:
    return {"question": f"{number} + 1 = ?", "answer": number + 1}


def test_a_task_asks_and_can_be_verified() -> None:
    task = build_taskset(words())[0]
    word = task.question.rpartition(": ")[2]
    assert 3 <= len(word) <= 4
    assert task.answer == word[::-1]
    assert list(task.messages) == [{"role": "user", "content": task.question}]
    assert task.verifier is not None
    assert task.verifier(word[::-1], task.entry) == 1.0
    assert task.verifier(word[::-1] + "x", task.entry) < 1.0


def test_system_prompt_comes_before_every_question() -> None:
    task = build_taskset(words(system_prompt="Answer only."))[3]
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[0]["content"] == "Answer only."


def test_the_splits_share_no_question() -> None:
    train, held_out = build_taskset(words()), build_taskset(words(split="held_out", num_tasks=200))
    measured = {held_out[index].question for index in range(200)}
    assert len(measured) == 200
    assert not measured & {train[index].question for index in range(3000)}


def test_the_splits_divide_all_questions_at_the_stated_share(tmp_path: Path) -> None:
    entries = [question(number) for number in range(2000)]
    asked: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        taskset = build_taskset(lines(tmp_path, *entries, split=split, held_out_share=0.25))
        asked[split] = {taskset[index].question for index in range(taskset.num_tasks or 0)}
    assert len(asked["train"]) + len(asked["held_out"]) == 2000
    assert not asked["train"] & asked["held_out"]
    assert 420 < len(asked["held_out"]) < 580  # 500 expected, deviation 19


def test_a_question_is_in_the_same_split_whatever_the_seed() -> None:
    held_out = build_taskset(words(split="held_out", seed=7, num_tasks=100))
    train = build_taskset(words(seed=42))
    measured = {held_out[index].question for index in range(100)}
    assert not measured & {train[index].question for index in range(2000)}


def test_tasks_are_a_function_of_number_and_seed() -> None:
    first, second, other = build_taskset(words()), build_taskset(words()), build_taskset(words(seed=43))
    backwards = [second[index].question for index in reversed(range(50))]
    assert [first[index].question for index in range(50)] == backwards[::-1]
    assert [other[index].question for index in range(50)] != backwards[::-1]


def test_tasks_are_the_same_in_another_process() -> None:
    program = """
from tests.unit.test_tasksets import words
from trinity_tasks.tasksets import build_taskset
print([build_taskset(words())[index].question for index in range(5)])
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", program]
    there = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=60).stdout
    assert there.strip() == str([build_taskset(words())[index].question for index in range(5)])


def test_batches_follow_each_other() -> None:
    taskset = build_taskset(words())
    batches = [task.index for step in range(3) for task in taskset.batch(step, 4)]
    assert batches == list(range(12))


def test_a_finite_set_has_distinct_questions_and_starts_again() -> None:
    taskset = build_taskset(words(num_tasks=40))
    assert taskset.num_tasks == 40
    assert len({taskset[index].question for index in range(40)}) == 40
    assert taskset[41].question == taskset[1].question
    assert taskset[41].index == 41


def test_a_set_without_end_has_no_number_of_tasks() -> None:
    assert build_taskset(words()).num_tasks is None


def test_unknown_dataset_did_you_mean() -> None:
    with pytest.raises(
        ConfigError, match=r"'spell_backwards' is not one of reasoning-gym's; did you mean spell_backward\?"
    ):
        build_taskset(words(dataset="spell_backwards"))


def test_a_name_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"dataset 'qqqq' is not one of reasoning-gym's; known: ab, .* and \d+ more"):
        build_taskset(words(dataset="qqqq"))


@pytest.mark.parametrize(
    ("args", "reason"),
    [({"min_words": 3}, "min_words"), ({"min_word_len": 5, "max_word_len": 4}, "max_word_len")],
    ids=["unknown argument", "bad value"],
)
def test_arguments_that_do_not_fit_the_dataset(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset_args .* do not fit reasoning-gym's spell_backward: .*{reason}"):
        build_taskset(words(dataset_args=args))


def test_more_tasks_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"num_tasks is 500, but spell_backward has only \d+ distinct questions"):
        build_taskset(words(dataset_args={"min_word_len": 3, "max_word_len": 3}, split="held_out", num_tasks=500))


def test_an_empty_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task set sums is empty: none of 2 entries .*held_out_share 0\.0"):
        build_taskset(lines(tmp_path, question(1), question(2), name="sums", split="held_out"))


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task set sums is empty"):
        build_taskset(lines(tmp_path, "", name="sums"))


def test_lines_are_tasks_in_order_and_blank_lines_are_none(tmp_path: Path) -> None:
    taskset = build_taskset(lines(tmp_path, question(1), "", question(2)))
    assert [taskset[index].question for index in range(2)] == ["1 + 1 = ?", "2 + 1 = ?"]
    task = taskset[1]
    assert task.answer == "3"
    assert task.verifier is not None
    assert (task.verifier(" 3\n", task.entry), task.verifier("33", task.entry)) == (1.0, 0.0)


def test_a_question_given_twice_is_one_task(tmp_path: Path) -> None:
    assert build_taskset(lines(tmp_path, question(1), question(2), question(1))).num_tasks == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "1 + 1', "is not JSON"),
        ('{"question": "1 + 1"}', "needs the keys question and answer"),
        ("[1, 2]", "needs the keys question and answer"),
        ('{"question": null, "answer": "2"}', "question is null; it must be text or a number"),
        ('{"question": "1 + 1", "answer": ["2"]}', "answer is .*; it must be text or a number"),
    ],
    ids=["cut off", "no answer", "not an object", "null", "list"],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"tasks\.jsonl, line 3.*{reason}"):
        build_taskset(lines(tmp_path, question(1), "", line))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task set sums: there is no file .*gone\.jsonl; check dataset"):
        build_taskset(TasksetConfig(name="sums", source="jsonl", dataset=str(tmp_path / "gone.jsonl")))


@pytest.mark.parametrize("dataset", ["", "folder/"])
def test_a_dataset_that_names_no_file(dataset: str) -> None:
    with pytest.raises(ConfigError, match=f"task set sums: dataset is '{dataset}'; with source: jsonl it is the path"):
        build_taskset(TasksetConfig(name="sums", source="jsonl", dataset=dataset))


def test_a_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lines(tmp_path, question(1))
    monkeypatch.chdir(tmp_path)
    assert build_taskset(config.model_copy(update={"dataset": "tasks.jsonl"})).num_tasks == 1


def test_a_byte_order_mark_and_other_line_separators_are_no_lines(tmp_path: Path) -> None:
    config = lines(
        tmp_path, "\ufeff" + json.dumps({"question": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False), question(2)
    )
    taskset = build_taskset(config)
    assert [taskset[index].question for index in range(taskset.num_tasks or 0)] == ["a\u2028b\x85c", "2 + 1 = ?"]


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match=r"tasks\.jsonl is not UTF-8 text"):
        build_taskset(TasksetConfig(source="jsonl", dataset=str(path)))


def test_lines_from_any_store(store_url: str) -> None:
    Storage(store_url).write("tasks.jsonl", json.dumps(question(1)).encode())
    taskset = build_taskset(TasksetConfig(source="jsonl", dataset=f"{store_url}/tasks.jsonl", held_out_share=0.0))
    assert taskset[0].question == "1 + 1 = ?"


def test_draws_that_are_all_of_the_other_split() -> None:
    class OneQuestion:
        num_entries: int | None = None

        def entry(self, index: int) -> Mapping[str, Any]:
            return {"question": "always the same", "answer": index}

        def verifier(self, answer: str, entry: Mapping[str, Any]) -> float:
            return float(answer == entry["answer"])

    # The one question is of one split, whichever that is.
    held_out = hashlib.sha256(b"always the same").digest()[0] < 128
    empty = TasksetConfig(name="one", held_out_share=0.5, split="train" if held_out else "held_out")
    full = TasksetConfig(name="one", held_out_share=0.5, split="held_out" if held_out else "train")
    assert Taskset(full, OneQuestion())[0].answer == "0"
    with pytest.raises(ConfigError, match=r"10000 draws .*task 0 .*held_out_share 0\.5 leaves none for split"):
        Taskset(empty, OneQuestion())[0]
