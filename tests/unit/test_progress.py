"""`Progress` on a terminal, in a log file, and in Prefect; `Summary` on a terminal."""

import asyncio
import gc
import io
import json
import shlex
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from rich.console import Console

from flows.progress import Progress
from flows.summary import Summary, print_summary, runnable
from trinity_tasks.evaluator import Evaluation
from trinity_tasks.inspection import CommitState, JobState

METRICS = {"data/reward_mean": 0.5, "kl/policy": 0.01, "perf/tokens_per_s": 12345.6, "loss/policy": 0.2}


def console(terminal: bool, width: int = 120) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=width, legacy_windows=False), written


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_log_file_gets_a_line_now_and_then() -> None:
    target, written = console(terminal=False)
    with Progress("grpo", 300, console=target, line_interval_s=0.01) as progress:
        progress.update(7, METRICS)
        wait_until(lambda: "step 7" in written.getvalue())
        assert written.getvalue().splitlines()[-1] == "grpo: step 7/300, reward 0.500, KL 0.0100, tokens/s 12,346"
        progress.update(8, {"data/reward_mean": float("nan"), "loss/policy": float("inf")})
        progress.phase("evaluating")
        wait_until(lambda: "evaluating" in written.getvalue())
    assert written.getvalue().splitlines()[-1].startswith("grpo: step 8/300, KL 0.0100, tokens/s 12,346, ETA ")
    assert "\x1b" not in written.getvalue()
    assert len(written.getvalue().splitlines()) <= 4  # nothing new, no new line


def test_terminal_gets_a_bar_that_ends_full() -> None:
    target, written = console(terminal=True)
    with Progress("grpo", 20, console=target, draw_interval_s=0.01) as progress:
        for step in range(1, 21):
            progress.update(step, METRICS)
    assert written.getvalue().rindex("20/20") > written.getvalue().rindex("grpo")
    assert "reward 0.500, KL 0.0100, tokens/s 12,346, ETA 0:00" in written.getvalue()


def test_a_step_without_an_update_is_shown_as_one() -> None:
    progress = Progress("grpo", None, console=console(False)[0])
    progress.update(1, {"data/reward_mean": 0.0, "update/num_applied": 0.0})
    assert progress.line() == "grpo: step 1, reward 0.000, no update"
    progress.update(2, {"data/reward_mean": 0.25, "update/num_applied": 1.0})
    assert progress.line() == "grpo: step 2, reward 0.250"


def test_time_left_is_that_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *[100.0 + 2 * step for step in range(60)]])
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: next(clock))
    progress = Progress("grpo", 1000, console=console(False)[0])
    progress.update(1, {})
    assert progress.eta_s is None
    for step in range(2, 62):
        progress.update(step, {})
    assert progress.eta_s == pytest.approx((1000 - 61) * 2.0)
    assert progress.line() == "grpo: step 61/1000, ETA 31:18"
    assert Progress("open", None, console=console(False)[0]).line() == "open: step 0"


def test_update_costs_far_less_than_a_millisecond() -> None:
    with Progress("grpo", 2000, console=console(True)[0], draw_interval_s=0.05) as progress:
        metrics = {f"m/{index}": 1.0 for index in range(40)} | METRICS
        durations: list[float] = []
        for step in range(1, 2001):
            started = time.perf_counter()
            progress.update(step, metrics)
            durations.append(time.perf_counter() - started)
    assert sorted(durations)[1000] < 1e-4


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # prefect 3.9 leaves a socket open
def test_artifact_of_the_flow_run_follows_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real Prefect server: one artifact, of the run that trains, at 100 percent in the end."""
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.context import get_run_context
    from prefect.testing.utilities import prefect_test_harness

    @flow
    async def train() -> str:
        with Progress("rft/grpo", 4, console=console(False)[0], publish_interval_s=0.01) as progress:
            progress.update(1, METRICS)
            await asyncio.sleep(0.3)
            for step in range(2, 5):
                progress.update(step, METRICS)
        return str(get_run_context().flow_run.id)  # type: ignore[union-attr]

    with prefect_test_harness(server_startup_timeout=60):
        flow_run_id = asyncio.run(train())
        with get_client(sync_client=True) as client:
            artifacts = client.read_artifacts()
    gc.collect()  # now, under this test's filter, not in whatever test runs next
    assert [(item.type, item.key, item.data) for item in artifacts] == [("progress", "progress-rft-grpo", 100.0)]
    assert str(artifacts[0].flow_run_id) == flow_run_id
    assert str(artifacts[0].description).startswith("rft/grpo: step 4/4, reward 0.500")


def test_prefect_server_that_never_answers_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setattr("flows.live_artifacts.END_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.settimeout(10)
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{deaf.getsockname()[1]}/api"}):
            target, _ = console(False)
            with Progress("grpo", 10, console=target, publish_interval_s=0.01, flow_run_id=uuid4()) as progress:
                connection, _ = deaf.accept()
                started = time.perf_counter()
                for step in range(1, 11):
                    progress.update(step, METRICS)
                assert time.perf_counter() - started < 0.1
                started = time.perf_counter()
            assert time.perf_counter() - started < 2
            connection.close()


# -- the summary ------------------------------------------------------------------------------------------------------


def evaluation(step: int, accuracy: float, response: str) -> Evaluation:
    sample = {"prompt": "spell [bold]cat[/]", "response": response, "reward": accuracy}
    return Evaluation(
        taskset="held_out", step=step, accuracy=accuracy, num_tasks=1024, num_samples=4096,
        mean_response_tokens=4.0, duration_s=1.0, definition={}, samples=(sample,),
    )  # fmt: skip


def job(name: str, step: int, *evaluations: Evaluation) -> JobState:
    url = f"/data/runs/demo/{name}"
    commit = CommitState(
        number=1,
        step=step,
        url=f"{url}/checkpoints/global_step_{step:08d}-ab",
        num_bytes=1,
        created_at="",
        finished=True,
    )
    return JobState(
        url=url, name=name, job_id="id", attempt=1, step=step, total_steps=step, finished=True,
        num_experiences_trained=1, num_steps_recorded=step, mlflow_run_id="run", commits=(commit,),
        metrics={}, evaluations=evaluations, changes=(),
    )  # fmt: skip


SFT = job("rft/sft", 60, evaluation(0, 0.0, "zzz"), evaluation(60, 0.311, "tax"))
GRPO = job("rft/grpo", 200, evaluation(0, 0.311, "tax"), evaluation(200, 0.934, "tac"))
REWARDS = {"train reward": [(step, step / 200) for step in range(1, 201)]}


def summary(**changes: Any) -> Summary:
    given: dict[str, Any] = {"mlflow_ui": "mlflow ui --backend-store-uri sqlite:////data/mlflow.db"}
    return Summary.of([SFT, GRPO], REWARDS, 214.4, **{**given, **changes})


def test_summary_counts_from_what_the_first_stages_had_reached() -> None:
    found = summary(reward_curve="/data/reward_curve.png")
    assert (found.accuracy_before, found.accuracy_after) == (0.311, 0.934)
    assert [(stage.name, stage.accuracy_before, stage.accuracy_after) for stage in found.stages] == [
        ("sft", 0.0, 0.311),
        ("grpo", 0.311, 0.934),
    ]
    assert found.history["held-out accuracy"] == ((0, 0.311), (200, 0.934))
    assert found.metrics() == {
        "summary/accuracy_before": 0.311,
        "summary/accuracy_after": 0.934,
        "summary/duration_s": 214.4,
    }
    assert found.files()["summary/reward_curve.png"].startswith(b"\x89PNG")
    assert Summary.model_validate_json(found.texts()["summary/summary.json"]) == found
    assert "| spell \\[bold\\]cat\\[/\\] | tax | 0.311 | tac | 0.934 |" in found.texts()["summary/rollouts.md"]


@pytest.mark.parametrize("terminal", [True, False])
def test_summary_ends_with_exactly_this_line(terminal: bool) -> None:
    target, written = console(terminal, width=60)
    result = json.loads(summary(reward_curve="/data/reward_curve.png").model_dump_json())
    print_summary(result, console=target, command=["trinity-flows", "finetune", "-c", "my config.yaml"])
    lines = written.getvalue().splitlines()
    assert lines[-1] == "held-out accuracy 0.31 -> 0.93 in 214 s"
    assert "model         /data/runs/demo/rft/grpo/checkpoints/global_step_00000200-ab/model" in lines
    assert "reward curve  /data/reward_curve.png" in lines
    longer = next(line for line in lines if line.startswith("train longer")).split(maxsplit=2)[2]
    assert shlex.split(longer) == [
        *("trinity-flows", "finetune", "-c", "my config.yaml"),
        *("--set", "stages.grpo.trainer.total_steps=400"),
    ]
    assert any(
        line.startswith("MLflow UI ") and "--backend-store-uri sqlite:////data/mlflow.db" in line for line in lines
    )
    assert any(line.startswith("Prefect UI ") for line in lines)
    assert any("[bold]cat[/]" in line for line in lines)


def test_the_command_that_continues_replaces_a_setting_of_the_same_key() -> None:
    key = "stages.grpo.trainer.total_steps"
    given = ["trinity-flows", "finetune", "--set", f"{key}=200", "-c", "a.yaml", f"--set={key}=300", "--set", "seed=1"]
    continued = shlex.split(summary().continue_command(given))
    assert continued == ["trinity-flows", "finetune", "-c", "a.yaml", "--set", "seed=1", "--set", f"{key}=400"]


def test_finished_job_says_so() -> None:
    target, written = console(terminal=False)
    print_summary({**summary().model_dump(mode="json"), "already_finished": True}, console=target, command=["x"])
    assert written.getvalue().splitlines()[-2].startswith("this job was finished before: nothing was trained")
    assert written.getvalue().splitlines()[-1] == "held-out accuracy 0.31 -> 0.93 in 214 s"


def test_summary_without_evaluation_or_stages() -> None:
    found = Summary.of([job("rft", 5)], {}, 3.0)
    target, written = console(terminal=False)
    print_summary(found.model_dump(mode="json"), console=target, command=["trinity-flows", "finetune", "-c", "a"])
    assert "--set trainer.total_steps=10" in written.getvalue()
    assert written.getvalue().splitlines()[-1].startswith("done in 3 s; without buffer.explorer_input.eval_tasksets")
    assert found.files() == {}


def test_prefect_page_is_that_of_the_server_or_the_command_that_starts_one() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://host:4200/api"}):
        assert summary(flow_run_id="abc").prefect_ui == "http://host:4200/runs/flow-run/abc"
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert summary(flow_run_id="abc").prefect_ui.startswith("prefect server start ")
        assert summary(flow_run_id="abc").prefect_ui.endswith("/runs/flow-run/abc")


def test_program_of_a_virtual_environment_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mlflow").touch()
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert runnable("mlflow ui --port 1") == "bin/mlflow ui --port 1"
    assert runnable("http://host:5000") == "http://host:5000"
    assert runnable("unknown ui") == "unknown ui"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert runnable("mlflow ui") == f"{tmp_path}/bin/mlflow ui"
