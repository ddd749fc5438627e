"""What a row must be: types and lengths of its columns, and the check at the door, before anything is stored.

Owns: `RowLimits`, `validate`, `limit_fault`, the form of a refusal. Does not own: construction rules
(`engines.experience`), encoding (`trinity_tasks.buffer.shards`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from engines.errors import DataError
from engines.experience import Experience

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "tokens": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "action_mask": np.dtype(np.bool_),
    "token_level_reward": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "returns": np.dtype(np.float32),
    "teacher_logprobs": np.dtype(np.float32),
    "chosen": np.dtype(np.int32),
    "rejected": np.dtype(np.int32),
}
"""Array fields of an experience."""
PER_TOKEN: Final = ("logprobs", "action_mask", "token_level_reward", "advantages", "returns", "teacher_logprobs")
"""Array fields with one entry per response token."""
EXPERIENCE_TYPES: Final = frozenset({"single_turn", "multi_turn", "dpo"})
TRUNCATE_STATUSES: Final = frozenset({None, "prompt_truncated", "response_truncated"})

MESSAGES: Final = ("messages", "tools", "chosen_messages", "rejected_messages")
"""Lists of an experience that are kept as JSON, null when absent."""

_FLOATS: Final = tuple(name for name in PER_TOKEN if name != "action_mask")
_IDS: Final = ("tokens", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What the model of this job can take. None: not checked."""

    vocab_size: int | None = None
    """Token ids must be below it."""
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    max_model_len: int | None = None
    """Prompt and response together, tokens."""


NO_LIMITS: Final = RowLimits()


def validate(rows: Sequence[Experience], limits: RowLimits = NO_LIMITS) -> None:
    """Check every row at the door, before anything is stored.

    Raises DataError for the first bad row: its index, its EID, the reason.
    """
    for index, row in enumerate(rows):
        if fault := _shape_fault(row) or _facts_fault(row) or limit_fault(row, limits):
            raise refused(rows, index, fault)
    for name in _FLOATS:
        _check_flat(rows, name, np.isfinite, lambda value: f"is {value}; it must be finite")
    upper = np.iinfo(np.int32).max if limits.vocab_size is None else limits.vocab_size - 1
    reason = "it must not be negative" if limits.vocab_size is None else f"the vocabulary has ids 0 to {upper}"
    for name in _IDS:
        _check_flat(rows, name, lambda flat: (flat >= 0) & (flat <= upper), lambda value: f"is {value}; {reason}")


def check_groups(rows: Sequence[Experience]) -> None:
    """Rows of one `eid.tid` must be neighbours. Raises DataError for the first row that is apart from its group."""
    seen: set[str] = set()
    previous: str | None = None
    for index, row in enumerate(rows):
        group = row.eid.tid
        if group != previous and group in seen:
            fault = f"its group {group} began earlier and other rows came between; sort the rows by eid.tid"
            raise refused(rows, index, fault)
        seen.add(group)
        previous = group


def refused(rows: Sequence[Experience], index: int, fault: str) -> DataError:
    """The error for a row, named by its place and its EID."""
    return DataError(f"row {index} of {len(rows)}, experience {rows[index].eid.uid}: {fault}")


def _shape_fault(row: Experience) -> str | None:
    """Types, lengths, reward and group ids of one row, or None if they are right."""
    if row.eid.batch == "" or row.eid.task == "":
        return "it has no group: eid.batch and eid.task must be set, so that advantages know which rows belong together"
    if row.reward is not None and not math.isfinite(row.reward):
        return f"reward is {row.reward}; it must be finite, or None for unscored"
    num_tokens = len(row.tokens)
    if not num_tokens:
        return "tokens are empty"
    if row.experience_type not in EXPERIENCE_TYPES or row.truncate_status not in TRUNCATE_STATUSES:
        return f"experience_type {row.experience_type!r} with truncate_status {row.truncate_status!r} is not known"
    if row.prompt_length < 1 or row.prompt_length > num_tokens:
        return f"prompt_length is {row.prompt_length}; with {num_tokens} tokens it must be 1 to {num_tokens}"
    if row.experience_type == "dpo" and not (_size(row.chosen) and _size(row.rejected)):
        return "a dpo row needs the tokens of both chosen and rejected"
    if row.experience_type != "dpo" and row.action_mask is None:
        return "it has no action_mask, so that no token would train"
    expected = num_tokens - row.prompt_length
    if row.truncate_status == "prompt_truncated":
        expected = _size(row.action_mask)
    for name, dtype in DTYPES.items():
        value = getattr(row, name)
        if value is None:
            continue
        if value.dtype != dtype or value.ndim != 1:
            return f"{name} is {value.ndim}-dimensional {value.dtype}; it must be 1-dimensional {dtype}"
        if name in PER_TOKEN and len(value) != expected:
            return f"{name} has {len(value)} entries, the response has {expected} tokens"
    return None


def _facts_fault(row: Experience) -> str | None:
    """Types of what is kept as JSON, as far as training relies on them, or None if they are right."""
    version: Any = row.info.get("model_version", 0)
    if isinstance(version, bool) or not isinstance(version, int | np.integer):
        return f"info['model_version'] is {version!r}; it must be the train step of the weights, a whole number"
    for name, value in row.metrics.items():
        if not isinstance(cast("Any", value), int | float | np.number | np.bool_):
            return f"metrics[{name!r}] is {value!r}; the trainer averages metrics, so it must be a number"
    for name in MESSAGES:
        if not isinstance(getattr(row, name), list | tuple | None):
            return f"{name} is a {type(getattr(row, name)).__name__}; it must be a list"
    return None


def limit_fault(row: Experience, limits: RowLimits) -> str | None:
    """Which limit of the model the row goes beyond, in words; None if it fits."""
    if limits.max_prompt_tokens is not None and row.prompt_length > limits.max_prompt_tokens:
        return f"the prompt has {row.prompt_length} tokens, max_prompt_tokens is {limits.max_prompt_tokens}"
    response = max(row.response_length, _size(row.chosen), _size(row.rejected))
    if limits.max_response_tokens is not None and response > limits.max_response_tokens:
        return f"the response has {response} tokens, max_response_tokens is {limits.max_response_tokens}"
    if limits.max_model_len is not None and row.prompt_length + response > limits.max_model_len:
        return (
            f"prompt and response have {row.prompt_length + response} tokens, max_model_len is {limits.max_model_len}"
        )
    return None


def _size(value: npt.NDArray[Any] | None) -> int:
    return 0 if value is None else len(value)


def _check_flat(
    rows: Sequence[Experience],
    name: str,
    good: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
    describe: Callable[[Any], str],
) -> None:
    """Check one column over all rows at once; only a failure looks for its row."""
    owners = [(index, value) for index, row in enumerate(rows) if (value := getattr(row, name)) is not None]
    if not owners or good(np.concatenate([value for _, value in owners])).all():
        return
    for index, value in owners:
        if (bad := np.flatnonzero(~good(value))).size:
            raise refused(rows, index, f"{name}[{bad[0]}] {describe(value[bad[0]])}")
