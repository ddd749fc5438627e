"""The command line, as a user meets it: what there is to choose from, and wrong usage. Runs train no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import Workplace
from tests.integration.command_line import assert_good, assert_refused
from tests.integration.small_job import small_config
from trinity_tasks.config_source import load_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TWO_STAGES = Path(__file__).parent / "configs" / "two_stages.yaml"

LOSS = '''
from typing import ClassVar, Literal

from engines.algorithms.spec import LossParams


class Scaled(LossParams):
    """-scale A lp."""

    function: ClassVar[str] = "my_losses:scaled"
    name: Literal["scaled"] = "scaled"
    scale: float = 2.5
    """Factor."""
'''


def test_a_prefect_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    place = Workplace.make(tmp_path)
    place.write("small.yaml", small_config("runs"))
    nowhere = "http://127.0.0.1:9/api"
    ended = place.run("train", "-c", "small.yaml", "--json", PREFECT_API_URL=nowhere, PREFECT_CLIENT_MAX_RETRIES="0")
    assert_refused(ended, 1, f"TrinityFlowsError: the Prefect server {nowhere} does not answer")
    assert len(ended.err.splitlines()) == 1
    assert not (place.folder / "runs").exists()


# -- what there is to choose from -------------------------------------------------------------------------------------


def test_algorithms_are_listed_and_shown_without_a_server(tmp_path: Path) -> None:
    place = Workplace.make(tmp_path)
    table = place.run("algorithms")
    assert_good(table)
    head, *rows = (line.split("\t") for line in table.out.splitlines())
    sources = {row[0]: row[head.index("source")] for row in rows}
    assert sources["gspo"] == "Zheng et al. 2025, arXiv:2507.18071"
    everything = place.run("algorithms", "--json")
    assert_good(everything)
    assert [page["name"] for page in everything.json["algorithms"]] == list(sources)
    assert everything.json["parts"]["overlong_shaping"] == ["overlong"]
    text = place.run("algorithms", "dpo")
    assert_good(text)
    assert "  algorithm.policy_loss_fn_args.label_smoothing=0.0\n" in text.out
    assert "    * One sigmoid for each pair, then the mean;" in text.out
    assert not place.home.exists()


def test_a_loss_in_the_users_folder_is_shown(tmp_path: Path) -> None:
    place = Workplace.make(tmp_path)
    (place.folder / "my_losses.py").write_text(LOSS)
    ended = place.run("algorithms", "my_losses:Scaled", "--json")
    assert_good(ended)
    page = ended.json
    assert (page["text"], page["function"]) == (["-scale A lp."], "my_losses:scaled")
    assert [(item["key"], item["default"]) for item in page["parameters"]] == [
        ("algorithm.policy_loss_fn_args.scale", 2.5)
    ]
    wrong = place.run("algorithms", "my_losses:Scale", "--json")
    assert_refused(wrong, 2, "ConfigError: algorithm (my_losses:Scale) cannot be imported")
    typo = place.run("algorithms", "gropo", "--json")
    assert_refused(typo, 2, "ConfigError: algorithm 'gropo' is not known; did you mean grpo?")


# -- wrong usage ------------------------------------------------------------------------------------------------------


def test_wrong_usage_is_an_object_too(tmp_path: Path) -> None:
    place = Workplace.make(tmp_path)
    for arguments in (("train", "--json"), ("ledger", "nowhere", "--step", "0", "--json"), ("grpo", "--json")):
        ended = place.run(*arguments)
        assert (ended.code, ended.json["error"]["type"], ended.json["error"]["exit_code"]) == (2, "UsageError", 2)
    place.write("staged.yaml", load_config(TWO_STAGES))
    ended = place.run("train", "-c", "staged.yaml", "--json")
    assert_refused(ended, 2, "ConfigError: train runs one job, and this config has stages (sft, grpo)")
    assert not place.home.exists() or not (place.home / "prefect.db").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "-c", "no.yaml"), ("ConfigError: no.yaml: cannot read the config: No such file",)),
        (("train", "-c", "small.yaml", "--set", "trainer.total_step=3"), ("total_step", "did you mean total_steps?")),
        (("finetune", "-c", "small.yaml", "--set", "trainer.total_steps=many"), ("trainer.total_steps", "'many'")),
        (("show", "nowhere"), ("nowhere: no job here (job.json is missing)",)),
        (("train", "-c", "small.yaml", "--sett", "a=b"), ("No such option: --sett",)),
        (("grpo", "-c", "small.yaml"), ("No such command 'grpo'",)),
        (("train",), ("Missing option '-c'",)),
        (
            ("ledger", "nowhere", "--step", "0"),
            ("Invalid value for '--step': Input should be greater than or equal to 1",),
        ),
    ],
)
def test_wrong_usage_is_code_2(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    place = Workplace.make(tmp_path)
    place.write("small.yaml", small_config("runs"))
    ended = place.run(*arguments)
    assert (ended.code, ended.out, ended.left_behind) == (2, "", ())
    assert "Traceback" not in ended.err
    for word in words:
        assert word in " ".join(ended.err.split())
    assert not (place.folder / "runs").exists()
    assert not place.home.exists() or not (place.home / "prefect.db").exists()
