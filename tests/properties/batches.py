"""Batches for any algorithm, made from what it needs; their shapes are drawn by hypothesis, their contents from a seed.

Owns: what rows look like. Does not own: the models that read them (`tests.properties.small_models`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from engines.algorithms.spec import Algorithm, Gigpo, StepWiseGrpo
from engines.experience import EID, Experience
from engines.intake import Limits

VOCABULARY = 11
MAX_RESPONSE = 6
"""Tokens."""
LIMITS = Limits(vocab_size=VOCABULARY, max_model_len=16, max_response_tokens=MAX_RESPONSE)
REWARDS = (-1.0, 0.0, 0.35, 1.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many rows there are, and how long."""

    groups: tuple[tuple[int, ...], ...]
    """Response tokens of each row of each group."""
    seed: int
    """Of everything else."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return sum(len(group) for group in self.groups)


_LENGTHS = st.integers(1, MAX_RESPONSE)
_GROUPS = st.lists(_LENGTHS, min_size=1, max_size=4).map(tuple)


USUAL = ((3, 2, 5, 1), (1,), (2, 6, 4))
"""A group of one and rows of one token beside others."""


def shapes(min_groups: int = 1) -> st.SearchStrategy[Shape]:
    """Ragged batches of up to three groups of up to four rows; the simplest one to begin with is the usual one."""
    drawn = st.lists(_GROUPS, min_size=min_groups, max_size=3).map(tuple)
    return st.builds(Shape, st.one_of(st.just(USUAL), drawn), st.integers(0, 2**32 - 1))


def is_stepwise(algorithm: Algorithm) -> bool:
    """Whether rows are steps of runs."""
    return isinstance(algorithm.advantage, StepWiseGrpo | Gigpo)


def batch(algorithm: Algorithm, shape: Shape, vocab_size: int = VOCABULARY) -> list[Experience]:
    """Rows that this algorithm accepts: random tokens, rewards, masks; what it needs beside them."""
    random = np.random.default_rng(shape.seed)
    rows: list[Experience] = []
    for task, lengths in enumerate(shape.groups):
        prompt = random.integers(0, vocab_size, random.integers(1, 4))
        baseline = float(random.normal())
        for run, length in enumerate(lengths):
            if "pairs" in algorithm.needs:
                rows.append(_pair(random, prompt, length, EID(0, task, run, suffix=f"{run:06x}"), vocab_size))
                continue
            run, step = (run // 2, run % 2) if is_stepwise(algorithm) else (run, 0)
            eid = EID(0, task, run, step, suffix=f"{run:06x}")
            row = _row(random, prompt, length, eid, vocab_size, algorithm)
            row.info |= {"reward_baseline": baseline}
            rows.append(row)
    return rows


def _pair(random: np.random.Generator, prompt: Any, length: int, eid: EID, vocab_size: int) -> Experience:
    responses: dict[str, Any] = {
        name: random.integers(0, vocab_size, size)
        for name, size in (("chosen", length), ("rejected", random.integers(1, MAX_RESPONSE + 1)))
    }
    return Experience(tokens=prompt, eid=eid, **responses)


def _row(
    random: np.random.Generator, prompt: Any, length: int, eid: EID, vocab_size: int, algorithm: Algorithm
) -> Experience:
    reward = float(random.choice(REWARDS) - 1e-3 * random.random())  # no two are equal
    fields: dict[str, Any] = {
        "tokens": np.concatenate([prompt, random.integers(0, vocab_size, length)]),
        "prompt_length": len(prompt),
        "eid": eid,
        "reward": reward,
        "logprobs": random.uniform(-4, -0.5, length),
        "teacher_logprobs": random.uniform(-4, -0.5, length),
        "info": {"env_state_hash": str(random.integers(0, 3))},
    }
    if random.random() < 0.4:
        fields["action_mask"] = random.random(length) < 0.6
    if random.random() < 0.25:
        fields["truncate_status"] = "response_truncated"
    if random.random() < 0.25 and not is_stepwise(algorithm):
        fields["token_level_reward"] = random.normal(size=length)
    if eid.run % 2:
        fields["info"]["step_reward"] = float(random.normal())
    if "expert_rows" in algorithm.needs and random.random() < 0.4:
        fields |= {"reward": None, "logprobs": None, "token_level_reward": None}
        fields["info"]["is_expert"] = True
    return Experience(**fields)


def shuffled(rows: Sequence[Experience], seed: int) -> list[Experience]:
    """The same rows in another order."""
    return [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]


def changed(rows: Sequence[Experience], change: Callable[[Experience], None]) -> list[Experience]:
    """Copies of the rows, each changed in place."""
    copies = [_copied(row) for row in rows]
    for row in copies:
        change(row)
    return copies


def _copied(row: Experience) -> Experience:
    """With arrays and facts of its own; `copy.deepcopy` takes as long as a train step here."""
    fresh = copy.copy(row)
    for field in dataclasses.fields(row):
        if isinstance(value := getattr(row, field.name), np.ndarray | dict):
            setattr(fresh, field.name, value.copy())
    return fresh


def doubled(rows: Sequence[Experience]) -> list[Experience]:
    """The rows and, as other tasks, the same again."""

    def renamed(row: Experience) -> None:
        row.eid = dataclasses.replace(row.eid, task=f"again {row.eid.task}")
        row.info |= {"env_state_hash": f"again {row.info.get('env_state_hash')}"}

    return [*rows, *changed(rows, renamed)]
