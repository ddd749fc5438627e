"""The public names that users' code relies on: exact names, parameters, defaults and async-ness."""

import importlib.util
import inspect
from abc import ABC
from typing import Any, get_origin, get_type_hints

import pytest

from engines.base import TrainEngineWrapper
from engines.errors import ConfigError
from engines.experience import EID, Experience
from trinity_tasks import trainer as trainer_module
from trinity_tasks.config import Config
from trinity_tasks.trainer import Trainer

SAVE = {"block_until_saved": False, "save_as_hf": False}
REQUIRED = inspect.Parameter.empty

# name: (async, parameters with defaults, return type)
TRAINER: dict[str, tuple[bool, dict[str, Any], type | None]] = {
    "prepare": (True, {}, None),
    "train": (True, {}, str),
    "train_step": (True, {"exps": REQUIRED}, dict),
    "need_sync": (True, {}, bool),
    "need_save": (False, {}, bool),
    "sync_weight": (True, {}, dict),
    "save_checkpoint": (False, SAVE, dict),
    "shutdown": (True, {}, None),
    "is_alive": (True, {}, bool),
}
ENGINE: dict[str, tuple[bool, dict[str, Any], type | None]] = {
    "prepare": (True, {}, None),
    "train_step": (True, {"batch_exps": REQUIRED}, dict),
    "save_checkpoint": (False, SAVE, None),
    "sync_weight": (False, {}, None),
    "upload_state_dict": (False, {}, None),
    "save_state_dict": (False, {}, None),
}
EXPERIENCE_FIELDS = [
    "tokens",
    "prompt_length",
    "eid",
    "logprobs",
    "reward",
    "token_level_reward",
    "advantages",
    "returns",
    "action_mask",
    "truncate_status",
    "info",
    "metrics",
    "prompt_text",
    "response_text",
    "messages",
    "tools",
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "teacher_logprobs",
    "experience_type",
]


def parameters(function: Any) -> dict[str, Any]:
    """Every parameter but self, with its default; all of them can be given by position and by name."""
    found = [item for item in inspect.signature(function).parameters.values() if item.name != "self"]
    assert {item.kind for item in found} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return {item.name: item.default for item in found}


def returned(function: Any) -> type | None:
    hint = get_type_hints(function)["return"]
    return None if hint is type(None) else get_origin(hint) or hint


def check(owner: type, name: str, expected: tuple[bool, dict[str, Any], type | None]) -> None:
    method = inspect.getattr_static(owner, name)
    assert inspect.isfunction(method), f"{owner.__name__}.{name} must be a plain method"
    assert (inspect.iscoroutinefunction(method), parameters(method), returned(method)) == expected


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_method(name: str) -> None:
    check(Trainer, name, TRAINER[name])


def test_trainer_is_plain_and_made_from_a_config() -> None:
    assert Trainer.__mro__ == (Trainer, object)
    assert parameters(Trainer.__init__) == {"config": REQUIRED}
    assert get_type_hints(Trainer.__init__)["config"] is Config


def test_trainer_get_actor_is_a_class_method_of_a_config() -> None:
    assert isinstance(inspect.getattr_static(Trainer, "get_actor"), classmethod)
    assert parameters(Trainer.get_actor) == {"config": REQUIRED}


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is not None, reason="ray is installed, so there is no error to show"
)
def test_get_actor_without_ray_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"trinity-flows\[ray\]"):
        Trainer.get_actor(Config.model_construct())


@pytest.mark.parametrize("name", ENGINE)
def test_engine_method(name: str) -> None:
    check(TrainEngineWrapper, name, ENGINE[name])
    assert name in TrainEngineWrapper.__abstractmethods__


@pytest.mark.parametrize("owner", [Trainer, TrainEngineWrapper])
def test_train_step_num_is_a_read_only_property(owner: type) -> None:
    found = inspect.getattr_static(owner, "train_step_num")
    assert isinstance(found, property)
    assert found.fset is None
    assert returned(found.fget) is int


def test_engine_asks_for_nothing_more() -> None:
    assert issubclass(TrainEngineWrapper, ABC)
    assert TrainEngineWrapper.__abstractmethods__ == {*ENGINE, "train_step_num"}


def test_trainer_module_re_exports_the_engine_names() -> None:
    assert trainer_module.TrainEngineWrapper is TrainEngineWrapper
    assert parameters(trainer_module.get_trainer_wrapper) == {"config": REQUIRED}
    assert get_type_hints(trainer_module.get_trainer_wrapper)["return"] is TrainEngineWrapper
    assert {"Trainer", "TrainEngineWrapper", "get_trainer_wrapper"} <= set(trainer_module.__all__)


def test_experience_and_its_identity() -> None:
    assert list(parameters(Experience)) == EXPERIENCE_FIELDS
    assert list(parameters(EID)) == ["batch", "task", "run", "step", "suffix"]
    eid = EID(batch=1, task=2, run=3, step=4, suffix="0a1b2c")
    assert (eid.uid, eid.sid, eid.rid, eid.tid) == ("1/2/3/4/0a1b2c", "1/2/4", "1/2/3", "1/2")


def test_config_is_frozen_and_closed() -> None:
    assert Config.model_config.get("frozen") is True
    assert Config.model_config.get("extra") == "forbid"
