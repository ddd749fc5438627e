"""Every error class, provoked through the product: its message says what, where, why and what to do, and it travels."""

import asyncio
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from engines import errors
from engines.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LeaseLost,
    StarvedError,
    StorageError,
    TrinityFlowsError,
)
from engines.hf.engine import HfEngine
from tests import held_job
from tests.experience_rows import make_rows
from tests.tiny_llama import engine_config, groups
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.source import BatchSource
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.config_source import load_config
from trinity_tasks.folders import DamagedFolder
from trinity_tasks.lease import Lease
from trinity_tasks.storage import DamagedObject, Storage


def unknown_key(folder: Path) -> None:
    file = folder / "job.yaml"
    file.write_text("mode: train\nmodel: {model_path: m}\ntrainer: {total_step: 3}\n")
    load_config(file)


def row_without_a_number(folder: Path) -> None:
    rows = make_rows(1, 2)
    rows[1].reward = float("nan")
    ExperienceWriter(Storage(str(folder)), "main", "agent").write(rows)


def damaged_commits(folder: Path) -> None:
    job = held_job.open_job(str(folder), folder / "staging")
    manifest = job.commit(10)
    held_job.flip(job.store, f"{manifest.prefix}/model/model.safetensors")
    try:
        job.checkpoints.restore_latest(folder / "restored")
    finally:
        job.checkpoints.close()
        job.lease.release()


def updates_that_are_not_finite(folder: Path) -> None:
    async def session() -> None:
        engine = HfEngine(engine_config(max_nonfinite_steps=1))
        try:
            await engine.prepare()
            rows = groups()
            assert rows[0].logprobs is not None
            rows[0].logprobs[0] = float("inf")
            await engine.train_step(rows)
        finally:
            await engine.shutdown()

    asyncio.run(session())


def file_in_the_way(folder: Path) -> None:
    (folder / "file").write_text("")
    Storage(str(folder / "file" / "runs")).check_writable()


def too_few_rows(folder: Path) -> None:
    store = Storage(str(folder))
    ExperienceWriter(store, "main", "agent").write(make_rows(1, 4))
    source = BatchSource(Fifo(ExperienceReader(store, "main"), 8), Ledger(store), timeout_s=0.05)
    asyncio.run(source.next_batch(3, Position(), attempt=1))


def held_by_another(folder: Path) -> None:
    with Lease.acquire(Storage(str(folder))):
        Lease.acquire(Storage(str(folder)))


PROVOKED: list[tuple[type[TrinityFlowsError], Callable[[Path], None], list[str]]] = [
    (ConfigError, unknown_key, ["{}/job.yaml", "trainer.total_step", "unknown key", "did you mean total_steps?"]),
    (DataError, row_without_a_number, ["row 1 of 2", "0/0/1/0/000001", "reward is nan", "correct the row or drop it"]),
    (
        CheckpointError,
        damaged_commits,
        ["{}: every commit is damaged", "model.safetensors", "sha256", "Bring the objects back, or give the job a new"],
    ),
    (
        EngineError,
        updates_that_are_not_finite,
        ["1 updates in a row were skipped", "trainer.max_nonfinite_steps = 1", "not finite", "lower the learning rate"],
    ),
    (StorageError, file_in_the_way, ["cannot create {}/file/runs/probe-", "Not a directory", "choose another folder"]),
    (
        StarvedError,
        too_few_rows,
        ["step 3 waited", "4 available, 0 filtered, 8 needed", "agent (shard 1 is next)", "Start a producer, or raise"],
    ),
    (LeaseLost, held_by_another, ["{} is held by pid", "last heartbeat", "wait until it ends, or stop it"]),
]


def provoke(kind: type[TrinityFlowsError], how: Callable[[Path], None], folder: Path) -> TrinityFlowsError:
    with pytest.raises(kind) as caught:
        how(folder)
    return caught.value


@pytest.mark.parametrize(("kind", "how", "words"), PROVOKED, ids=[kind.__name__ for kind, _, _ in PROVOKED])
def test_a_message_says_what_where_why_and_what_to_do(
    kind: type[TrinityFlowsError], how: Callable[[Path], None], words: list[str], tmp_path: Path
) -> None:
    error = provoke(kind, how, tmp_path)
    for each in words:
        assert each.format(tmp_path) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_every_class_is_provoked_here_and_has_one_base() -> None:
    defined = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert defined == {TrinityFlowsError, *(kind for kind, _, _ in PROVOKED)}
    assert all(issubclass(kind, TrinityFlowsError) for kind in defined)


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (ConfigError, ValueError),
        (DataError, ValueError),
        (CheckpointError, RuntimeError),
        (EngineError, RuntimeError),
        (StorageError, OSError),
        (StarvedError, TimeoutError),
        (LeaseLost, RuntimeError),
    ],
)
def test_each_class_is_also_what_python_programmers_expect(kind: type[Exception], standard: type[Exception]) -> None:
    assert issubclass(kind, standard)


def raised(error: Exception) -> None:
    raise error


def test_errors_cross_a_process_pool_with_their_messages() -> None:
    given = [kind(f"{kind.__name__}: what, where; do this") for kind, _, _ in PROVOKED]
    given += [DamagedObject("an object"), DamagedFolder("a folder")]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        came_back = [pool.submit(raised, error).exception() for error in given]
    assert [(type(error), str(error)) for error in came_back] == [(type(error), str(error)) for error in given]
