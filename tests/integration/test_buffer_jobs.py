"""Whole jobs on every kind of buffer: a failure and a resume change nothing, and every row is accounted for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError, EngineError, StarvedError
from tests.experience_rows import make_rows
from tests.fake_engine import FakeEngine
from tests.fake_job import fake_config
from tests.integration.job_digest import final_state, ledger, metrics
from tests.integration.small_job import train
from trinity_tasks import progress_watch
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.config import Config
from trinity_tasks.inspection import verify
from trinity_tasks.job import job_store

BUFFER = "buffer.trainer_input.experience_buffer"
STRATEGIES = {
    "fifo": [],
    "fresh": [f"{BUFFER}.max_staleness=4"],
    "newest": [f"{BUFFER}.sample_strategy=newest", f"{BUFFER}.capacity=12"],
    "priority": [
        f"{BUFFER}.sample_strategy=priority",
        f"{BUFFER}.replay_buffer={{sigma: 1.5, use_count_limit: 2, reuse_cooldown_steps: 1}}",
    ],
    "epochs": [f"{BUFFER}.sample_strategy=epochs", f"{BUFFER}.data_selector={{selector_type: shuffle}}"],
}
pytestmark = pytest.mark.integration


def write_data(config: Config) -> None:
    """10 shards of 3 groups of 2, by two writers, of versions that go up and down."""
    for writer in ("one", "two"):
        with ExperienceWriter(job_store(config), "main", writer) as new:
            for shard in range(5):
                new.write(make_rows(3, 2, batch=f"{writer}{shard}", version=(3 * shard) % 7))
            new.end()


def digest(config: Config, root: Path) -> Any:
    job = Path(job_store(config).url)
    return final_state(job), ledger(job), metrics(root, job)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_run_goes_on_as_if_nothing_had_happened(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    for name, failing in (("plain", ()), ("failing", (4, 6))):
        config = fake_config(tmp_path / name, "mode=train", *STRATEGIES[strategy])
        write_data(config)
        for step in failing:
            monkeypatch.setattr(FakeEngine, "fail_at", step)
            with pytest.raises(EngineError):
                train(config)
        monkeypatch.setattr(FakeEngine, "fail_at", None)
        train(config)
        found.append(digest(config, tmp_path / name))
        assert verify(job_store(config).url) == []
    assert found[0] == found[1]
    assert len(found[0][1]) == 6


def test_operators_drop_rows_and_the_ledger_says_which_were_paid_for(tmp_path: Path) -> None:
    """Rewards below 0.4 are dropped by the explorer: every generated row has trained, or is in its shard's notes."""
    config = fake_config(tmp_path, "buffer.operators=[{name: reward_filter, args: {threshold: 0.4}}]")
    train(config)
    store = job_store(config)
    reader, entries = ExperienceReader(store, "main"), [Ledger(store).read(step) for step in range(1, 7)]
    rows = [row for entry in entries for row in reader.read(entry.ref)]
    assert all(row.reward is not None and row.reward >= 0.4 for row in rows)
    dropped = sum(entry.dropped["reward_filter"][0] for entry in entries)
    assert dropped > 0
    shards = [info.name for info in store.list("experiences/main") if info.name.endswith(".parquet")]
    noted = [drop for shard in shards for drop in reader.notes(shard).get("dropped", [])]  # pyright: ignore
    assert len({drop[0] for drop in noted} | {row.eid.uid for row in rows}) == len(noted) + len(rows)
    assert {drop[1] for drop in noted} == {"reward_filter"}
    assert dropped <= len(noted)
    manifest = CheckpointStore(store).latest()
    assert manifest is not None
    tokens = sum(row.response_length for row in rows)
    assert (manifest.usage.trained, manifest.usage.reused) == (tokens, 0)
    assert manifest.usage.filtered == sum(entry.dropped["reward_filter"][1] for entry in entries)
    history = metrics(tmp_path, Path(store.url))
    assert sum(value for _, value in history["operator/reward_filter/num_dropped"]) == dropped
    assert history["usage/generated_tokens"][-1] == (6, tokens + manifest.usage.filtered)


def test_operators_that_leave_nothing_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "MAX_SHARDS_IN_VAIN", 5)
    config = fake_config(tmp_path, "buffer.operators=[{name: reward_filter, args: {threshold: 2}}]")
    with pytest.raises(StarvedError, match=r"5 explorer steps gave 0 exp.* operators dropped: reward_filter 20"):
        train(config)


def test_shards_that_no_checkpoint_needs_are_removed_and_the_job_still_resumes(tmp_path: Path) -> None:
    found: list[Any] = []
    for name in ("kept", "removed"):
        options = ["buffer.trainer_input.remove_consumed_shards=true"] if name == "removed" else []
        config = fake_config(tmp_path / name, "trainer.max_checkpoints_to_keep=1", *options)
        train(config)
        longer = fake_config(tmp_path / name, "trainer.max_checkpoints_to_keep=1", "trainer.total_steps=9", *options)
        train(longer)
        store = job_store(longer)
        shards = [info.name[-16:-8] for info in store.list("experiences/main") if info.name.endswith(".parquet")]
        assert shards == [f"{index:08d}" for index in range(0 if name == "kept" else 8, 9)]
        assert verify(store.url) == []
        found.append(final_state(Path(store.url)))
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match=r"trainer.max_checkpoints_to_keep = 0 keeps them all"):
        fake_config(tmp_path, "buffer.trainer_input.remove_consumed_shards=true")


def test_conversations_in_a_file_train_for_two_epochs(tmp_path: Path) -> None:
    """5 records in batches of 2: 2, 2, 1 in each of two epochs, and then the data has ended."""
    lines = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "ok" * (n + 1)}]}
        for n in range(5)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = fake_config(
        tmp_path,
        "mode=train",
        "algorithm={algorithm_type: sft}",
        "buffer.train_batch_size=2",
        "trainer.total_steps=null",
        f"{BUFFER}.data={{path: '{tmp_path / 'chats.jsonl'}'}}",
        f"{BUFFER}.sample_strategy=epochs",
        f"{BUFFER}.data_selector={{selector_type: shuffle}}",
        f"{BUFFER}.total_epochs=2",
    )
    train(config)
    store = job_store(config)
    entries = [Ledger(store).read(step) for step in Ledger(store).steps()]
    assert [entry.num_rows for entry in entries] == [2, 2, 1, 2, 2, 1]
    trained = Counter(row.response_text for e in entries for row in ExperienceReader(store, "main").read(e.ref))
    assert trained == {"ok" * (n + 1): 2 for n in range(5)}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{BUFFER}.capacity=3"], "capacity has no effect with sample_strategy: fifo"),
        (
            [f"{BUFFER}.sample_strategy=newest", f"{BUFFER}.capacity=1"],
            "capacity = 1 groups is less than a batch has",
        ),
        ([f"{BUFFER}.sample_strategy=epochs"], "epochs needs data that has ended; use mode: train"),
        ([f"{BUFFER}.data={{path: x.jsonl}}"], "mode: both samples the experiences that train"),
        (
            ["mode=train", f"{BUFFER}.data={{path: x.jsonl, schema_type: dpo}}"],
            "grpo cannot train on experience_buffer.data.schema_type: dpo; set it to sft",
        ),
        (["buffer.operators=[{name: reward_filtr}]"], "reward_filtr"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(fake_config(tmp_path, *overrides))
