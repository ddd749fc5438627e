"""What users of systems like this one have reported, where no other test tries it.

Each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from engines.config import ModelConfig
from engines.errors import ConfigError, StarvedError
from engines.experience import EID, Experience
from engines.hf import model as hf_model
from engines.hf.engine import HfEngine
from tests.experience_rows import make_rows
from tests.fake_engine import FakeEngine
from tests.fake_job import fake_config
from tests.integration.job_digest import final_state
from tests.integration.small_job import train
from tests.tiny_llama import VOCABULARY, engine_config, groups, model_config
from tests.unit.test_buffer import CountingStorage, reader_of
from tests.unit.test_hf_engine import after_one_step, assert_equal_weights
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter, source
from trinity_tasks.buffer.cursor import Cursor, Position
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.source import BatchSource
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.inspection import describe, trace_step
from trinity_tasks.job import job_store, job_url
from trinity_tasks.storage import Storage
from trinity_tasks.weights import WeightStore

pytestmark = pytest.mark.integration


# -- resume, checkpoints, data -----------------------------------------------------------------------------------------


def test_a_run_that_ended_with_its_last_task_begins_with_the_first_again(job_root: Path) -> None:
    """A checkpoint at the very end of an epoch: the resumed run trained nothing, or the same tasks once more."""
    one_pass = ("buffer.batch_size=1", "buffer.explorer_input.taskset.num_tasks=12", "trainer.save_interval=6")
    train(fake_config(job_root, *one_pass, "trainer.total_steps=12"))
    twice = fake_config(job_root, *one_pass, "trainer.total_steps=24")
    train(twice)
    assert [commit.step for commit in describe(job_url(twice)).commits] == [6, 12, 18, 24]
    reader = ExperienceReader(job_store(twice), "main")
    ledger = Ledger(job_store(twice))
    tasks = [reader.read(ledger.read(step).ref)[0].info["task_index"] for step in range(1, 25)]
    questions = [trace_step(job_url(twice), step)["experiences"][0]["prompt"] for step in range(1, 25)]
    assert tasks == list(range(24))
    assert questions[:12] == questions[12:]
    assert set(Counter(questions).values()) == {2}


@pytest.mark.parametrize(
    "override",
    [
        "buffer.trainer_input.experience_buffer.name=other",
        "buffer.explorer_input.taskset.dataset=basic_arithmetic",
        "buffer.explorer_input.taskset.seed=1",
        "explorer.name=another",
    ],
)
def test_a_job_never_goes_on_with_other_data(job_root: Path, override: str) -> None:
    """The cursor counts rows of the old data: it would skip as many of the new."""
    train(fake_config(job_root, "trainer.total_steps=2"))
    with pytest.raises(ConfigError, match="the job was started with another config") as caught:
        train(fake_config(job_root, override))
    assert override.partition("=")[0] in str(caught.value)
    assert describe(job_url(fake_config(job_root))).step == 2


def test_a_resume_reads_nothing_that_was_consumed(tmp_path: Path) -> None:
    """Skipped batches were fetched again, or even sampled again: hours for a long job."""
    store = CountingStorage(str(tmp_path))
    writer = ExperienceWriter(store, "main", "explorer")
    for step in range(40):
        writer.write(make_rows(1, 2, batch=step))
    first = reader_of(store, writers=["explorer"])
    cursor = Cursor.start()
    for _ in range(38):
        claimed = first.claim(cursor, 2)
        assert claimed is not None
        cursor = claimed[1]
    store.calls.clear()
    resumed = reader_of(store, writers=["explorer"])
    claimed = resumed.claim(Cursor.from_json(cursor.to_json()), 2)
    assert claimed is not None
    assert {row.eid.uid.split("/")[0] for row in resumed.read(claimed[0])} == {"38"}
    assert {name[-10:-8] for kind, name in store.calls if kind == "read"} == {"38"}


def test_a_wait_for_data_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 rows for a batch of 32, and the trainer waited for ever without a word."""
    monkeypatch.setattr(source, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(source, "POLL_S", 0.01)
    store = Storage(str(tmp_path))
    ExperienceWriter(store, "main", "agent").write(make_rows(31, 1))
    batches = BatchSource(Fifo(ExperienceReader(store, "main"), 32), Ledger(store), timeout_s=0.1)
    with pytest.raises(StarvedError, match=r"step 1 waited .* s for experiences: 31 available, 0 filtered, 32 needed"):
        asyncio.run(batches.next_batch(1, Position(), attempt=1))
    said = [text for text in caplog.messages if "waits for experiences" in text]
    assert len(said) >= 2
    assert "31 available, 0 filtered, 32 needed; writers: agent" in said[0]
    assert Ledger(store).steps() == []


class NothingToLearn(FakeEngine):
    """Makes no update, as an engine does whose groups all have equal rewards."""

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        return await super().train_step(batch_exps) | {"update/num_applied": 0.0}


def test_steps_that_teach_nothing_are_told(job_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose rewards were all equal looked like any other, and ended as a success."""
    engine = f"trainer.trainer_type={__name__}:NothingToLearn"
    train(fake_config(job_root, "trainer.total_steps=25", "trainer.save_interval=0", engine))
    (said,) = [text for text in caplog.messages if "made no update" in text]
    assert said.startswith("fake: the last 10 steps up to step 10 made no update: there was nothing to learn from")


def test_how_old_the_trained_rows_are_is_measured(job_root: Path) -> None:
    """Nobody could tell the trainer's step from the sampler's. Weights are handed over every third step here."""
    keys = ("sample/model_version_min", "sample/model_version_mean", "sample/model_version_max", "sample/lag_max")
    seen: list[tuple[float, ...]] = []
    config = fake_config(job_root, "synchronizer={sync_method: memory, sync_interval: 3}")
    train(config, lambda step, metrics: seen.append(tuple(metrics[key] for key in keys)))
    assert seen == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (3, 3, 3, 0), (3, 3, 3, 1), (3, 3, 3, 2)]


def test_a_batch_of_mixed_age_is_as_old_as_its_oldest_row(job_root: Path) -> None:
    config = fake_config(job_root, "mode=train", "buffer.train_batch_size=4", "trainer.total_steps=1")
    writer = ExperienceWriter(job_store(config), "main", "agent")
    writer.write([*make_rows(1, 2, batch=0, version=0), *make_rows(1, 2, batch=1, version=6)])
    seen: list[dict[str, float]] = []
    train(config, lambda step, metrics: seen.append(dict(metrics)))
    (metrics,) = seen
    names = ("model_version_min", "model_version_mean", "model_version_max", "lag_max", "num_rows", "task_count")
    assert [metrics[f"sample/{name}"] for name in names] == [0, 3, 6, 0, 4, 2]


def test_local_copies_of_checkpoints_do_not_pile_up(job_root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The disk of a long job filled up with what had long been uploaded."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    found: list[int] = []
    config = fake_config(job_root, "trainer.save_interval=1", "trainer.total_steps=8")
    train(config, lambda step, metrics: found.append(len(list(temporary.glob("*/staged-*")))))
    assert max(found) <= 1  # the one that is on its way
    assert list(temporary.iterdir()) == []


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_interval", [0, 2])
def test_published_weights_are_those_of_their_step(job_root: Path, save_interval: int) -> None:
    """A published version had the content of another step, when a save and a transfer fell together."""
    config = fake_config(job_root, f"trainer.save_interval={save_interval}", "trainer.total_steps=4")
    saved = fake_config(job_root, "name=saved", "trainer.save_interval=1", "trainer.total_steps=4")
    for each in (config, saved):
        train(each)
    published = WeightStore(job_store(config))
    assert published.versions() == [2, 3, 4]  # older ones are collected, else they would fill the store
    for commit in describe(job_url(saved)).commits[1:]:
        folder = job_root / f"version-{commit.step}"
        published.fetch(commit.step, folder)
        of_step = (Path(commit.url) / "model" / "model.safetensors").read_bytes()
        assert (folder / "model.safetensors").read_bytes() == of_step


def test_who_reads_while_weights_are_published_gets_one_version_whole(tmp_path: Path) -> None:
    """Half old, half new: a sampler loaded while the trainer wrote."""
    store = Storage(str(tmp_path / "job"))
    newest = 25

    def publish() -> None:
        weights = WeightStore(store)
        for version in range(1, newest + 1):
            staged = tmp_path / f"staged-{version}"
            staged.mkdir()
            for part in range(3):
                (staged / f"part-{part}").write_text(f"{version} " * 200)
            weights.publish(staged, version)

    trainer = threading.Thread(target=publish)
    trainer.start()
    seen: list[int] = []
    weights = WeightStore(store)
    for number in itertools.count():
        alive = trainer.is_alive()
        if (latest := weights.latest()) is not None:
            folder = tmp_path / f"read-{number}"
            weights.fetch(latest.version, folder)
            content = {word for part in folder.iterdir() for word in part.read_text().split()}
            assert content == {str(latest.version)}
            seen.append(latest.version)
        if not alive:
            break
    assert seen == sorted(seen)
    assert seen[-1] == newest


# -- MLflow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "where"), [(math.nan, "loss/policy > -1e9"), (math.inf, "loss/policy > 1e30")])
def test_a_run_without_a_finite_loss_is_not_found_by_its_loss(
    job_root: Path, bad: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN counted as 0 in searches, infinity as the largest number: a diverged run was ranked best."""
    train(fake_config(job_root, "name=good"))
    step = FakeEngine.train_step

    async def diverged(self: FakeEngine, rows: list[Experience]) -> dict[str, float]:
        return {**await step(self, rows), "loss/policy": bad}

    monkeypatch.setattr(FakeEngine, "train_step", diverged)
    train(fake_config(job_root, "name=diverged"))
    client = MlflowClient(f"sqlite:///{job_root}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")

    def found(condition: str) -> list[str]:
        name, *rest = condition.split(" ")
        runs = client.search_runs([experiment.experiment_id], f"metrics.`{name}` {' '.join(rest)}")
        return [str(run.info.run_name) for run in runs]

    assert found("loss/policy < 1e9") == ["tests/good"]
    assert found(where) == (["tests/good"] if math.isnan(bad) else [])
    assert found("nonfinite/loss/policy > 0") == ["tests/diverged"]


# -- S3 ----------------------------------------------------------------------------------------------------------------


def read_in_a_fork(store: Storage, answer: Any) -> None:
    answer.send(store.read_bytes("before.txt"))
    store.write("after.txt", b"from the child")


def test_a_store_that_was_used_before_a_fork_works_after_it(s3_url: str) -> None:
    """The child inherited the event loop of the parent's client, whose thread it does not have, and hung."""
    store = Storage(s3_url)
    store.write("before.txt", b"from the parent")
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=read_in_a_fork, args=(store, theirs))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ours.recv() == b"from the parent"
    assert store.read_bytes("after.txt") == b"from the child"


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_text_beside_the_tokens_changes_nothing() -> None:
    """Text was encoded again to train on: other tokens than those that were sampled."""
    rows = groups()
    with_text = groups(prompt_text="something else", response_text="entirely")
    (one, one_weights), (other, other_weights) = (after_one_step(engine_config(), each) for each in (rows, with_text))
    assert one["loss/policy"] == other["loss/policy"]
    assert_equal_weights(one_weights, other_weights)


FROM_FOLDER = ModelConfig(max_model_len=64, model_path="the folder that the engine is given")


def test_the_end_of_a_turn_is_trained_where_it_is_also_the_padding(tmp_path: Path) -> None:
    """Tokenizers without a padding token pad with the end of turn: it was masked away, and models never stopped."""
    folder = tmp_path / "apart"
    loaded = hf_model.load(model_config(), None, seed=1)
    hf_model.save(loaded, folder)
    same = Path(shutil.copytree(folder, tmp_path / "same"))
    for file in (same / "tokenizer_config.json", same / "special_tokens_map.json"):
        if file.exists():
            content = json.loads(file.read_text())
            file.write_text(json.dumps({**content, "pad_token": content["eos_token"]}))
    assert hf_model.load(FROM_FOLDER, same, seed=1).pad_token_id == loaded.tokenizer.eos_token_id
    random = np.random.default_rng(5)
    end: Any = loaded.tokenizer.eos_token_id
    model: Any = loaded.model
    rows = []
    for task, run in itertools.product(range(2), range(3)):
        response = [*random.integers(5, VOCABULARY, 1 + 2 * run), end]
        rows.append(
            Experience(
                tokens=np.asarray([7, 8, *response], np.int32),
                prompt_length=2,
                eid=EID(batch=0, task=task, run=run, suffix=f"{run:06x}"),
                logprobs=np.full(len(response), -4.6, np.float32),
                reward=float(run),
            )
        )

    def step(model_dir: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        async def life() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
            engine = HfEngine(engine_config(model=FROM_FOLDER))
            engine.model_dir = model_dir
            received: list[Any] = []
            engine.weights_sink = lambda version, weights: received.append(weights)
            await engine.prepare()
            metrics = await engine.train_step(rows)
            engine.upload_state_dict()
            await engine.shutdown()
            return metrics, received[0]

        return asyncio.run(life())

    (apart, apart_weights), (padded, padded_weights) = step(folder), step(same)
    assert apart["loss/policy"] == padded["loss/policy"]
    assert_equal_weights(apart_weights, padded_weights)
    unmoved = model.get_input_embeddings().weight[end]
    assert not torch.equal(padded_weights["model.embed_tokens.weight"][end], unmoved)


def test_a_job_in_one_process_is_the_same_whichever_way_its_weights_travel(job_root: Path) -> None:
    """Through storage the samplers of the same process never got them: rows, and accuracies, of the initial model."""
    for method in ("memory", "checkpoint"):
        train(fake_config(job_root, f"name={method}", f"synchronizer.sync_method={method}"))
    assert final_state(job_root / "tests" / "memory") == final_state(job_root / "tests" / "checkpoint")
