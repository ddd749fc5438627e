"""The command line, as a user meets it: exit codes, what is printed where, and what running again does.

Two lines of commands run side by side, each command after the one before: a finetune that is run again, prolonged,
measured and compared; and a job that meets one trouble after another. A test waits for the command that it is about.
All of them run in a folder that holds a user's reward function and engine, and files that try to hide other modules.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration import job_digest
from tests.integration.command import Ended, Workplace
from tests.integration.small_job import small_config, train
from trinity_tasks.config import Config
from trinity_tasks.config_source import load_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TWO_STAGES = Path(__file__).parent / "configs" / "two_stages.yaml"
STAGED, SMALL = "tests/two-stages", "tests/small"
LAST_LINE = r"held-out accuracy [01]\.\d\d -> [01]\.\d\d in \d+ s"
NUM_SHARDS = 8
FRESH_TASKS = (
    "[{name: fresh, dataset: spell_backward, dataset_args: {min_word_len: 3, max_word_len: 4}, split: held_out, "
    "seed: 7, num_tasks: 4, repeat_times: 3, reward_fn: 'my_rewards:lenient'}]"
)


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


@dataclasses.dataclass(frozen=True)
class Start:
    """A command that has ended, and the state of its job then."""

    ended: Ended
    commits: list[int]
    """Steps."""
    num_points: int
    """Metric points in MLflow, of all runs."""
    status: str
    """Of the MLflow run that was begun last."""


class Line:
    """Commands one after another, in a thread."""

    def __init__(self, place: Workplace, job: str, thread: ThreadPoolExecutor) -> None:
        self.place = place
        self._job = job
        self._thread = thread
        self._starts: dict[str, Future[Start]] = {}

    def add(self, name: str, command: Callable[[], Ended]) -> None:
        """Run this after what was added before."""
        self._starts[name] = self._thread.submit(self._start, command)

    def _start(self, command: Callable[[], Ended]) -> Start:
        ended = command()
        statuses = self.place.mlflow("select status from runs order by start_time") or [("NONE",)]
        ((num_points,),) = self.place.mlflow("select count(*) from metrics")
        return Start(ended, self.place.commits(self._job), num_points, statuses[-1][0])

    def __getitem__(self, name: str) -> Start:
        return self._starts[name].result()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[tuple[Line, Line]]:
    """Both lines, which have begun to run."""
    places = [Workplace.make(tmp_path_factory.mktemp(name), empty_database) for name in ("finetuned", "troubled")]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield _finetune_line(places[0], first), _trouble_line(places[1], second)
        for thread in (first, second):
            thread.shutdown(wait=False, cancel_futures=True)


def _finetune_line(place: Workplace, thread: ThreadPoolExecutor) -> Line:
    shutil.copy(TWO_STAGES, place.folder)
    line = Line(place, f"{STAGED}/grpo", thread)
    job = ("-c", TWO_STAGES.name, "--set", "checkpoint_root_dir=runs")
    job += ("--set", "buffer.explorer_input.taskset.reward_fn=my_rewards:lenient")
    line.add("first", lambda: place.run("finetune", *job, "--json"))
    line.add("again", lambda: place.run("finetune", *job))
    line.add("longer", lambda: place.run("-c", printed(line["again"].ended, "train longer"), program="sh"))
    tasks = f"stages.grpo.buffer.explorer_input.eval_tasksets={FRESH_TASKS}"
    line.add("evaluate", lambda: place.run("evaluate", *job, "--json", "--set", tasks))
    line.add("compare", lambda: place.run("compare", *job, "--json"))
    return line


def _trouble_line(place: Workplace, thread: ThreadPoolExecutor) -> Line:
    place.write("small.yaml", troubled_config("runs"))
    line = Line(place, SMALL, thread)
    explore = ("explore", "-c", "small.yaml", "--set", f"trainer.total_steps={NUM_SHARDS}", "--json")
    line.add("explore", lambda: place.run(*explore))
    for trouble in ("fail@3", "interrupt@3", "terminate@5", "interrupt_twice@6", "kill@7", "none"):
        line.add(trouble, lambda trouble=trouble: place.run("train", "-c", "small.yaml", "--json", TROUBLE=trouble))
    enough = ("--set", f"trainer.total_steps={NUM_SHARDS}")
    line.add("enough", lambda: place.run("train", "-c", "small.yaml", *enough, "--json"))
    return line


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
def finetuned(lines: tuple[Line, Line]) -> Line:
    return lines[0]


@pytest.fixture(scope="module")
def troubled(lines: tuple[Line, Line]) -> Line:
    return lines[1]


def printed(ended: Ended, label: str) -> str:
    """What the summary says after this label."""
    (line,) = (line for line in ended.out.splitlines() if line.startswith(label))
    return line.removeprefix(label).strip()


def assert_good(ended: Ended) -> None:
    assert (ended.code, ended.noise) == (0, []), ended.err
    assert ended.left_behind == ()


def assert_refused(ended: Ended, code: int, *words: str) -> None:
    """One clear message on stderr, and the same as the one object that --json promises."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    error = ended.json["error"]
    assert error["exit_code"] == code
    assert ended.err.splitlines()[-1] == f"{error['type']}: {error['message']}"
    for word in words:
        assert word in ended.err.splitlines()[-1]
    assert ended.left_behind == ()


# -- a finetune -------------------------------------------------------------------------------------------------------


def test_a_finetune_prints_one_object_and_no_noise(finetuned: Line) -> None:
    ended = finetuned["first"].ended
    assert_good(ended)
    summary = ended.json
    assert [(stage["name"], stage["steps"]) for stage in summary["stages"]] == [("sft", 6), ("grpo", 6)]
    assert summary["already_finished"] is False
    assert finetuned["first"].commits == [2, 4, 6]
    assert finetuned["first"].status == "FINISHED"
    rewards = dict(summary["history"]["reward"])
    assert sorted(rewards) == [1, 2, 3, 4, 5, 6]
    assert 0 < max(rewards.values()) < 1  # of the function in the user's folder: the verifier gives whole numbers here
    assert len(set(rewards.values())) > 1


def test_the_reward_curve_is_a_picture(finetuned: Line) -> None:
    data = Path(finetuned["first"].ended.json["reward_curve"]).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert min(width, height) >= 200


def test_running_again_says_so_and_trains_nothing(finetuned: Line) -> None:
    first, again = finetuned["first"], finetuned["again"]
    assert_good(again.ended)
    assert again.ended.out.splitlines()[-2].startswith("this job was finished before: nothing was trained")
    assert (again.commits, again.num_points) == (first.commits, first.num_points)


def test_the_summary_shows_rollouts_and_what_to_run_next(finetuned: Line) -> None:
    summary, ended = finetuned["first"].ended.json, finetuned["again"].ended
    assert re.fullmatch(LAST_LINE, ended.out.splitlines()[-1])
    for kind in ("samples_before", "samples_after"):
        assert len(summary[kind]) == 8
    table = ended.out.partition("prompt")[2].partition("model")[0]
    assert table.splitlines()[0].split() == ["before", "reward", "after", "reward"]
    for sample in summary["samples_after"][:5]:
        assert sample["prompt"].split()[-1] in table
    server, _, page = printed(ended, "Prefect UI").partition(" server start  # then ")
    ((run_id,),) = finetuned.place.prefect("select id from flow_run where name = 'two-stages' order by created limit 1")
    assert page.replace("-", "") == f"http://127.0.0.1:4200/runs/flow-run/{run_id}".replace("-", "")
    program, *arguments = shlex.split(printed(ended, "MLflow UI"))
    assert arguments == ["ui", "--backend-store-uri", f"sqlite:///{finetuned.place.folder}/runs/mlflow.db"]
    assert Path(server).is_file()
    assert Path(program).is_file()


def test_the_printed_model_can_be_loaded(finetuned: Line) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, checkpoint = (printed(finetuned["again"].ended, label) for label in ("model", "checkpoint"))
    assert model == f"{checkpoint}/model"
    assert sum(tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(model).parameters()) > 1000
    assert AutoTokenizer.from_pretrained(model).decode([5, 6, 7])


def test_the_printed_command_trains_longer(finetuned: Line) -> None:
    before, longer = finetuned["again"], finetuned["longer"]
    assert_good(longer.ended)
    assert printed(before.ended, "train longer").endswith("--set stages.grpo.trainer.total_steps=12")
    assert longer.commits == [*before.commits, 8, 10, 12]
    assert longer.num_points > before.num_points
    assert "finished before" not in longer.ended.out
    assert re.fullmatch(LAST_LINE, longer.ended.out.splitlines()[-1])
    assert "grpo/checkpoints/global_step_00000012-" in printed(longer.ended, "checkpoint")


def test_evaluate_measures_the_last_checkpoint(finetuned: Line) -> None:
    ended = finetuned["evaluate"].ended
    assert_good(ended)
    assert ended.json["name"] == "two-stages/grpo"
    (evaluation,) = ended.json["evaluations"]
    assert (evaluation["taskset"], evaluation["step"], evaluation["num_samples"]) == ("fresh", 12, 12)
    assert 0 <= evaluation["accuracy"] <= 1


def test_compare_has_a_row_per_stage_and_task_set(finetuned: Line) -> None:
    ended = finetuned["compare"].ended
    assert_good(ended)
    rows = [(row["name"], row["step"], row["finished"], row["taskset"]) for row in ended.json["jobs"]]
    assert rows == [
        ("two-stages/sft", 6, True, None),
        ("two-stages/grpo", 12, True, "fresh"),
        ("two-stages/grpo", 12, True, "held_out"),
    ]


# -- trouble ----------------------------------------------------------------------------------------------------------


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
