"""Tensors as bytes become numpy arrays, bit for bit and without torch: safetensors, and torch's pickled storages.

Owns: both formats, the exact change of an array's type. Does not own: which tensors an experience has
(`trinity_db.py`), the reading of pickles (`pickled.py`).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from engines.errors import DataError
from trinity_tasks.offline.pickled import Call, Global, PersistentId, read_pickle

Array = npt.NDArray[Any]

MAX_ELEMENTS: Final = 2**24
"""Most elements of a tensor: one of stride 0 has any number of them in a few bytes."""
BFLOAT16: Final = "bfloat16"
_SAFETENSORS: Final[Mapping[str, str]] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": BFLOAT16, "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"},
}
_STORAGES: Final[Mapping[str, str]] = {
    **{"Double": "<f8", "Float": "<f4", "Half": "<f2", "BFloat16": BFLOAT16, "Bool": "?"},
    **{"Long": "<i8", "Int": "<i4", "Short": "<i2", "Char": "<i1", "Byte": "<u1"},
}
_STORAGE_NAMES: Final = frozenset(f"torch.{name}Storage" for name in _STORAGES)
_TORCH_MAGIC: Final = 0x1950A86A20F9469CFC6C
_TORCH_PROTOCOL: Final = 1001

_REBUILD: Final = "torch._utils._rebuild_tensor_v2"
_LOAD: Final = "torch.storage._load_from_bytes"
_ORDERED: Final = "collections.OrderedDict"
_NUMPY_SCALARS: Final = frozenset(("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"))
_NUMPY_DTYPE: Final = "numpy.dtype"
TENSOR_NAMES: Final = frozenset((_REBUILD, _LOAD, _ORDERED, _NUMPY_DTYPE, *_NUMPY_SCALARS))
"""Names that pickles of tensors and of numpy's numbers have."""


def read_safetensors(data: bytes) -> dict[str, Array]:
    """Every tensor of a safetensors file. Raises DataError for damage or a type that numpy does not have."""
    length = int.from_bytes(data[:8], "little")
    body = memoryview(data)[8 + length :]
    try:
        if length > len(data) - 8:
            raise ValueError(f"a header of {length} bytes in {len(data)}")
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _entry(entry, body) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the tensors are no safetensors: {type(error).__name__}: {error}") from error


def _entry(entry: dict[str, Any], body: memoryview) -> Array:
    start, stop = entry["data_offsets"]
    shape = [int(size) for size in entry["shape"]]
    if not 0 <= start <= stop <= len(body) or any(size < 0 for size in shape):
        raise ValueError(f"offsets {start} to {stop} and shape {shape} in {len(body)} bytes")
    return _array(body[start:stop], _SAFETENSORS[entry["dtype"]], math.prod(shape)).reshape(shape)


def _array(data: bytes | memoryview, kind: str, num_elements: int) -> Array:
    """The elements of a buffer of exactly that many; bfloat16 as the equal float32."""
    item = 2 if kind == BFLOAT16 else np.dtype(kind).itemsize
    if len(data) != item * num_elements:
        raise ValueError(f"{num_elements} elements of {kind} in {len(data)} bytes")
    if kind == BFLOAT16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == "?" and (np.frombuffer(data, np.uint8) > 1).any():
        raise ValueError("a truth value that is neither 0 nor 1")
    return np.frombuffer(data, kind)


def is_tensor(value: Any) -> bool:
    """Whether a pickled value is a tensor."""
    return isinstance(value, Call) and value.path == _REBUILD


def tensor(call: Call) -> Array:
    """A pickled tensor of at most one dimension, as an array of its own. Raises DataError."""
    try:
        storage, offset, size, stride, _, hooks = call.arguments[:6]
        if not (isinstance(storage, Call) and storage.path == _LOAD and _is_empty(hooks) and call.state is None):
            raise ValueError("it is more than a plain tensor")
        if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
            raise ValueError(f"offset {offset}, size {size}, stride {stride}")
        flat = _storage(*storage.arguments)
        if len(size) > 1 or len(stride) != len(size):
            raise ValueError(f"its size is {size}; an experience has tensors of one dimension")
        count, step = (size[0], stride[0]) if size else (1, 1)
        if count > MAX_ELEMENTS or (count and offset + (count - 1) * step >= len(flat)):
            raise ValueError(f"{count} elements from {offset} at steps of {step} in a storage of {len(flat)}")
        taken = flat[offset + step * np.arange(count)]
        return taken if size else taken.reshape(())
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"a tensor cannot be read: {error}. Nothing of it was executed") from error


def _is_empty(hooks: Any) -> bool:
    return isinstance(hooks, Call) and hooks.path == _ORDERED and not hooks.arguments and hooks.state is None


def _storage(data: bytes) -> Array:
    """What `torch.save` wrote of one storage: five pickles, the number of elements, the elements."""
    stream = io.BytesIO(data)
    nothing: frozenset[str] = frozenset()
    magic, protocol = read_pickle(stream, nothing), read_pickle(stream, nothing)
    system = read_pickle(stream, nothing)
    if not isinstance(system, dict):
        raise ValueError("its storage does not tell the order of its bytes")
    if (
        magic != _TORCH_MAGIC
        or protocol != _TORCH_PROTOCOL
        or cast("dict[str, Any]", system).get("little_endian") is not True
    ):
        raise ValueError("its storage is of another version of torch, or of another order of bytes")
    reference = read_pickle(stream, _STORAGE_NAMES, persistent_ids=True)
    keys = read_pickle(stream, nothing)
    if not isinstance(reference, PersistentId):
        raise ValueError("its storage is none")
    what, kind, key, _, count, view = cast("tuple[Any, ...]", reference.value)
    if what != "storage" or not isinstance(kind, Global) or keys != [key] or view is not None:
        raise ValueError("its storage is part of another one")
    if int.from_bytes(stream.read(8), "little") != count:
        raise ValueError(f"its storage has not the {count} elements that it says")
    name = kind.path.removeprefix("torch.").removesuffix("Storage")
    return _array(stream.read(), _STORAGES[name], count)


def number(call: Call) -> float | int | bool:
    """The Python number that equals a pickled number of numpy, or a tensor without dimensions. Raises DataError."""
    if is_tensor(call):
        if (found := tensor(call)).ndim:
            raise DataError(f"there is a tensor of {len(found)} elements where a number must be")
        return cast("float", found.item())
    try:
        if call.path not in _NUMPY_SCALARS:
            raise ValueError(f"{call.path} is no number")
        kind, data = call.arguments
        return cast("float", _array(data, _dtype(kind), 1)[0].item())
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise DataError(f"a number cannot be read: {error}. Nothing of it was executed") from error


def _dtype(call: Any) -> str:
    """numpy.dtype(code, False, True) with a state that gives the order of bytes."""
    if not (isinstance(call, Call) and call.path == _NUMPY_DTYPE):
        raise ValueError("it has no type")
    code, order = call.arguments[0], "|" if call.state is None else call.state[1]
    known = {"f8": "<f8", "f4": "<f4", "f2": "<f2", "i8": "<i8", "i4": "<i4", "b1": "?"}
    if code not in known or order not in ("<", "|"):
        raise ValueError(f"type {order}{code}")
    return known[code]


def exactly(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """The same numbers in another type. Raises DataError if one cannot be kept, or the array is no list."""
    if array.ndim != 1:
        raise DataError(f"{name} has {array.ndim} dimensions, it must have 1")
    if array.dtype == dtype:
        return array.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        changed = array.astype(dtype)
        wrong = changed.astype(np.float64) != array if array.dtype.kind == "f" else changed != array
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(f"{name}[{first}] is {array[first]}; as {dtype} it would be another number")
    return changed
