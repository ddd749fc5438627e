"""`trinity-flows experiences`, as a user meets it: what it says of a trained job is what the ledger says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.experience_rows import make_rows
from tests.fake_job import STAGES, fake_config
from tests.integration.command import Ended, Workplace
from tests.integration.small_job import train
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.shards import decode
from trinity_tasks.inspection import trace_step
from trinity_tasks.storage import Storage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

JOB = "runs/tests/fake"
NUM_STEPS, NUM_TRAINED, NUM_WAITING = 6, 24, 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Workplace:
    """A job that has trained all its explorer's rows, and none of those that another writer came with later."""
    place = Workplace.make(tmp_path_factory.mktemp("browsed"), empty_database)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place.folder.parent / "cache"))
        train(fake_config(place.folder / "runs"))
    store = Storage(str(place.folder / JOB))
    ExperienceWriter(store, "main", "late").write(make_rows(2, 3, batch="late", version=9))
    ExperienceWriter(store, "spare", "late").write(make_rows(1, 1))
    return place


@pytest.fixture(scope="module")
def ledger(place: Workplace) -> list[dict[str, Any]]:
    """The rows that the job has trained, in order."""
    url = str(place.folder / JOB)
    return [row for step in range(1, NUM_STEPS + 1) for row in trace_step(url, step)["experiences"]]


def good(ended: Ended) -> Ended:
    assert (ended.code, ended.err, ended.left_behind) == (0, "", ())
    return ended


def refused(ended: Ended, code: int, *words: str) -> None:
    """One clear message on stderr, and the same as the one object that --json promises."""
    error = ended.json["error"]
    assert (ended.code, error["exit_code"]) == (code, code)
    assert ended.err == f"{error['type']}: {error['message']}\n"
    for word in words:
        assert word in error["message"]


def test_the_object_says_what_the_ledger_says(place: Workplace, ledger: list[dict[str, Any]]) -> None:
    found = good(place.run("experiences", JOB, "--where", "writer == 'explorer'", "--json")).json
    assert (found["url"], found["buffer"], found["buffers"]) == (str(place.folder / JOB), "main", ["main", "spare"])
    assert (found["num_shards"], found["num_rows"], found["num_groups"]) == (
        NUM_STEPS + 1,
        NUM_TRAINED,
        NUM_TRAINED / 2,
    )
    assert found["standing"] == {"trained": NUM_TRAINED, "recorded": 0, "passed": 0, "waiting": 0}
    rewards = np.array([row["reward"] for row in ledger])
    assert len(set(rewards)) > 6
    assert (found["reward"]["mean"], found["reward"]["std"]) == (
        pytest.approx(rewards.mean()),
        pytest.approx(rewards.std()),
    )
    assert found["reward"]["quantiles"]["0.25"] == pytest.approx(np.quantile(rewards, 0.25))
    assert sum(bar["count"] for bar in found["reward"]["bars"]) == NUM_TRAINED
    versions = pd.Series([row["model_version"] for row in ledger])
    assert found["policy_versions"]["median"] == versions.median()
    assert found["policy_versions"]["num_rows"] == {str(v): n for v, n in versions.value_counts().sort_index().items()}
    by_uid = {row["eid"]: row for row in ledger}
    assert [row["reward"] for row in found["samples"]] == sorted(row["reward"] for row in found["samples"])
    assert (found["samples"][0]["reward"], found["samples"][-1]["reward"]) == (rewards.min(), rewards.max())
    for sample in found["samples"]:
        row = by_uid[sample["uid"]]
        assert (sample["reward"], sample["prompt"], sample["response"]) == (
            row["reward"],
            row["prompt"],
            row["response"],
        )
        assert sample["prompt_length"] + sample["response_length"] == row["num_tokens"]


def test_the_text_fits_the_terminal_and_says_the_same(place: Workplace, ledger: list[dict[str, Any]]) -> None:
    lines = good(place.run("experiences", JOB, "--samples", "3")).out.splitlines()
    assert lines[:2] == [f"{place.folder / JOB}, buffer main", "other buffers: spare"]
    assert f"{NUM_TRAINED + NUM_WAITING} rows in 14 groups; the buffer has 7 shards" in lines
    assert f"by writer: explorer {NUM_TRAINED}, late {NUM_WAITING}" in lines
    standing = f"trained: {NUM_TRAINED}; in the ledger after the last commit: 0; left behind untrained: 0"
    assert f"{standing}; not taken yet: {NUM_WAITING}" in lines
    assert (
        f"policy version: min 0, median {np.median([r['model_version'] for r in ledger] + [9] * 6):g}, max 9" in lines
    )
    head = next(number for number, line in enumerate(lines) if line.startswith("uid "))
    assert lines[head].split() == ["uid", "reward", "version", "tokens", "prompt", "response"]
    assert len(lines[head:]) == 4
    assert max(map(len, lines[head:])) <= 80
    late = {f"late/{task}/{run}/0/{run:06x}" for task in range(2) for run in range(3)}
    assert {line.split()[0] for line in lines[head + 1 :]} < late | {row["eid"] for row in ledger}
    assert any("State the fi" in line and "..." in line for line in lines[head:])
    assert good(place.run("experiences", JOB, "--samples", "3")).out.splitlines() == lines


def test_a_condition_a_picture_and_copies(place: Workplace, ledger: list[dict[str, Any]]) -> None:
    middle = float(np.median([row["reward"] for row in ledger]))
    where = ("--where", f"reward > {middle} and model_version < 9 and response_length >= 1")
    expected = [row["eid"] for row in ledger if row["reward"] > middle]
    assert 0 < len(expected) < NUM_TRAINED
    good(place.run("experiences", JOB, *where, "--export", "out/good.jsonl", "--png", "out/rewards.png"))
    lines = [json.loads(line) for line in (place.folder / "out/good.jsonl").read_text().splitlines()]
    assert [line["uid"] for line in lines] == expected
    assert all(len(line["logprobs"]) == len(line["tokens"]) - line["prompt_length"] for line in lines)
    assert (place.folder / "out/rewards.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    found = good(place.run("experiences", JOB, *where, "--export", "out/good.parquet", "--json")).json
    assert (found["export"], found["num_exported"]) == (str(place.folder / "out/good.parquet"), len(expected))
    copied = decode((place.folder / "out/good.parquet").read_bytes(), "copy")
    assert [row.eid.uid for row in copied.rows(0, copied.num_rows)] == expected
    assert pd.read_parquet(place.folder / "out/good.parquet")["reward"].min() > middle
    refused(
        place.run("experiences", JOB, "--export", "out/good.parquet", "--json"), 2, "exists, and nothing is overwritten"
    )


def test_damaged_shards_are_named_and_the_command_fails(place: Workplace, tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(place.folder / JOB, job)
    file = job / "experiences/main/explorer-00000002.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    (job / "experiences/main/explorer-00000004.parquet").unlink()
    ended = place.run("experiences", str(job), "--export", str(tmp_path / "rest.jsonl"), "--json")
    assert ended.code == 1
    assert [shard["name"] for shard in ended.json["damaged"]] == [
        f"experiences/main/explorer-0000000{index}.parquet" for index in (2, 4)
    ]
    assert ended.json["num_exported"] == NUM_TRAINED - 8 + NUM_WAITING
    text = place.run("experiences", str(job))
    assert text.code == 1
    assert "2 damaged shards, whose rows are not counted:" in text.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--where", "rewrd > 0"), ("no column rewrd; did you mean reward?", "Columns: uid, batch,")),
        (("--where", "__import__('os').system('touch caught') == 0"), ("is not allowed", "allowed are columns")),
        (("--where", "@reward > 0"), ("cannot be understood",)),
        (("--buffer", "spar"), ("buffer 'spar' has no shards; did you mean spare?",)),
        (("--export", "rows.csv"), ("an export is .parquet or .jsonl",)),
    ],
)
def test_wrong_usage_is_code_2(place: Workplace, arguments: tuple[str, str], words: tuple[str, ...]) -> None:
    refused(place.run("experiences", JOB, *arguments, "--json"), 2, *words)
    assert not (place.folder / "caught").exists()


def test_a_job_with_stages_names_them(tmp_path: Path, empty_database: Path) -> None:
    place = Workplace.make(tmp_path, empty_database)
    staged = fake_config(place.folder / "runs", STAGES)
    store = Storage(str(place.folder / JOB))
    for folder, config in (("", staged), ("sft/", staged.stage("sft"))):
        record = {"job_id": "j", "created_at": "", "config_fingerprint": "", "code_version": ""}
        store.write_json(f"{folder}job.json", {**record, "config": config.model_dump(mode="json")})
    refused(place.run("experiences", JOB, "--json"), 2, f"has stages, name one of them: {store.url}/sft")
    refused(place.run("experiences", "nowhere", "--json"), 2, "no job here (job.json is missing)")
    assert good(place.run("experiences", f"{JOB}/sft", "--json")).json["num_rows"] == 0
