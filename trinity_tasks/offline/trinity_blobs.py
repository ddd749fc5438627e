"""One experience of Trinity-RFT, as it stores it: a blob or a line of JSON becomes fields, and these an `Experience`.

Owns: the layout of a blob, which fields our rows can hold, that they hold them exactly. Does not own: pickles and
tensors (`pickled.py`, `tensors.py`), where blobs lie (`trinity_db.py`).

A blob is b"TRXP", a version, a pickle of plain fields, and the tensors as safetensors. Older ones are one pickle of the
whole object. Nothing in either is executed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np

from engines.errors import DataError
from engines.experience import EID, Experience
from trinity_tasks.buffer.row_checks import DTYPES, EXPERIENCE_TYPES
from trinity_tasks.offline.pickled import MAX_BITS, Call, plain, read_pickle
from trinity_tasks.offline.tensors import TENSOR_NAMES, exactly, is_tensor, number, read_safetensors, tensor

Fields = dict[str, Any]
"""Attributes of an experience by name: arrays, plain values, and the parts of its identity under `eid`."""

_MAGIC: Final = b"TRXP"
_VERSION: Final = 1
_HEADER_BYTES: Final = 21
"""Magic (4), version (1), bytes of the pickle (8), bytes of the tensors (8)."""
_EXPERIENCE: Final = "trinity.common.experience.Experience"
_EID: Final = "trinity.common.experience.EID"
_NAMES: Final = TENSOR_NAMES | {_EXPERIENCE, _EID}

MAX_FLOAT_BITS: Final = 53
"""Whole numbers up to so many bits are the same as float64."""

_TEXTS: Final = frozenset(("prompt_text", "response_text", "truncate_status"))
_LISTS: Final = frozenset(("messages", "tools", "chosen_messages", "rejected_messages"))
_DICTS: Final = frozenset(("info", "metrics"))
_KNOWN: Final = frozenset((*DTYPES, *_TEXTS, *_LISTS, *_DICTS, "eid", "prompt_length", "reward", "experience_type"))


def read_blob(data: bytes) -> Fields:
    """The fields of a stored experience. Raises DataError."""
    if not data.startswith(_MAGIC):
        return _read_object(data)
    if len(data) < _HEADER_BYTES:
        raise DataError(f"its {len(data)} bytes are less than its header; it was cut")
    version, num_pickled = data[4], int.from_bytes(data[5:13], "little")
    if version != _VERSION:
        raise DataError(f"it is of version {version}, known is {_VERSION}; upgrade trinity-flows")
    end = _HEADER_BYTES + num_pickled
    if len(data) != end + int.from_bytes(data[13:21], "little"):
        raise DataError(f"its {len(data)} bytes are not those that its header tells of; it was cut")
    pickled = _only_pickle(data[_HEADER_BYTES:end])
    arrays = read_safetensors(data[end:])
    items = _as_list((as_mapping(pickled) or {}).get("items"))
    item = as_mapping(items[0]) if len(items) == 1 else None
    if item is None:
        raise DataError("it does not hold one experience")
    fields: Fields = {name: value for name, value in item.items() if value is not None}
    for name, array in arrays.items():
        index, _, field = name.partition(":")
        if index != "0":
            raise DataError(f"it has a tensor {name!r} of another experience")
        fields[field] = array
    return _plain_fields(fields)


def _read_object(data: bytes) -> Fields:
    """A pickle of the object itself."""
    value = _only_pickle(data)
    state = as_mapping(value.state) if isinstance(value, Call) and value.path == _EXPERIENCE else None
    if state is None or value.arguments:
        raise DataError("it is a pickle, and not of one experience")
    fields: Fields = {name: part for name, part in state.items() if part is not None}
    eid = fields.get("eid")
    if isinstance(eid, Call) and eid.path == _EID and not eid.arguments:
        fields["eid"] = eid.state
    for name in DTYPES:
        if is_tensor(fields.get(name)):
            fields[name] = tensor(fields[name])
    return _plain_fields(fields)


def _only_pickle(data: bytes) -> Any:
    stream = io.BytesIO(data)
    value = read_pickle(stream, _NAMES)
    if left := len(data) - stream.tell():
        raise DataError(f"{left} bytes follow its pickle; it is damaged")
    return value


def _plain_fields(fields: Fields) -> Fields:
    """Arrays as they are, everything else as JSON has it."""
    return {
        name: value if isinstance(value, np.ndarray) else _plain_field(name, value) for name, value in fields.items()
    }


def _plain_field(name: str, value: Any) -> Any:
    if name not in _KNOWN:
        return value
    try:
        return plain(value, number)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def read_line(line: Mapping[str, Any]) -> Fields:
    """The fields of an experience that was written as JSON. Raises DataError."""
    if line.get("tokens") is None:
        raise DataError(
            "there are no tokens: Trinity-RFT's JSON lines keep texts and rewards, and leave out tokens, masks and "
            "logprobs, so the experience cannot be had back. Import its sqlite database; or, to imitate the texts, "
            "import the lines with format: jsonl"
        )
    fields: Fields = {name: value for name, value in line.items() if value is not None}
    fields.pop("response_length", None)
    if "type" in fields:
        fields["experience_type"] = fields.pop("type")
    for name in DTYPES:
        if name in fields:
            fields[name] = _array_of(name, fields[name])
    return fields


def _array_of(name: str, value: Any) -> Any:
    if (items := _as_list(value)) is not value:
        raise DataError(f"{name} is not a list of numbers")
    kinds: set[type] = {type(item) for item in items}
    if not kinds <= {bool, int, float}:
        raise DataError(f"{name} is not a list of numbers")
    try:
        made = np.asarray(items, np.float64 if float in kinds else np.int64)
    except OverflowError as error:
        raise DataError(f"{name} has a number that no array has: {error}") from error
    if made.tolist() != items:
        raise DataError(f"{name} has a number that float64 has not")
    return made


def identity(fields: Fields) -> EID:
    """Raises DataError if a part is of another type than our identities have."""
    parts = as_mapping(fields.get("eid"))
    if parts is None:
        raise DataError("it has no eid")
    for name, value in parts.items():
        kinds: tuple[type, ...] = {"batch": (int, str), "task": (int, str), "suffix": (str,)}.get(name, (int,))
        if name not in EID.__slots__ or type(value) not in kinds:
            raise DataError(f"eid.{name} is {value!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise DataError(f"eid.{name} has {value.bit_length()} bits; it must be a number of 64")
    if "suffix" not in parts:
        raise DataError("eid.suffix is missing; it tells two rows of one turn apart")
    return EID(**parts)


def as_mapping(value: Any) -> Fields | None:
    """The value if it is a dict, else None."""
    return cast("Fields", value) if isinstance(value, dict) else None


def _as_list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def experience(fields: Fields, eid: EID) -> Experience:
    """The row, equal to what was stored, bit for bit. Raises DataError for what a row cannot hold."""
    for name, value in fields.items():
        if name not in _KNOWN and (isinstance(value, np.ndarray) or value):
            raise DataError(f"it has {name}, which rows here cannot hold; leave such experiences out")
        _check_kind(name, value)
    row: Fields = {name: fields[name] for name in (*_TEXTS, *_LISTS, *_DICTS, "prompt_length") if name in fields}
    for name, dtype in DTYPES.items():
        if name in fields:
            row[name] = exactly(fields[name], dtype, name)
    if "tokens" not in row:
        raise DataError("it has no tokens")
    made = Experience(eid=eid, reward=_reward(fields.get("reward")), **row)
    if (kind := fields.get("experience_type")) is not None:
        made.experience_type = kind
    return made


def _check_kind(name: str, value: Any) -> None:
    if name in DTYPES:
        good = isinstance(value, np.ndarray)
    elif name in _TEXTS:
        good = type(value) is str
    elif name in _LISTS:
        items = _as_list(value)
        good = items is value and all(isinstance(item, dict) for item in items)
    elif name in _DICTS:
        parts = as_mapping(value)
        numbers = name != "metrics" or all(type(item) in (int, float, bool) for item in (parts or {}).values())
        good = parts is not None and numbers
    elif name == "prompt_length":
        good = type(value) is int
    else:
        good = name != "experience_type" or (type(value) is str and value in EXPERIENCE_TYPES)
    if not good:
        raise DataError(f"{name} is a {type(value).__name__} that no experience has there")


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (bool, int, float) or (type(value) is int and value.bit_length() > MAX_FLOAT_BITS):
        raise DataError(f"reward is a {type(value).__name__}; it must be a number that float64 has")
    return float(value)
