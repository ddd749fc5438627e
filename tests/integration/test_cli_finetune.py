"""The commands around a finetune, as a user meets them: run, run again, prolonged, measured and compared.

They run one after another, in a folder that holds a user's reward function and engine, and files that try to hide other
modules. A test waits for the command that it is about.
"""

from __future__ import annotations

import re
import shlex
import shutil
import struct
from pathlib import Path

import pytest

from tests.integration.command import Ended, Workplace
from tests.integration.command_line import Line, assert_good

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TWO_STAGES = Path(__file__).parent / "configs" / "two_stages.yaml"
STAGED = "tests/two-stages"
LAST_LINE = r"held-out accuracy [01]\.\d\d -> [01]\.\d\d in \d+ s"
FRESH_TASKS = (
    "[{name: fresh, dataset: spell_backward, dataset_args: {min_word_len: 3, max_word_len: 4}, split: held_out, "
    "seed: 7, num_tasks: 4, repeat_times: 3, reward_fn: 'my_rewards:lenient'}]"
)


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Line:
    place = Workplace.make(tmp_path_factory.mktemp("finetuned"), empty_database)
    shutil.copy(TWO_STAGES, place.folder)
    job = ("-c", TWO_STAGES.name, "--set", "checkpoint_root_dir=runs")
    job += ("--set", "buffer.explorer_input.taskset.reward_fn=my_rewards:lenient")
    tasks = ("--set", f"stages.grpo.buffer.explorer_input.eval_tasksets={FRESH_TASKS}")
    line = Line(
        place,
        f"{STAGED}/grpo",
        {
            "first": lambda: place.run("finetune", *job, "--json"),
            "again": lambda: place.run("finetune", *job),
            "evaluate": lambda: place.run("evaluate", *job, *tasks, "--json"),
            "compare": lambda: place.run("compare", *job, "--json"),
            "longer": lambda: place.run("-c", printed(line["again"].ended, "train longer"), program="sh"),
        },
    )
    return line


def printed(ended: Ended, label: str) -> str:
    """What the summary says after this label."""
    (line,) = (line for line in ended.out.splitlines() if line.startswith(label))
    return line.removeprefix(label).strip()


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


def test_evaluate_measures_the_last_checkpoint(finetuned: Line) -> None:
    ended = finetuned["evaluate"].ended
    assert_good(ended)
    assert ended.json["name"] == "two-stages/grpo"
    (evaluation,) = ended.json["evaluations"]
    assert (evaluation["taskset"], evaluation["step"], evaluation["num_samples"]) == ("fresh", 6, 12)
    assert 0 <= evaluation["accuracy"] <= 1


def test_compare_has_a_row_per_stage_and_task_set(finetuned: Line) -> None:
    ended = finetuned["compare"].ended
    assert_good(ended)
    rows = [(row["name"], row["step"], row["finished"], row["taskset"]) for row in ended.json["jobs"]]
    assert rows == [
        ("two-stages/sft", 6, True, None),
        ("two-stages/grpo", 6, True, "fresh"),
        ("two-stages/grpo", 6, True, "held_out"),
    ]


@pytest.mark.slow
def test_the_printed_command_trains_longer(finetuned: Line) -> None:
    before, longer = finetuned["again"], finetuned["longer"]
    assert_good(longer.ended)
    assert printed(before.ended, "train longer").endswith("--set stages.grpo.trainer.total_steps=12")
    assert longer.commits == [*before.commits, 8, 10, 12]
    assert longer.num_points > before.num_points
    assert "finished before" not in longer.ended.out
    assert re.fullmatch(LAST_LINE, longer.ended.out.splitlines()[-1])
    assert "grpo/checkpoints/global_step_00000012-" in printed(longer.ended, "checkpoint")
