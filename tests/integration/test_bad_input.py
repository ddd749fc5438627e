"""Models, tasks, rewards, experiences and config files as users get them wrong.

Each is refused before anything is trained, by a message that names the thing and says what to do; and the same job runs
as soon as the input is corrected, because nothing half-made is in its way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.config import ModelConfig
from engines.errors import ConfigError, DataError, EngineError, TrinityFlowsError
from engines.experience import EID, Experience
from engines.hf import model as hf_model
from tests.integration.small_job import small_config, train
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.config import Config
from trinity_tasks.config_source import load_config
from trinity_tasks.inspection import describe, verify
from trinity_tasks.job import Job, job_store, job_url

pytestmark = pytest.mark.integration

QUICK = (
    "trainer.total_steps=1",
    "trainer.save_interval=1",
    "explorer.eval_on_startup=false",
    "buffer.explorer_input.eval_tasksets=[]",
)
TASKSET = "buffer.explorer_input.taskset"


def refused(root: Path, kind: type[Exception], *overrides: str) -> str:
    """The message with which the job ends; nothing was made, nobody holds it, and a corrected config may have it."""
    with pytest.raises(kind) as caught:
        train(small_config(root, *QUICK, *overrides))
    corrected = small_config(root, *QUICK)
    made = {info.name.split("/")[0] for info in job_store(corrected).list(recursive=True)}
    assert made == {"job.json", "lease"}
    Job.open(corrected).close()
    return str(caught.value)


def assert_runs(config: Config) -> None:
    train(config)
    assert describe(job_url(config)).step == 1
    assert verify(job_url(config)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.model_path=/nowhere", "model.architecture=null", "model.tokenizer=null"),
        ("model.tokenizer.phrases=[]",),
        (f"{TASKSET}.dataset=spell_backwards",),
        (f"{TASKSET}.reward_fn=tests.bad_rewards:forgotten",),
    ],
)
def test_a_corrected_job_runs_under_the_same_name(job_root: Path, overrides: tuple[str, ...]) -> None:
    refused(job_root, TrinityFlowsError, *overrides)
    config = small_config(job_root, *QUICK)
    assert_runs(config)
    fields = [change["field"] for change in describe(job_url(config)).changes]
    assert overrides[0].split("=")[0] in fields  # recorded
    with pytest.raises(ConfigError, match="the job was started with another config"):  # from now on it is bound
        train(small_config(job_root, *QUICK, *overrides))


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder of the small model, with its tokenizer."""
    config = small_config("unused").model
    folder = tmp_path_factory.mktemp("model") / "model"
    hf_model.save(hf_model.load(config, None, seed=1), folder)
    return folder


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


def from_folder(path: Path | str) -> tuple[str, ...]:
    return (f"model.model_path={path}", "model.architecture=null", "model.tokenizer=null")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def test_a_good_folder_trains(job_root: Path, folder: Path) -> None:
    assert_runs(small_config(job_root, *QUICK, *from_folder(folder)))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/model", "/nowhere/model: no such folder; give an HF folder or its URL"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B: no such folder"),
        ("memory://nowhere/model", "memory://nowhere/model: no config.json there; give the URL of an HF folder"),
    ],
)
def test_a_missing_model_is_named(job_root: Path, path: str, words: str) -> None:
    assert words in refused(job_root, ConfigError, *from_folder(path))


@pytest.mark.parametrize("key", ["teacher_model_path", "critic_model_path"])
def test_another_model_that_is_missing_is_named_by_its_own_key(job_root: Path, key: str) -> None:
    said = refused(job_root, ConfigError, f"model.{key}=/nowhere")
    assert said.startswith(f"model.{key} /nowhere: no such folder")


@pytest.mark.parametrize(
    ("spoilt", "how", "kind", "words"),
    [
        (
            "config.json",
            Path.unlink,
            ConfigError,
            "it has no config.json, so it is not an HF model folder",
        ),
        ("config.json", lambda file: file.write_text("{nope"), ConfigError, "config.json cannot be read"),
        ("config.json", lambda file: file.write_text('{"model_type": "lama"}'), ConfigError, "model type `lama`"),
        ("model.safetensors", Path.unlink, EngineError, "no file named model.safetensors"),
        ("model.safetensors", cut, EngineError, "cannot be loaded: Error while deserializing header"),
        ("model.safetensors", flip_header, EngineError, "the folder is damaged or incomplete"),
        ("tokenizer.json", lambda file: file.write_text("{}"), ConfigError, "has no tokenizer that can be read"),
        ("tokenizer.json", lambda file: file.write_text("{nope"), ConfigError, "put its files beside config.json"),
        (
            "chat_template.jinja",
            Path.unlink,
            ConfigError,
            "no chat template, so no task can be asked; put one into the",
        ),
        (
            "chat_template.jinja",
            lambda file: file.write_text("{{ messages"),
            ConfigError,
            "chat template cannot render",
        ),
        (
            "chat_template.jinja",
            lambda file: file.write_text("{{ raise_exception('no') }}"),
            ConfigError,
            "'Spell this",
        ),
    ],
)
def test_a_spoilt_model_folder_is_named(
    job_root: Path, folder: Path, spoilt: str, how: Callable[[Path], Any], kind: type[Exception], words: str
) -> None:
    how(folder / spoilt)
    message = refused(job_root, kind, *from_folder(folder))
    assert words in message
    assert str(folder) in message or spoilt == "chat_template.jinja"


def test_the_tokenizer_of_a_larger_vocabulary_is_refused(job_root: Path, folder: Path, tmp_path: Path) -> None:
    raw = small_config("unused").model.model_dump()
    other = hf_model.load(ModelConfig.model_validate({**raw, "tokenizer": {"kind": "byte"}}), None, seed=1)
    other.tokenizer.save_pretrained(folder)
    message = refused(job_root, ConfigError, *from_folder(folder))
    assert f"{folder}: the tokenizer has ids up to 260, the embedding only 102 rows" in message


def test_an_embedding_larger_than_the_tokenizer_trains(job_root: Path) -> None:
    """Many models pad it; ids that no token has may be sampled, and are no reason to stop."""
    assert_runs(small_config(job_root, *QUICK, "model.architecture.vocab_size=400"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.architecture.vocab_size=50", "the tokenizer has ids up to 101, the embedding only 50 rows"),
        ("model.architecture.max_position_embeddings=16", "model.max_model_len = 32 is more than the 16 positions"),
        (
            "model.architecture.hiden_size=16",
            "model.architecture.hiden_size is not a key of llama; did you mean hidden_size",
        ),
        (
            "model.architecture.model_type=lama",
            "model.architecture.model_type = 'lama' is not known; did you mean llama",
        ),
        ("model.architecture.num_attention_heads=3", "model.architecture"),
        (
            "model.architecture={model_type: llama, hidden_size: 16, num_attention_heads: 2, num_key_value_heads: 3}",
            "LlamaForCausalLM cannot compute with this architecture: The size of tensor a",
        ),
    ],
)
def test_an_impossible_architecture_is_named(job_root: Path, override: str, words: str) -> None:
    assert words in refused(job_root, ConfigError, override)


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.tokenizer.phrases=[]"], "54 tokens, and model.max_prompt_tokens (None) with model.max_model_len (32)"),
        (["model.max_prompt_tokens=4"], "7 tokens, and model.max_prompt_tokens (4) with model.max_model_len (32)"),
        (["model.max_model_len=7", "model.max_response_tokens=1"], "its prompt has 7 tokens"),
        (["model.tokenizer.alphabet=abc"], "no token for "),
    ],
)  # fmt: skip
def test_a_prompt_that_the_model_cannot_take_names_its_task(job_root: Path, overrides: list[str], words: str) -> None:
    message = refused(job_root, DataError, *overrides)
    assert words in message
    assert "Spell this word backward" in message


def test_one_token_of_room_is_enough(job_root: Path) -> None:
    assert_runs(small_config(job_root, *QUICK, "model.max_model_len=8", "model.max_response_tokens=7"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataset=spell_backwards"], "'spell_backwards' is not one of reasoning-gym's; did you mean spell_backward?"),
        (["dataset_args={min_word_len: 9, max_word_len: 3}"], "max_word_len must be >= min_word_len"),
        (["dataset_args={min_wordlen: 3}"], "{'min_wordlen': 3} do not fit reasoning-gym's spell_backward"),
        (["num_tasks=50", "held_out_share=0", "split=held_out"], "task set taskset is empty"),
        (["held_out_share=0", "split=held_out"], "held_out_share 0.0"),
        (["dataset=''"], "dataset"),
        (["source=jsonl", "dataset=/nowhere/tasks.jsonl"], "there is no file /nowhere/tasks.jsonl"),
        (["reward_fn=verifer"], "'verifer' is neither known nor a module:function; did you mean verifier?"),
        (["reward_fn=tests.bad_rewards:gone"], "tests.bad_rewards:gone) cannot be imported"),
        (["reward_fn=tests.bad_rewards:not_a_function"], "it is a int, not a function of (task, response)"),
    ],
)  # fmt: skip
def test_an_impossible_task_set_is_named(job_root: Path, overrides: list[str], words: str) -> None:
    assert words in refused(job_root, ConfigError, *(f"{TASKSET}.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", ConfigError, "is empty"),
        (b'{"question": "a", "answer": "b"}\n{"question', DataError, "line 2 is not JSON"),
        (b'{"q": "a", "answer": "b"}', DataError, "line 1: a task needs the keys question and answer"),
        (b'{"question": "caf\xe9", "answer": "b"}', DataError, "not UTF-8"),
    ],
)
def test_a_bad_task_file_is_named(
    job_root: Path, tmp_path: Path, content: bytes, kind: type[Exception], words: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    overrides = (f"{TASKSET}.source=jsonl", f"{TASKSET}.dataset={file}", f"{TASKSET}.dataset_args={{}}")
    message = refused(job_root, kind, *overrides)
    assert words in message
    assert str(file) in message


# -- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "given"),
    [
        ("nan", "nan"),
        ("infinite", "inf"),
        ("forgotten", "None"),
        ("sometimes_forgotten", "None"),
        ("text", "'0.5'"),
        ("pair", "(1.0, 'why')"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_before_it_is_written(job_root: Path, reward: str, given: str) -> None:
    message = refused(job_root, DataError, f"{TASKSET}.reward_fn=tests.bad_rewards:{reward}")
    assert f"reward tests.bad_rewards:{reward} gave {given} for task 0 ('Spell this word backward" in message
    assert "this algorithm needs a number" in message


@pytest.mark.parametrize(
    ("reward", "what", "line"),
    [("raises", "KeyError: 'gold'", 36), ("leaves", "SystemExit: 0", 40)],
)
def test_an_error_inside_a_reward_function_names_its_place(job_root: Path, reward: str, what: str, line: int) -> None:
    message = refused(job_root, DataError, f"{TASKSET}.reward_fn=tests.bad_rewards:{reward}")
    assert f"reward tests.bad_rewards:{reward} failed with {what} (bad_rewards.py, line {line}, in {reward})" in message
    assert "scoring task 0 ('Spell this word backward" in message


# -- a file of tasks --------------------------------------------------------------------------------------------------


def test_a_file_of_tasks_that_changes_is_another_experiment(job_root: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [f'{{"question": "Say {word}", "answer": "{word}"}}' for word in ("one", "two", "six", "ten")]
    tasks = f"{{source: jsonl, dataset: {file}, held_out_share: 0}}"
    config = small_config(job_root, *QUICK, f"{TASKSET}={tasks}")
    file.write_text("\n".join([*lines, '{"question": " ", "answer": "?"}']))
    with pytest.raises(DataError, match="line 5: the question is empty"):
        train(config)
    file.write_text("\n".join(lines))  # nothing had been made: it may be corrected
    assert_runs(config)
    file.write_text("\n".join(lines[:3]))
    longer = small_config(job_root, *QUICK, f"{TASKSET}={tasks}", "trainer.total_steps=2")
    with pytest.raises(ConfigError, match=r"taskset has changed since the job began \(sha256 \w{64} -> \w{64}\)"):
        train(longer)
    assert describe(job_url(config)).step == 1
    file.write_text("\n".join(lines))
    train(longer)
    assert describe(job_url(config)).step == 2


# -- experiences of another program -----------------------------------------------------------------------------------


def rows(**changes: Any) -> list[Experience]:
    """A batch of the small job."""
    return [
        Experience(
            **{
                "tokens": np.array([1, 20, 21, 30, 4]),
                "prompt_length": 3,
                "logprobs": np.array([-1.0, -2.0]),
                "reward": float(run % 2),
                "eid": EID(batch=0, task=task, run=run, suffix=f"{task}{run}"),
            }
            | changes
        )
        for task in range(4)
        for run in range(4)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokens": np.array([1, 20, 21, 102, 4])},
            "0/0/0/0/00: token id 102 is outside the vocabulary of 102",
        ),
        (
            {"tokens": np.full(33, 9), "prompt_length": 31},
            "33 tokens (31 of prompt) are more than model.max_model_len",
        ),
        ({"logprobs": None}, "experience 0/0/0/0/00 has no logprobs"),
        ({"reward": None}, "experience 0/0/0/0/00 has no reward"),
    ],
)
def test_rows_that_the_model_or_algorithm_cannot_take_are_named_and_change_nothing(
    job_root: Path, changes: dict[str, Any], words: str
) -> None:
    config = small_config(job_root, *QUICK, "mode=train", f"{TASKSET}=null")
    store = job_store(config)
    ExperienceWriter(store, "main", "agent").write(rows(**changes))
    with pytest.raises(DataError) as caught:
        train(config)
    assert words in str(caught.value)
    assert store.list("commits") == []
    # The rows are replaced, and the step is let choose anew.
    for name in ("experiences/main/agent-00000000.parquet", "ledger/step_00000001.json"):
        store.remove(name)
    ExperienceWriter(store, "main", "agent").write(rows())
    assert_runs(config)


# -- config files -----------------------------------------------------------------------------------------------------

GOOD_FILE = """
mode: train
model: {architecture: {model_type: llama}, tokenizer: {kind: char}}
trainer: {total_steps: 10}
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("trainr: {total_steps: 3}", "trainr: unknown key; did you mean trainer?"),
        ("buffer: {explorer_input: {eval_tasksets: [{datset: a}]}}", "datset: unknown key; did you mean dataset?"),
        ("buffer: {explorer_input: {eval_tasksets: [{dataset: a}, {dataset: b}]}}", "two eval_tasksets have the same"),
        ("trainer: {total_steps: 4}", "key 'trainer' is given twice"),
        ("buffer:", "buffer: it must be a mapping of keys (given: nothing)"),
        ("buffer: [1]", "buffer: it must be a mapping of keys (given: [1])"),
        ("buffer: {batch_size: many}", "buffer.batch_size: Input should be a valid integer"),
        ("buffer: {batch_size: 3.5}", "batch_size: Input should be a valid integer, got a number with a fractional"),
        ("buffer: {batch_size: -3}", "buffer.batch_size: Input should be greater than or equal to 1 (given: -3)"),
        ("algorithm: {optimizer: {lr: .nan}}", "algorithm.optimizer.lr: Input should be a finite number (given: nan)"),
        ("algorithm: {optimizer: {lr: .inf}}", "algorithm.optimizer.lr: Input should be a finite number (given: inf)"),
        ("algorithm: {optimizer: {betas: [0.9, 1.5]}}", "algorithm.optimizer.betas.1: Input should be less than 1"),
        ("algorithm: {optimizer: {lr_warmup_steps: -7}}", "Input should be greater than or equal to -1"),
        ("algorithm: {policy_loss_fn_args: {clip_range: .inf}}", "clip_range: Input should be a finite number"),
        ("algorithm: {kl_loss_fn_args: {kl_coeff: 0.1}}", "kl_coeff"),
        ("name: 3", "name: Input should be a valid string (given: 3)"),
        ("name: ../up", "name is '../up'; it must be a relative folder name without dots"),
        ("checkpoint_root_dir: ''", "checkpoint_root_dir: String should have at least 1 character"),
        ("seed: -1", "seed: Input should be greater than or equal to 0"),
        ("stages: [{stage_name: ''}]", "stages.0.stage_name: String should have at least 1 character"),
        ("name: !!python/object/apply:os.system ['true']", "not YAML"),
    ],
)  # fmt: skip
def test_a_bad_config_file_names_file_field_and_remedy(tmp_path: Path, lines: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD_FILE)
    assert load_config(file).trainer.total_steps == 10
    file.write_text(GOOD_FILE + lines)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", "name: caf\u00e9".encode("latin-1")])
def test_a_config_file_in_another_encoding_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file}: not UTF-8 text"):
        load_config(file)


def test_a_tokenizer_beside_a_model_folder_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"a model_path brings its own tokenizer"):
        small_config("unused", "model.model_path=m", "model.architecture=null")


def test_a_resolved_config_is_read_back(tmp_path: Path) -> None:
    """JSON is YAML: a resolved config that was dumped as JSON is read back."""
    file = tmp_path / "job.json"
    config = small_config(tmp_path)
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert load_config(file) == config
