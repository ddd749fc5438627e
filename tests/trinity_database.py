"""Experience databases as Trinity-RFT 0.6.0 and older releases write them, from stand-ins of its classes."""

import pickle
import sqlite3
import struct
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

MODULE = "trinity.common.experience"
TENSORS = ("tokens", "logprobs", "token_level_reward", "advantages", "returns", "action_mask", "chosen", "rejected")


@dataclass
class EID:
    """Attributes as in Trinity-RFT."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = "abcdef"


@dataclass
class Experience:
    """Attributes as in Trinity-RFT, without its constructor."""

    eid: EID = field(default_factory=EID)
    tokens: Any = None
    prompt_length: int = 1
    logprobs: Any = None
    reward: Any = None
    token_level_reward: Any = None
    advantages: Any = None
    returns: Any = None
    truncate_status: str | None = None
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    response_text: str | None = None
    prompt_text: str | None = None
    action_mask: Any = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chosen: Any = None
    rejected: Any = None
    chosen_messages: list[Any] | None = None
    rejected_messages: list[Any] | None = None
    multi_modal_inputs: dict[str, Any] | None = None
    teacher_logprobs: Any = None
    routed_experts: Any = None
    custom_fields: list[Any] = field(default_factory=list[Any])
    experience_type: str = "single_turn"


for each in (EID, Experience):
    each.__module__ = MODULE


def sampled(batch: int | str, task: int | str, run: int, *, version: int = 3, **fields: Any) -> Experience:
    """One of the samples of a task, with numbers that follow from where it is from."""
    first = 1 + run
    return Experience(
        **{
            "eid": EID(batch, task, run, 0, f"{run:06x}"),
            "tokens": torch.tensor([first, 2, 3, 4, 5], dtype=torch.int32),
            "prompt_length": 2,
            "logprobs": torch.tensor([-0.1, -0.2, -0.3 - run]),
            "reward": 0.5 * run,
            "action_mask": torch.tensor([True, False, True]),
            "info": {"model_version": version, "task_index": {"taskset_id": 0, "index": 7}},
            "metrics": {"accuracy": 1.0},
            "response_text": "r",
            "messages": [{"role": "user", "content": "\u00e9"}],
            **fields,
        }
    )


@contextmanager
def stand_ins() -> Iterator[None]:
    """The classes are importable by their name in Trinity-RFT, as pickling needs."""
    module = types.ModuleType(MODULE)
    module.EID, module.Experience = EID, Experience  # type: ignore[attr-defined]
    parents = {name: types.ModuleType(name) for name in ("trinity", "trinity.common")}
    sys.modules.update({**parents, MODULE: module})
    try:
        yield
    finally:
        for name in (*parents, MODULE):
            del sys.modules[name]


def old_blob(experience: Experience, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    """A pickle of the object."""
    with stand_ins():
        return pickle.dumps(experience, protocol)


def blob(experience: Experience) -> bytes:
    """Plain fields pickled, tensors as safetensors."""
    names = [name for name in vars(experience) if name not in (*TENSORS, "experience_type", "multi_modal_inputs")]
    item = {name: getattr(experience, name) for name in names if name not in ("teacher_logprobs", "routed_experts")}
    item |= {"eid": vars(experience.eid), "multi_modal_input_keys": []}
    given = {name: getattr(experience, name) for name in (*TENSORS, "teacher_logprobs", "routed_experts")}
    tensors = save({f"0:{name}": value.contiguous() for name, value in given.items() if value is not None})
    meta = pickle.dumps({"version": 1, "num_items": 1, "items": [item]}, pickle.HIGHEST_PROTOCOL)
    return b"TRXP\x01" + struct.pack("<QQ", len(meta), len(tensors)) + meta + tensors


def about(experience: Experience) -> tuple[Any, ...]:
    """Columns that are kept beside a blob."""
    eid = experience.eid
    return (str(eid.task), eid.run, eid.suffix, experience.info.get("model_version"), experience.reward)


def write_database(path: Path, experiences: Sequence[Experience], table: str = "exps") -> Path:
    """The tables of 0.6.0: one to search, one of blobs."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, task_id "
            "VARCHAR(64), run_id INTEGER, msg_id VARCHAR(64), model_version INTEGER, reward FLOAT, consumed INTEGER)"
        )
        database.execute(f"CREATE TABLE {table}_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB NOT NULL)")
        for index, experience in enumerate(experiences, 1):
            values = (index, *about(experience))
            columns = "id, task_id, run_id, msg_id, model_version, reward"
            database.execute(f"INSERT INTO {table} ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
            database.execute(f"INSERT INTO {table}_blob VALUES (?, ?)", (index, blob(experience)))
    return path


def write_old_database(path: Path, blobs: Sequence[bytes], table: str = "exps") -> Path:
    """The one table of older releases."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, message_list JSON, experience_bytes BLOB)")
        for index, data in enumerate(blobs, 1):
            database.execute(f"INSERT INTO {table} VALUES (?, NULL, ?)", (index, data))
    return path
