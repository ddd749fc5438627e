"""The table of rollouts: which rows it has, how short they are, that it is bounded, and when it is published."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from engines.experience import EID, Experience
from flows import live_artifacts
from flows.live_artifacts import Content, LiveArtifact, artifact_key
from flows.rollouts import MAX_ROWS, MAX_TEXT, Rollouts, extremes


def row(run: int, reward: float | None, **fields: Any) -> Experience:
    given: dict[str, Any] = {"info": {"model_version": 4}, "prompt_text": "spell cat", "response_text": f"answer {run}"}
    tokens: Any = range(5 + run)
    return Experience(tokens=tokens, prompt_length=4, eid=EID(3, 7, run), reward=reward, **(given | fields))


def runs(rows: list[Experience]) -> list[int]:
    return [row.eid.run for row in rows]


def test_the_rows_are_those_with_the_lowest_and_the_highest_reward() -> None:
    assert runs(extremes([row(0, 0.5), row(1, None), row(2, 0.9), row(3, 0.1), row(4, 0.9), row(5, 0.1)])) == [3, 2]
    assert runs(extremes([row(0, None), row(1, 0.5), row(2, 0.5)])) == [1]
    assert runs(extremes([row(0, None), row(1, None)])) == [0]
    assert extremes([]) == []


def test_a_row_is_shown_whole_or_shortened() -> None:
    rollouts = Rollouts("rft")
    assert rollouts.content() is None
    long = "x" * (MAX_TEXT + 1)
    rollouts.update(9, [row(0, 0.25), row(2, float("inf"), response_text=long, info={}, prompt_text=None)])
    assert rollouts.rows() == [
        {"step": 9, "task": "3/7", "prompt": "spell cat", "response": "answer 0", "reward": 0.25,
         "response_length": 1, "policy_version": 4},
        {"step": 9, "task": "3/7", "prompt": None, "response": "x" * (MAX_TEXT - 3) + "...", "reward": None,
         "response_length": 3, "policy_version": None},
    ]  # fmt: skip
    content = rollouts.content()
    assert content is not None
    assert json.loads(content.data) == rollouts.rows()
    assert content.description == "rft: lowest and highest reward of each step, up to step 9"


def test_the_newest_rows_stay() -> None:
    rollouts = Rollouts("rft")
    for step in range(1, 41):
        rollouts.update(step, [row(0, 0.0), row(1, 1.0)])
    assert len(rollouts.rows()) == MAX_ROWS == 50
    assert [shown["step"] for shown in rollouts.rows()] == [step for step in range(40, 15, -1) for _ in range(2)]


class Client:
    """Keeps artifacts as a Prefect server does, and refuses while it is down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.is_down = False

    def create_artifact(self, artifact: Any) -> Any:
        if self.is_down:
            raise OSError("down")
        self.calls.append((f"create {artifact.type} {artifact.key}", artifact.data))
        return SimpleNamespace(id=len(self.calls))

    def update_artifact(self, artifact_id: int, artifact: Any) -> None:
        self.calls.append((f"update {artifact_id}", artifact.data))


def test_an_artifact_is_published_when_it_is_new_and_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown, client = [100.0], [None, "a", "a", "b", "c", "c"], Client()
    monkeypatch.setattr(live_artifacts.time, "monotonic", lambda: now[0])
    contents = iter(shown)

    def content() -> Content | None:
        data = next(contents)
        return None if data is None else Content(data, "")

    artifact = LiveArtifact("table", artifact_key("rollouts", "A b/c_1"), content, 10.0)
    for passed, is_last, calls in [
        (0, False, 0),  # nothing to show
        (0, False, 1),  # a
        (10, False, 1),  # a again
        (5, False, 2),  # b, 15 s after a
        (5, False, 2),  # too early to ask
        (1, True, 3),  # c, the last one
        (9, True, 3),  # c again
    ]:
        now[0] += passed
        artifact.publish(client, None, is_last=is_last)
        assert len(client.calls) == calls
    assert client.calls == [("create table rollouts-a-b-c-1", "a"), ("update 1", "b"), ("update 1", "c")]


def test_what_could_not_be_published_is_tried_again() -> None:
    client = Client()
    client.is_down = True
    artifact = LiveArtifact("table", "rollouts-x", lambda: Content("a", ""), 0.0)
    with pytest.raises(OSError, match="down"):
        artifact.publish(client, None, is_last=False)
    client.is_down = False
    artifact.publish(client, None, is_last=False)
    artifact.publish(client, None, is_last=True)
    assert client.calls == [("create table rollouts-x", "a")]
