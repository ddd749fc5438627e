"""Stores that refuse, and jobs whose stored state is damaged, held by another run, or continued with another config.

A damaged checkpoint costs the steps since the one before and no more: the job ends in the same bits. What cannot be
repaired is named, with what to do, and doing that is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.errors import CheckpointError, ConfigError, DataError, LeaseLost, StorageError
from tests.faulty_s3 import FaultyS3
from tests.integration.job_digest import final_state
from tests.integration.small_job import small_config, train
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe, verify
from trinity_tasks.standalone import evaluate_checkpoint
from trinity_tasks.trainer import Trainer

pytestmark = pytest.mark.integration

EVERY_STEP = (
    "trainer.save_interval=1",
    "explorer.eval_on_startup=false",
    "buffer.explorer_input.eval_tasksets=[]",
)
HALF, WHOLE = "trainer.total_steps=4", "trainer.total_steps=6"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """Root of a job that has committed steps 1 to 4."""
    root = tmp_path_factory.mktemp("half")
    shutil.copy(empty_database, root / "mlflow.db")
    train(small_config(root, *EVERY_STEP, HALF))
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, half: Path) -> dict[str, str]:
    """The bits after step 6 of that job, undisturbed."""
    root = tmp_path_factory.mktemp("whole")
    shutil.copytree(half, root, dirs_exist_ok=True)
    train(small_config(root, *EVERY_STEP, WHOLE))
    return final_state(root / "tests" / "small")


@pytest.fixture
def job(half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the half-done job, to spoil: its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(half, tmp_path / "root")
    return tmp_path / "root" / "tests" / "small"


def config_of(job: Path, *overrides: str) -> Config:
    return small_config(job.parents[1], *EVERY_STEP, WHOLE, *overrides)


def resume(job: Path, *overrides: str) -> None:
    train(config_of(job, *overrides))


def history(job: Path) -> list[tuple[int, int, int | None]]:
    """(number, step, parent) of every commit that can be read."""
    found: list[tuple[int, int, int | None]] = []
    for file in sorted((job / "commits").glob("0*.json")):
        with contextlib.suppress(ValueError):
            manifest = json.loads(file.read_text())
            found.append((manifest["number"], manifest["step"], manifest["parent"]))
    return found


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def nonsense(file: Path) -> None:
    file.write_text("{nope")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def later_format(file: Path) -> None:
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 99'))


def later_field(file: Path) -> None:
    file.write_text(file.read_text().replace('"mode": "both"', '"mode": "both", "colour": 1'))


LAST = "checkpoints/global_step_00000004-*"


@pytest.mark.parametrize(
    ("pattern", "how", "reason"),
    [
        (
            f"{LAST}/model/model.safetensors",
            flip,
            "commit 4 (step 4): .*model.safetensors has sha256 .* its bytes changed",
        ),
        (
            f"{LAST}/optimizer.safetensors",
            cut,
            "commit 4 (step 4): .*optimizer.safetensors has .* bytes, recorded were",
        ),
        (f"{LAST}/engine_state.json", Path.unlink, "commit 4 (step 4): .*engine_state.json is missing"),
        (f"{LAST}/model/config.json", empty, "commit 4 (step 4): .*config.json has 0 bytes, recorded were"),
        ("commits/00000004.json", nonsense, "00000004.json is not JSON"),
        ("commits/00000004.json", empty, "00000004.json is not JSON (0 bytes)"),
    ],
)
def test_a_damaged_commit_is_passed_over_and_said(
    job: Path,
    whole: dict[str, str],
    pattern: str,
    how: Callable[[Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (file,) = job.glob(pattern)
    how(file)
    assert verify(str(job)) != []
    resume(job)
    before, _, after = reason.partition(".*")
    (said, *_) = [text for text in caplog.messages if text.startswith("passed over: ")]
    assert before in said
    assert after.partition(" .* ")[0] in said
    assert (5, 4, 3) in history(job)  # step 4 was made again, from commit 3
    assert final_state(job) == whole


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (flip, "model.safetensors has sha256 .* its bytes changed; use the model of another commit"),
        (Path.unlink, "model.safetensors is missing; use the model of another commit"),
    ],
)
def test_a_damaged_model_is_neither_measured_nor_started_from(
    job: Path, how: Callable[[Path], None], words: str
) -> None:
    """An evaluation of noise looked like one of the model; so would a stage that begins from it."""
    taskset = "{name: fresh, dataset: spell_backward, dataset_args: {min_word_len: 3, max_word_len: 4}, num_tasks: 2}"
    (model,) = job.glob(f"{LAST}/model")
    how(model / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        asyncio.run(evaluate_checkpoint(config_of(job, f"buffer.explorer_input.eval_tasksets=[{taskset}]")))
    assert not (job / "evaluations").exists()
    from_there = (f"model.model_path={model}", "model.architecture=null", "model.tokenizer=null", "name=next")
    with pytest.raises(CheckpointError, match=words):
        resume(job, *from_there)
    (manifest,) = job.glob("commits/00000004.json")
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"global_step_00000004-\w+ is of no commit: it may be half written"):
        resume(job, *from_there)


def test_when_no_commit_is_left_the_job_is_refused_and_goes_on_when_one_is_back(
    job: Path, whole: dict[str, str]
) -> None:
    files = [*job.glob("checkpoints/*/model/model.safetensors")]
    kept = files[0].read_bytes()
    for file in files:
        flip(file)
    with pytest.raises(CheckpointError, match="every commit is damaged: commit 4") as caught:
        resume(job)
    assert all(f"commit {number} (step {number})" in str(caught.value) for number in range(1, 5))
    assert "Bring the objects back, or give the job a new name to start over" in str(caught.value)
    assert [number for number, _, _ in history(job)] == [1, 2, 3, 4]
    files[0].write_bytes(kept)
    resume(job)
    assert final_state(job) == whole


@pytest.mark.parametrize(
    ("name", "how", "kind", "words"),
    [
        ("job.json", nonsense, CheckpointError, "job.json does not say which job this is: .*restore it from a copy"),
        ("job.json", lambda file: file.write_text("{}"), CheckpointError, "job.json does not say which job this is"),
        ("job.json", later_format, CheckpointError, "job.json has format 99, this version reads up to 1; upgrade"),
        (
            "job.json",
            later_field,
            CheckpointError,
            "a config that this version of trinity-flows does not take: .*colour",
        ),
        ("lease/00000001.json", nonsense, StorageError, "00000001.json is not a lease: .*remove it if no run is alive"),
    ],
)
def test_a_damaged_identity_is_named_and_goes_on_when_it_is_back(
    job: Path, name: str, how: Callable[[Path], object], kind: type[Exception], words: str
) -> None:
    kept = (job / name).read_bytes()
    how(job / name)
    with pytest.raises(kind, match=f"(?s){words}"):
        resume(job)
    (job / name).write_bytes(kept)
    resume(job)
    assert describe(str(job)).step == 6


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("ledger/step_00000004.json", Path.unlink), ("experiences/main/explorer-00000003.parquet", None)],
)
def test_damaged_rows_of_a_step_that_is_made_again_are_named(
    job: Path, whole: dict[str, str], name: str, remedy: Callable[[Path], None] | None
) -> None:
    """Commit 4 is lost, so step 4 must take the same rows again, and these are damaged."""
    (job / "commits" / "00000004.json").unlink()
    kept = (job / name).read_bytes()
    flip(job / name) if remedy is None else nonsense(job / name)
    with pytest.raises(DataError, match=rf"{job / name}.*estore .* from a copy"):
        resume(job)
    assert [number for number, _, _ in history(job)] == [1, 2, 3]
    if remedy is None:
        (job / name).write_bytes(kept)
    else:
        remedy(job / name)
    resume(job)
    assert final_state(job) == whole


# -- another config, another run ---------------------------------------------------------------------------------------


def test_a_safe_change_is_taken_and_recorded(job: Path) -> None:
    resume(job, "algorithm.optimizer.lr=0.02")
    state = describe(str(job))
    assert state.step == 6
    changes = {change["field"]: (change["attempt"], change["before"], change["after"]) for change in state.changes}
    assert changes["algorithm.optimizer.lr"] == (2, 0.01, 0.02)
    assert changes["trainer.total_steps"] == (2, 4, 6)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("model.temperature=0.5", "model.temperature: 1.0 -> 0.5 (fork)"),
        ("seed=7", "seed: 42 -> 7 (fork)"),
        ("model.tokenizer.alphabet=abc", "model.tokenizer.alphabet: '' -> 'abc' (forbidden)"),
        ("model.architecture.hidden_size=32", "'hidden_size': 32, "),
    ],
)
def test_another_experiment_is_refused_with_both_values_and_what_to_do(
    job: Path, whole: dict[str, str], override: str, shown: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in job.rglob("*") if path.is_file() and "lease" not in path.parts}
    with pytest.raises(ConfigError, match="the job was started with another config") as caught:
        resume(job, override)
    assert shown in str(caught.value)
    assert "Go on with the config it was started with, or give the new experiment a name of its own" in str(
        caught.value
    )
    after = {path: path.stat().st_mtime_ns for path in job.rglob("*") if path.is_file() and "lease" not in path.parts}
    assert after == before
    resume(job)
    assert final_state(job) == whole


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_unharmed(job: Path, whole: dict[str, str]) -> None:
    async def session() -> None:
        first, second = Trainer(config_of(job)), Trainer(config_of(job))
        await first.prepare()
        with pytest.raises(
            LeaseLost, match=rf"small is held by pid {os.getpid()} on .* wait until it ends, or stop it"
        ):
            await second.prepare()
        await second.shutdown()
        await first.train()
        with pytest.raises(LeaseLost, match="is held by"):
            await second.prepare()
        await second.shutdown()
        await first.shutdown()

    asyncio.run(session())
    assert final_state(job) == whole
    assert verify(str(job)) == []


# -- stores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("{file}", "a file is where a folder must be; move it away or choose another folder"),
        ("{file}/runs", "a file is where a folder must be"),
        ("/proc/runs", "the folder cannot be made there; choose another folder"),
        ("s3://", "names no bucket; give s3://BUCKET/PREFIX"),
        ("s4://bucket/runs", "no driver for s4://"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(
    tmp_path: Path, root: str, words: str
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    root = root.format(file=file)
    with pytest.raises(StorageError) as caught:
        train(small_config(root, *EVERY_STEP))
    assert words in str(caught.value)
    assert root in str(caught.value)
    assert file.read_text() == "in the way"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "bucket s3://no-such-bucket does not exist or is not visible to these credentials; create it or"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, "the store does not answer; check AWS_ENDPOINT_URL_S3"),
        ({"AWS_ENDPOINT_URL_S3": "127.0.0.1:9000"}, "check AWS_ENDPOINT_URL_S3 (http://HOST:PORT)"),
        ({"AWS_PROFILE": "nobody", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "check the credentials"),
    ],
)
def test_a_wrong_bucket_endpoint_or_profile_is_named(
    s3_url: str, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(StorageError) as caught:
        train(small_config("s3://no-such-bucket/runs", *EVERY_STEP))
    assert words in str(caught.value)
    assert "s3://no-such-bucket" in str(caught.value)


def test_refused_credentials_are_named_at_once(
    s3_url: str, faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_s3.rule = lambda method, path, authorization: "403"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", faulty_s3.url)
    with pytest.raises(StorageError, match=r"no permission; check the credentials \(AWS_ACCESS_KEY_ID"):
        train(small_config(s3_url, *EVERY_STEP))
    assert len(faulty_s3.requests) < 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_the_run_keeps_its_commits_and_goes_on_with_room(
    small_disk: Path, job_root: Path, whole: dict[str, str]
) -> None:
    config = small_config(small_disk, *EVERY_STEP, WHOLE, f"monitor.tracking_uri=sqlite:///{job_root}/mlflow.db")
    with pytest.raises((CheckpointError, StorageError), match="the disk is full or the quota used up; free space"):
        train(config)
    url = str(small_disk / "tests" / "small")
    state = describe(url)
    assert 1 <= state.step < 6
    assert verify(url) == []
    subprocess.run(["mount", "-o", "remount,size=3m", small_disk], check=True)
    train(config)
    assert final_state(Path(url)) == whole
    assert verify(url) == []
