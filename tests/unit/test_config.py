"""`Config`: what it refuses, with which words; overrides, stages, and what a resume may change."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from engines.config import Resume
from engines.errors import ConfigError
from trinity_tasks.config import Config, deep_merge
from trinity_tasks.config_source import apply_override, changes, fingerprint, load_config, parse_config

MODEL = {"architecture": {"model_type": "llama", "hidden_size": 32}, "tokenizer": {"kind": "byte"}}
BASE: dict[str, Any] = {"mode": "train", "model": MODEL, "trainer": {"total_steps": 10}}
STAGED: dict[str, Any] = {
    **BASE,
    "stages": [
        {"stage_name": "sft", "algorithm": {"algorithm_type": "sft"}},
        {
            "stage_name": "grpo",
            "trainer": {"total_steps": 5},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        },
    ],
}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return str(caught.value)


def with_override(raw: dict[str, Any], text: str) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    apply_override(changed, text)
    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trianer.total_steps=1", "trianer: unknown key; did you mean trainer?"),
        ("trainer.total_step=1", "trainer.total_step: unknown key; did you mean total_steps?"),
        ("algorithm.optimizer.learning=1", "algorithm.optimizer.learning: unknown key; known keys: betas, clip_grad"),
        ("trainer.total_steps=0", "trainer.total_steps: Input should be greater than or equal to 1 (given: 0)"),
        ("trainer.total_steps=many", "trainer.total_steps: Input should be a valid integer"),
        ("model.dtype=float16", "model.dtype: Input should be 'float32' or 'bfloat16' (given: 'float16')"),
        ("mode=both", "mode: both needs buffer.explorer_input.taskset"),
        ("buffer.train_batch_size=7", "buffer.train_batch_size = 7 does not hold whole groups"),
        ("model.model_path=m", "give exactly one of model.model_path and model.architecture"),
        ("name=../x", "name is '../x'"),
        ("name=", "name: Input should be a valid string (given: nothing)"),
        ("buffer.explorer_input.eval_tasksets.a.seed=1", "it must be a list (given: {'a': {'seed': 1}})"),
        ("algorithm.algorithm_type=grop", "grpo"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_remedy(change: str, words: str) -> None:
    assert words in refused(with_override(BASE, change))


def test_every_fault_is_named_at_once() -> None:
    message = refused({**BASE, "sede": 1, "trainer": {"total_steps": -1, "save_interval": "x"}})
    assert "sede: unknown key; did you mean seed?" in message
    assert "trainer.total_steps" in message
    assert "trainer.save_interval" in message


def test_the_config_cannot_be_changed() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_overrides_reach_lists_by_name_and_by_number() -> None:
    assert with_override(STAGED, "stages.grpo.trainer.total_steps=9")["stages"][1]["trainer"] == {"total_steps": 9}
    assert with_override(STAGED, "stages.0.trainer.total_steps=3")["stages"][0]["trainer"] == {"total_steps": 3}
    assert with_override(BASE, "algorithm.optimizer.betas=[0.8, 0.9]")["algorithm"]["optimizer"]["betas"] == [0.8, 0.9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer.total_steps", "write key=value"),
        ("=3", "write key=value"),
        ("stages.dpo.trainer.total_steps=1", "no item 'dpo'; there are sft, grpo"),
        ("mode.x=1", "mode is 'train', which has no keys below it"),
        ("name=[", "not YAML"),
    ],
)
def test_a_bad_override_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"--set") as caught:
        apply_override(copy.deepcopy(STAGED), text)
    assert words in str(caught.value)


def test_a_file_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(BASE))
    assert load_config(file, ["trainer.total_steps=20", "name=other"]).trainer.total_steps == 20


@pytest.mark.parametrize(
    ("content", "words"), [("a: [", "not YAML"), ("- 1", "this file holds a list"), ("", "is empty")]
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"job\.yaml") as caught:
        load_config(file)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot read the config: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_a_stage_changes_only_what_it_names() -> None:
    stage = parse_config(STAGED).stage("grpo")
    assert stage.job_path == "trinity-flows/rft/grpo"
    assert (stage.trainer.total_steps, stage.group_size, stage.stages) == (5, 4, ())
    assert stage.model.architecture == MODEL["architecture"]
    sft = parse_config(STAGED).stage("sft")
    assert sft.trainer.total_steps == 10


def test_a_stage_takes_its_model_from_the_stage_before() -> None:
    stage = parse_config(STAGED).stage("grpo", "file:///m")
    assert (stage.model.model_path, stage.model.architecture, stage.model.tokenizer) == ("file:///m", None, None)


def test_a_fault_inside_a_stage_is_found_before_the_first_stage_starts() -> None:
    message = refused(with_override(STAGED, "stages.grpo.trainer.total_stepz=1"))
    assert message == "config: stages.grpo.trainer.total_stepz: unknown key; did you mean total_steps?"
    message = refused(with_override(STAGED, "stages.grpo.buffer.train_batch_size=7"))
    assert message.startswith("config: stages.grpo: buffer.train_batch_size = 7 does not hold whole groups")


def test_a_list_that_a_stage_inherits_can_be_changed_in_that_stage_alone() -> None:
    shared = with_override(BASE, "buffer.explorer_input.eval_tasksets=[{name: held_out, num_tasks: 9, seed: 1}]")
    raw = with_override(
        shared | {"stages": STAGED["stages"]}, "stages.grpo.buffer.explorer_input.eval_tasksets.held_out.num_tasks=3"
    )
    sizes = {name: parse_config(raw).stage(name).buffer.explorer_input.eval_tasksets[0] for name in ("sft", "grpo")}
    assert (sizes["sft"].num_tasks, sizes["grpo"].num_tasks, sizes["grpo"].seed) == (9, 3, 1)


def test_changes_know_what_a_resume_may_do() -> None:
    before = parse_config(BASE).model_dump(mode="json")
    found = changes(before, parse_config({**BASE, "seed": 7, "trainer": {"total_steps": 20}}))
    assert {(change.field, change.before, change.after, change.resume) for change in found} == {
        ("seed", 42, 7, Resume.FORK),
        ("trainer.total_steps", 10, 20, Resume.SAFE),
    }


def test_each_field_of_a_stage_keeps_its_own_rule() -> None:
    before = parse_config(STAGED).model_dump(mode="json")
    found = changes(before, parse_config(with_override(STAGED, "stages.grpo.trainer.total_steps=9")))
    assert [(change.field, change.resume) for change in found] == [("stages.grpo.trainer.total_steps", Resume.SAFE)]


def test_a_job_may_be_moved_and_measured_on_more_tasks() -> None:
    before = parse_config(BASE)
    more = with_override(BASE, "buffer.explorer_input.eval_tasksets=[{dataset: spell_backward, num_tasks: 3}]")
    found = changes(before.model_dump(mode="json"), parse_config({**more, "checkpoint_root_dir": "elsewhere"}))
    assert [(change.field, change.resume) for change in found] == [
        ("checkpoint_root_dir", Resume.SAFE),
        ("buffer.explorer_input.eval_tasksets", Resume.SAFE),
    ]
    assert fingerprint(parse_config(more)) == fingerprint(before)


def test_the_fingerprint_ignores_what_is_safe_to_change() -> None:
    base = fingerprint(parse_config(BASE))
    assert fingerprint(parse_config(with_override(BASE, "trainer.total_steps=99"))) == base
    assert fingerprint(parse_config(with_override(BASE, "seed=1"))) != base


def test_a_config_survives_json_as_the_prefect_form_sends_it() -> None:
    config = parse_config(STAGED)
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_every_field_is_documented_and_says_what_a_resume_may_do() -> None:
    schema = Config.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    missing = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section.get("properties", {}).items()
        if not field.get("description")
    ]
    assert missing == []
    assert list(leaves_without_a_rule(Config)) == []


def leaves_without_a_rule(model: Any) -> Iterator[str]:
    for name, field in model.model_fields.items():
        sections = [part for part in (field.annotation, *get_args(field.annotation)) if is_section(part)]
        for section in sections:
            yield from leaves_without_a_rule(section)
        if not sections and not any(isinstance(item, Resume) for item in field.metadata):
            yield f"{model.__name__}.{name}"


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def test_deep_merge_replaces_lists_and_merges_mappings() -> None:
    assert deep_merge({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}}) == {"a": {"b": 1, "c": [2]}, "d": 2}
