"""A job that meets one trouble after another, as a user meets it: exit codes, what is printed where, what is left.

The commands run one after another, in a folder that holds a user's reward function and engine, and files that try to
hide other modules. A test waits for the command that it is about.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.integration import job_digest
from tests.integration.command import Workplace
from tests.integration.command_line import Line, assert_good, assert_refused
from tests.integration.small_job import small_config, train
from trinity_tasks.config import Config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = "tests/small"
NUM_SHARDS = 8


def troubled_config(root: Path | str, *overrides: str) -> Config:
    """Trains on what `explore` writes, one step more than there is, and commits every second step."""
    return small_config(
        root,
        "mode=train",
        "buffer.trainer_input.experience_buffer.max_read_timeout=20",
        f"trainer.total_steps={NUM_SHARDS + 1}",
        "trainer.save_interval=2",
        "trainer.trainer_type=my_engine:TroubledEngine",
        "buffer.explorer_input.taskset.reward_fn=my_rewards:lenient",
        *overrides,
    )


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Line:
    place = Workplace.make(tmp_path_factory.mktemp("troubled"), empty_database)
    place.write("small.yaml", troubled_config("runs"))
    enough = ("-c", "small.yaml", "--set", f"trainer.total_steps={NUM_SHARDS}", "--json")
    return Line(
        place,
        SMALL,
        {
            "explore": lambda: place.run("explore", *enough),
            **{
                trouble: lambda trouble=trouble: place.run("train", "-c", "small.yaml", "--json", TROUBLE=trouble)
                for trouble in ("fail@3", "interrupt@3", "terminate@5", "interrupt_twice@6", "kill@7", "none")
            },
            "enough": lambda: place.run("train", *enough),
        },
    )


def test_explore_prints_one_object(troubled: Line) -> None:
    ended = troubled["explore"].ended
    assert_good(ended)
    assert ended.json == {"name": "small", "num_steps": NUM_SHARDS}


def test_an_error_says_what_and_commits_nothing(troubled: Line) -> None:
    start = troubled["fail@3"]
    assert_refused(start.ended, 1, "EngineError: step 3: the device has fallen off")
    assert (start.commits, start.status) == ([2], "FAILED")


@pytest.mark.parametrize(("trouble", "step", "commits"), [("interrupt@3", 3, [2, 3]), ("terminate@5", 5, [2, 3, 4, 5])])
def test_a_stop_signal_commits_the_step_that_ran(troubled: Line, trouble: str, step: int, commits: list[int]) -> None:
    start = troubled[trouble]
    assert_refused(start.ended, 130, f"small: stopped at step {step}, which is committed; run it again to go on")
    assert (start.commits, start.status) == (commits, "KILLED")


def test_a_second_interrupt_waits_for_nothing(troubled: Line) -> None:
    start = troubled["interrupt_twice@6"]
    assert (start.ended.code, start.ended.json["error"]["exit_code"]) == (130, 130)
    assert start.ended.err.splitlines()[-1] == "ended at once; run it again to go on from the last commit"
    assert start.commits == [2, 3, 4, 5]
    assert start.ended.immortal == ()


def test_a_killed_command_takes_its_server_with_it(troubled: Line) -> None:
    start = troubled["kill@7"]
    assert (start.ended.code, start.ended.out) == (-9, "")
    assert start.commits in ([2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert start.ended.immortal == ()


def test_a_starved_trainer_says_what_was_there(troubled: Line) -> None:
    start = troubled["none"]
    words = ("StarvedError", "after 8 steps of 9", "0 experiences available, 16 needed for the next")
    assert_refused(start.ended, 3, *words)
    assert (start.commits[-1], start.status) == (8, "FAILED")


def test_a_lower_goal_completes_it(troubled: Line) -> None:
    start = troubled["enough"]
    assert_good(start.ended)
    state = start.ended.json
    assert (state["step"], state["finished"], state["attempt"]) == (8, True, 7)
    assert [(change["attempt"], change["before"], change["after"]) for change in state["changes"]] == [(7, 9, 8)]
    assert start.status == "FINISHED"


def test_after_all_that_it_is_the_job_that_nobody_disturbed(troubled: Line, job_root: Path) -> None:
    assert troubled["enough"].ended.code == 0
    disturbed = troubled.place.folder / "runs"
    shutil.copytree(disturbed / SMALL / "experiences", job_root / SMALL / "experiences")
    train(
        troubled_config(
            job_root,
            f"trainer.total_steps={NUM_SHARDS}",
            "trainer.trainer_type=hf",
            "buffer.explorer_input.taskset.reward_fn=verifier",
        )
    )
    assert job_digest.final_state(disturbed / SMALL) == job_digest.final_state(job_root / SMALL)
    assert job_digest.ledger(disturbed / SMALL) == job_digest.ledger(job_root / SMALL)
    metrics = job_digest.metrics(disturbed, disturbed / SMALL)
    assert metrics == job_digest.metrics(job_root, job_root / SMALL)
    assert [step for step, _ in metrics["loss/policy"]] == list(range(1, NUM_SHARDS + 1))


def test_prefect_tells_the_ends_apart(troubled: Line) -> None:
    assert troubled["enough"].ended.code == 0
    states = [state for (state,) in troubled.place.prefect("select state_type from flow_run order by created")]
    killed = ["RUNNING", "RUNNING"]  # interrupt_twice and kill: nobody was left to say it
    assert states == ["COMPLETED", "FAILED", "CANCELLED", "CANCELLED", *killed, "FAILED", "COMPLETED"]


# -- looking at a job -------------------------------------------------------------------------------------------------


def test_show_says_where_the_job_stands(troubled: Line) -> None:
    assert troubled["enough"].ended.code == 0
    ended = troubled.place.run("show", f"runs/{SMALL}")
    assert_good(ended)
    url = troubled.place.folder / "runs" / SMALL
    assert ended.out.splitlines()[0] == f"small  {url}"
    assert "step 8 of 8, finished" in ended.out
    assert "experiences trained: 128; steps in the ledger: 8" in ended.out
    assert "loss/policy" in ended.out
    folders = re.findall(r"\bglobal_step_\d{8}-[0-9a-f]{8}\b", ended.out)
    assert [int(folder[12:20]) for folder in folders] == troubled["enough"].commits
    assert (url / "checkpoints" / folders[-1] / "model" / "config.json").is_file()
    as_json = troubled.place.run("show", str(url), "--json")
    assert_good(as_json)
    assert {**as_json.json, "already_finished": False} == troubled["enough"].ended.json


def test_ledger_names_the_experiences_of_a_step(troubled: Line) -> None:
    assert troubled["enough"].ended.code == 0
    ended = troubled.place.run("ledger", f"runs/{SMALL}", "--step", "3", "--json")
    assert_good(ended)
    entry = ended.json
    assert (entry["step"], entry["num_rows"], len(entry["experiences"])) == (3, 16, 16)
    assert len({row["eid"] for row in entry["experiences"]}) == 16
    assert len({row["prompt"] for row in entry["experiences"]}) == 4
    assert {row["model_version"] for row in entry["experiences"]} == {0}
    text = troubled.place.run("ledger", f"runs/{SMALL}", "--step", "3")
    assert_good(text)
    assert "step 3: 16 experiences, recorded by attempt 1" in text.out


def test_ledger_of_a_step_that_does_not_exist(troubled: Line) -> None:
    assert troubled["enough"].ended.code == 0
    ended = troubled.place.run("ledger", f"runs/{SMALL}", "--step", "99", "--json")
    assert_refused(ended, 1, "no ledger entry for step 99; recorded steps: 1 to 8")


def test_verify_names_the_object_that_changed(troubled: Line, tmp_path: Path) -> None:
    assert troubled["enough"].ended.code == 0
    job = tmp_path / "job"
    shutil.copytree(troubled.place.folder / "runs" / SMALL, job)
    good = troubled.place.run("verify", str(job), "--json")
    assert_good(good)
    assert good.json == {"url": str(job), "ok": True, "problems": []}
    (file,) = (job / "checkpoints").glob("global_step_00000004-*/model/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    bad = troubled.place.run("verify", str(job), "--json")
    assert bad.code == 1
    (problem,) = bad.json["problems"]
    assert str(file.relative_to(job)) in problem
    assert bad.json["ok"] is False
    text = troubled.place.run("verify", str(job))
    assert (text.code, text.out, text.err) == (1, f"{problem}\n", "")
