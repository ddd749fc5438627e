"""The flows on a real Prefect server: what they do, return, and leave in Prefect and MLflow."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.flows import Flow

from engines.errors import ConfigError, EngineError, StarvedError
from flows.compare import compare
from flows.evaluate import evaluate
from flows.explore import explore
from flows.finetune import finetune
from flows.train import train
from tests.fake_engine import FakeEngine, FakeSampler
from tests.fake_job import STAGES, fake_config, with_evaluation
from tests.integration.flow_process import start_flow
from tests.integration.flow_runs import (
    FLOW_MARKS,
    artifacts,
    committed,
    fails,
    folder,
    result,
    run,
    shards,
    signals_at,
    tracked,
    written,
)
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe, trace_step, verify
from trinity_tasks.job import job_url
from trinity_tasks.standalone import StandaloneExplorer
from trinity_tasks.trainer import Trainer

pytestmark = FLOW_MARKS

ELSEWHERE = "mode=train"
"""Override: experiences come from another process."""

# -- a good run --------------------------------------------------------------------------------------------------------


def test_a_run_returns_the_jobs_state_and_leaves_it_in_prefect_and_mlflow(job_root: Path) -> None:
    config = fake_config(job_root, with_evaluation())
    state = run(train, config)
    assert state.is_completed()
    told = result(state)
    assert told == {**describe(job_url(config)).model_dump(mode="json"), "already_finished": False}
    assert (told["step"], told["finished"], told["num_experiences_trained"]) == (6, True, 24)
    assert [(item["step"], item["num_samples"]) for item in told["evaluations"]] == [(0, 8), (6, 8)]
    assert artifacts(state, "progress") == [100.0]
    assert tracked(config) == ("FINISHED", [1, 2, 3, 4, 5, 6])
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(state.state_details.flow_run_id)  # type: ignore[arg-type]
    assert (flow_run.name, flow_run.run_count) == ("fake", 1)


def task_runs(state: State[Any], expected: int) -> list[str]:
    """Names and states of a flow run's task runs, in order; recorded by the server some time after they ran."""
    which = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))  # type: ignore[list-item]
    end = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while True:
            found = client.read_task_runs(flow_run_filter=which)
            if len(found) == expected and all(each.end_time for each in found):
                break
            assert time.monotonic() < end, f"{len(found)} task runs of {expected}"
            time.sleep(0.2)
    found.sort(key=lambda each: each.start_time)  # type: ignore[arg-type,return-value]
    return [f"{each.name.rpartition('-')[0]} {each.state_name}" for each in found]


def test_each_step_is_a_task_run(job_root: Path) -> None:
    """Weights through storage: a sync is one too, unless a save stands in for it. Exploring is none."""
    state = run(train, fake_config(job_root, "trainer.total_steps=3"))
    steps = ["train_step", "sync_weight", "train_step", "save_checkpoint", "train_step", "sync_weight"]
    assert task_runs(state, 8) == [f"{name} Completed" for name in ("prepare", *steps, "save_checkpoint")]


def test_a_finished_job_is_told_and_not_run(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(job_root)
    first = result(run(train, config))
    prepared = fails(monkeypatch, FakeEngine, "prepare", [])
    state = run(train, config)
    assert result(state) == {**first, "already_finished": True}
    assert prepared == []
    assert first["attempt"] == 1


@pytest.mark.parametrize("flow", ["train", "explore"])
def test_prefect_keeps_nothing_of_the_steps(job_root: Path, flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow run that is a week long must not grow by its task runs' results."""
    owner, method = {"train": (Trainer, "train_on_next_batch"), "explore": (StandaloneExplorer, "explore_step")}[flow]
    kept: list[int] = []
    original = getattr(owner, method)

    async def counted(self: Any) -> Any:
        flow_run = FlowRunContext.get()
        assert flow_run is not None
        kept.append(len(flow_run.run_results))
        return await original(self)

    monkeypatch.setattr(owner, method, counted)
    assert run({"train": train, "explore": explore}[flow], fake_config(job_root)).is_completed()
    assert kept == [0] * 6


# -- explore and train -------------------------------------------------------------------------------------------------


def trained(config: Config) -> list[list[str]]:
    """Identities of the rows of each step, as the ledger has them."""
    steps = describe(job_url(config)).num_steps_recorded
    return [[row["eid"] for row in trace_step(job_url(config), step)["experiences"]] for step in range(1, steps + 1)]


def test_two_processes_train_each_experience_once(job_root: Path, tmp_path: Path, api: str) -> None:
    """6 shards of 8 rows become 4 steps of 12; the trainer has no end of its own and takes the explorer's."""
    shared = ("buffer.batch_size=4", "buffer.train_batch_size=12")
    exploring = fake_config(job_root, *shared)
    training = fake_config(job_root, *shared, ELSEWHERE, "trainer.total_steps=null")
    flows = {"train": training, "explore": exploring}
    for process in [start_flow(name, config, api, tmp_path / name) for name, config in flows.items()]:
        process.join()
        assert process.exitcode == 0
    ends = {flow: json.loads((tmp_path / flow).read_text()) for flow in flows}
    assert {flow: end["state"] for flow, end in ends.items()} == {"train": "Completed", "explore": "Completed"}
    assert ends["explore"]["result"] == {"name": "fake", "num_steps": 6}
    state = describe(job_url(training))
    assert (state.step, state.finished, state.num_experiences_trained) == (4, True, 48)
    rows = written(exploring)
    assert len(set(rows)) == len(rows) == 48
    assert [len(batch) for batch in trained(training)] == [12, 12, 12, 12]
    assert list(itertools.chain(*trained(training))) == rows
    assert verify(job_url(training)) == []
    assert tracked(training)[0] == "FINISHED"


def test_the_explorer_samples_the_newest_published_weights(job_root: Path) -> None:
    """Trained and explored in turns: rows of the second half come from the weights that the first half made."""
    half = "trainer.total_steps=3"
    assert run(explore, fake_config(job_root, half, "explorer.name=one")).is_completed()
    training = fake_config(job_root, half, ELSEWHERE)
    assert run(train, training).is_completed()
    assert run(explore, fake_config(job_root, half, "explorer.name=two")).is_completed()
    versions = {}
    for writer in ("one", "two"):
        versions[writer] = [{row.model_version for row in rows} for rows in shards(training, writer)]
    assert versions == {"one": [{0}] * 3, "two": [{3}] * 3}


def test_a_trainer_that_needs_more_than_comes_is_starved_and_keeps_what_it_has_learnt(job_root: Path) -> None:
    assert run(explore, fake_config(job_root)).is_completed()
    training = fake_config(job_root, ELSEWHERE, "trainer.total_steps=8", "buffer.train_batch_size=6")
    state = run(train, training)
    assert state.is_failed()
    error = result(state)
    assert isinstance(error, StarvedError)
    assert "ended after 4 steps of 8: 0 experiences available, 6 needed" in str(error)
    assert committed(training) == [2, 4]
    assert tracked(training)[0] == "FAILED"


def test_an_explorer_goes_on_after_its_last_shard(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(job_root)
    stopping = signals_at(monkeypatch, FakeSampler, "generate", 2)
    state = run(explore, config)
    assert state.is_cancelled()
    assert state.message == "fake: stopped after 2 steps; run it again to go on"
    assert (len(stopping), artifacts(state, "progress")) == (2, [pytest.approx(100 * 2 / 6)])
    state = run(explore, config)
    assert result(state) == {"name": "fake", "num_steps": 4}
    assert artifacts(state, "progress") == [100.0]
    assert len(set(written(config))) == 24
    assert result(run(explore, config)) == {"name": "fake", "num_steps": 0}


# -- evaluate and compare ----------------------------------------------------------------------------------------------


def test_evaluate_measures_the_last_checkpoint_once(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(job_root, with_evaluation())
    (_, at_end) = result(run(train, config))["evaluations"]
    again = result(run(evaluate, config))
    assert again == {"name": "fake", "evaluations": [at_end]}
    (file,) = folder(config).glob("evaluations/held_out/step_00000006.json")
    file.unlink()
    (measured,) = result(run(evaluate, config))["evaluations"]
    same = ("step", "accuracy", "num_samples", "mean_response_tokens", "samples")
    assert {key: measured[key] for key in same} == {key: at_end[key] for key in same}
    assert 0 < measured["accuracy"] < 1
    sampled = fails(monkeypatch, FakeSampler, "generate", [])
    assert result(run(evaluate, config))["evaluations"] == [measured]
    assert sampled == []
    (other,) = result(run(evaluate, fake_config(job_root, with_evaluation("other"))))["evaluations"]
    assert (other["taskset"], other["num_samples"], len(sampled)) == ("other", 8, 1)
    more = "buffer.explorer_input.eval_tasksets.held_out.num_tasks=5"
    refused = result(run(evaluate, fake_config(job_root, with_evaluation(), more)))
    assert isinstance(refused, ConfigError)
    assert "  num_tasks: 4 -> 5" in str(refused).splitlines()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [((), "needs buffer.explorer_input.eval_tasksets"), ((with_evaluation(),), "no job here")],
)
def test_what_cannot_be_evaluated_is_named(job_root: Path, overrides: tuple[str, ...], words: str) -> None:
    state = run(evaluate, fake_config(job_root, *overrides))
    assert state.is_failed()
    assert isinstance(error := result(state), ConfigError)
    assert words in str(error)


def test_compare_has_a_row_for_each_job_stage_and_task_set(job_root: Path) -> None:
    plain = fake_config(job_root, "name=plain")
    staged = fake_config(job_root, "name=staged", STAGES, with_evaluation())
    assert run(train, plain).is_completed()
    assert run(finetune, staged).is_completed()
    state = run(compare, [plain, staged])
    rows = result(state)["jobs"]
    assert [(row["name"], row["step"], row["finished"], row["experiences"], row["taskset"]) for row in rows] == [
        ("plain", 6, True, 24, None),
        ("staged/sft", 2, True, 8, "held_out"),
        ("staged/grpo", 6, True, 24, "held_out"),
    ]
    sft, grpo = (describe(job_url(staged.stage(name))) for name in ("sft", "grpo"))
    assert [(row["accuracy_before"], row["accuracy"]) for row in rows[1:]] == [
        (stage.evaluations[0].accuracy, stage.evaluations[1].accuracy) for stage in (sft, grpo)
    ]
    assert rows[1]["accuracy"] == rows[2]["accuracy_before"] != rows[2]["accuracy"]
    assert [row["checkpoint"] for row in rows[1:]] == [sft.checkpoint_url, grpo.checkpoint_url]
    assert len({row["mlflow_run_id"] for row in rows}) == 3
    (table,) = artifacts(state, "table")
    assert json.loads(table) == rows


@pytest.mark.parametrize("flow", [train, explore])
def test_stages_are_for_finetune_alone(job_root: Path, flow: Flow[..., Any]) -> None:
    state = run(flow, fake_config(job_root, STAGES))
    assert state.is_failed()
    assert isinstance(error := result(state), ConfigError)
    assert f"{flow.name} runs one job, and this config has stages (sft, grpo): run them with finetune" in str(error)
    assert not folder(fake_config(job_root)).exists()


def test_a_stage_that_another_has_begun_from_does_not_train_further(job_root: Path) -> None:
    """The next stage would not see it; and once it had, neither config could go on with the job."""
    config = fake_config(job_root, STAGES)
    assert run(finetune, config).is_completed()
    state = run(finetune, fake_config(job_root, STAGES, "stages.sft.trainer.total_steps=4"))
    assert isinstance(error := result(state), ConfigError)
    assert "stage grpo has begun from step 2 of stage sft, which this config would train to step 4" in str(error)
    assert describe(job_url(config.stage("sft"))).step == 2
    longer = fake_config(job_root, STAGES, "trainer.total_steps=8")
    assert run(finetune, longer).is_completed()
    assert [stage.step for stage in describe(job_url(config)).stages] == [2, 8]


def test_a_job_with_stages_is_looked_at_as_a_whole(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(job_root, STAGES)
    fails(monkeypatch, FakeEngine, "train_step", [None] * 4 + [EngineError("gone")])
    assert run(finetune, config).is_failed()
    half = describe(job_url(config))
    standing = [(stage.name, stage.step, stage.finished) for stage in half.stages]
    assert (half.finished, standing) == (False, [("fake/sft", 2, True), ("fake/grpo", 2, False)])
    assert run(finetune, config).is_completed()
    whole = describe(job_url(config))
    assert (whole.step, whole.total_steps, whole.finished) == (8, 8, True)
    assert whole.num_experiences_trained == sum(stage.num_experiences_trained for stage in whole.stages) == 32
    assert verify(job_url(config)) == []
    (weights,) = (folder(config) / "sft").glob("checkpoints/global_step_00000002-*/model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    (problem, *_) = verify(job_url(config))
    assert problem.startswith(f"{folder(config)}/sft: ")
    with pytest.raises(
        ConfigError, match=rf"has stages, name one of them: {folder(config)}/sft, {folder(config)}/grpo"
    ):
        trace_step(job_url(config), 1)


def test_compare_names_a_job_that_is_not_there(job_root: Path) -> None:
    state = run(compare, [fake_config(job_root, "name=never_run")])
    assert state.is_failed()
    assert isinstance(error := result(state), ConfigError)
    assert "never_run: no job here" in str(error)


# -- the form ----------------------------------------------------------------------------------------------------------

FLOWS: list[Flow[..., Any]] = [finetune, train, explore, evaluate, compare]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_the_form_explains_every_field_and_has_the_configs_defaults(flow: Flow[..., Any]) -> None:
    schema = flow.parameters.model_dump()
    for name, field in schema["properties"].items():
        assert field["description"].endswith("."), name
    assert schema["definitions"].keys() == Config.model_json_schema()["$defs"].keys() | {"Config"}
    for section, definition in schema["definitions"].items():
        for name, field in definition["properties"].items():
            assert field["description"], f"{section}.{name}"
    defaults = {name: field.get("default") for name, field in schema["definitions"]["Config"]["properties"].items()}
    ours = Config.model_validate({"model": {"model_path": "m"}, "mode": "train"}).model_dump(mode="json")
    assert defaults == {**ours, "mode": "both", "model": None}
    assert schema["definitions"]["Config"]["required"] == ["model"]


@pytest.mark.parametrize(
    ("change", "words"), [({"seed": -1}, "seed"), ({"trainer": {"total_stepz": 3}}, "trainer.total_stepz")]
)
def test_a_bad_value_is_refused_before_anything_starts(job_root: Path, change: dict[str, Any], words: str) -> None:
    raw = fake_config(job_root).model_dump(mode="json") | change
    state = run(train, raw)
    assert state.is_failed()
    assert words in str(result(state))
    assert [path.name for path in job_root.iterdir()] == ["mlflow.db"]
