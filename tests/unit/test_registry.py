"""Engines by name, and plug-ins."""

from importlib.metadata import EntryPoint

import pytest

from engines import plugins, registry
from engines.errors import ConfigError
from engines.hf.engine import HfEngine
from engines.registry import get_trainer_wrapper
from tests.tiny_llama import engine_config


def test_built_in_engine() -> None:
    assert isinstance(get_trainer_wrapper(engine_config()), HfEngine)


def test_unknown_engine_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"trainer_type = 'hff' is not known; did you mean hf"):
        get_trainer_wrapper(engine_config(trainer_type="hff"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:Engine", "cannot be imported: No module named 'no_such_module'"),
        ("engines.hf.engine:NoSuchEngine", "cannot be imported"),
        ("engines.hf.step:TrainStep", "is not a TrainEngineWrapper"),
    ],
)
def test_bad_plug_in_is_named(value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    with pytest.raises(ConfigError, match=rf"engine 'mine' \({value}\).*{words}"):
        get_trainer_wrapper(engine_config(trainer_type="mine"))


def test_plug_in_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "engines.hf.engine:HfEngine", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    assert isinstance(get_trainer_wrapper(engine_config(trainer_type="mine")), HfEngine)
