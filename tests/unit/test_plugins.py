"""Names of a config: hints, plug-in algorithms, and what is no algorithm."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from engines import plugins
from engines.algorithms import presets
from engines.algorithms.presets import PRESETS, resolve
from engines.algorithms.spec import Algorithm, PpoClip
from engines.config import AlgorithmConfig
from engines.errors import ConfigError

MINE = PRESETS["grpo"].model_copy(update={"loss": PpoClip(clip_range_high=0.28), "group_size": 6})
NOT_MINE = {"loss": "ppo"}


def test_hint_names_the_near_one_else_all_else_how_many() -> None:
    assert plugins.hint("grop", ["sft", "grpo"]) == "did you mean grpo?"
    assert plugins.hint("xyz", ["sft", "grpo"], "known keys") == "known keys: grpo, sft"
    many = plugins.hint("?", [f"name{number:03d}" for number in range(plugins.MAX_NAMES + 3)])
    assert many.endswith(f"name{plugins.MAX_NAMES - 1:03d} and 3 more")


def test_algorithm_of_another_distribution_and_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:MINE", presets.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    algorithm = resolve(AlgorithmConfig(algorithm_type="mine", policy_loss_fn_args={"clip_range_low": 0.1}))
    assert isinstance(algorithm.loss, PpoClip)
    assert (algorithm.loss.low, algorithm.loss.high, algorithm.group_size) == (0.1, 0.28, 6)
    with pytest.raises(ConfigError, match="'mien' is not known; did you mean mine"):
        resolve(AlgorithmConfig(algorithm_type="mien"))


def test_algorithm_named_in_full() -> None:
    assert isinstance(resolve(AlgorithmConfig(algorithm_type=f"{__name__}:MINE")), Algorithm)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NOT_MINE", "is a dict, not an Algorithm"),
        ("MISSING", "cannot be imported.*MISSING.*is it the module that you mean"),
    ],
)
def test_what_is_no_algorithm_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(AlgorithmConfig(algorithm_type=f"{__name__}:{name}"))


@pytest.mark.parametrize(("name", "meant"), [("gpro", "grpo"), ("GRPO", "grpo"), ("gsop", "gspo"), ("grp", "grpo")])
def test_exchanged_letters_and_capitals_are_understood(name: str, meant: str) -> None:
    assert plugins.hint(name, ["gspo", "grpo", "sft"]) == f"did you mean {meant}?"


def test_a_misspelt_name_in_a_module_that_is_there_says_which_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"engines\.errors:DataEror.* did you mean DataError\?"):
        plugins.load("the loss", "engines.errors:DataEror")
