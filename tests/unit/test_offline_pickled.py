"""Pickles are read as data: plain values come back equal, and nothing that a hostile one asks for happens."""

import collections
import copyreg
import io
import os
import pickle
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import DataError
from trinity_tasks.offline.pickled import Call, Global, plain, read_pickle
from trinity_tasks.offline.tensors import TENSOR_NAMES, exactly, number, read_safetensors, tensor
from trinity_tasks.offline.trinity_blobs import read_blob

PROTOCOLS = range(6)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(data: bytes, names: frozenset[str] = TENSOR_NAMES) -> Any:
    return read_pickle(io.BytesIO(data), names)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=40, deadline=None)
@given(value=JSON_VALUES)
def test_plain_values_come_back_equal(protocol: int, value: Any) -> None:
    assert plain(read(pickle.dumps(value, protocol)), number) == value


def test_shared_parts_become_copies() -> None:
    part = {"a": [1]}
    first, second = plain(read(pickle.dumps([part, part])), number)
    first["a"].append(2)
    assert second == {"a": [1]}


# -- hostile pickles --------------------------------------------------------------------------------------------------


class Asks:
    """An object whose pickle asks for a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def touch(canary: Path) -> str:
    return f"__import__('pathlib').Path({str(canary)!r}).touch()"


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda canary: Asks(os.system, f"touch {canary}"),
    "eval": lambda canary: Asks(eval, touch(canary)),
    "exec": lambda canary: Asks(exec, touch(canary)),
    "subprocess": lambda canary: Asks(subprocess.check_call, ["touch", str(canary)]),
    "getattr chain": lambda canary: Asks(getattr, Asks(__import__, "pathlib"), "Path"),
    "map": lambda canary: Asks(list, Asks(map, exec, [touch(canary)])),
    "inside info": lambda canary: {"version": 1, "items": [{"info": {"a": Asks(exec, touch(canary))}}]},
    "inside a tensor's hooks": lambda canary: [torch.zeros(1), Asks(exec, touch(canary))],
    "torch.load": lambda canary: Asks(torch.load, str(canary)),
    "a storage with code in it": lambda canary: Asks(
        torch.storage._load_from_bytes, pickle.dumps(Asks(exec, touch(canary)))
    ),
    "an ordered dict with items": lambda canary: collections.OrderedDict(a=Asks(exec, touch(canary))),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(name: str, protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    data = pickle.dumps(HOSTILE[name](canary), protocol)
    with pytest.raises(DataError, match="Nothing of it was executed"):
        tensor(read(data))
    blob = b"TRXP\x01" + struct.pack("<QQ", len(data), 10) + data + struct.pack("<Q", 2) + b"{}"
    for stored in (data, blob):
        with pytest.raises(DataError):
            read_blob(stored)
    assert not canary.exists()


def test_the_same_pickles_do_run_where_they_are_loaded(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(HOSTILE["exec"](tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


RAW = {
    "INST": b"(S'touch CANARY'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nX\x0c\x00\x00\x00touch CANARYo.",
    "GLOBAL": b"cos\nsystem\n(X\x0c\x00\x00\x00touch CANARYtR.",
    "NEWOBJ_EX": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
    "PERSID": b"Panything\n.",
    "BINPERSID": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "EXT1": b"\x80\x02\x82\x7b.",
    "EXT2": b"\x80\x02\x83\x7b\x00.",
    "EXT4": b"\x80\x02\x84\x7b\x00\x00\x00.",
    "a dotted name": b"\x80\x04\x8c\x0bcollections\x8c\x13OrderedDict.fromkeys\x93.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a call of a value": b"\x80\x02K\x01)R.",
    "arguments that are no tuple": b"ccollections\nOrderedDict\n]R.",
    "attributes of a list": b"\x80\x02]}b.",
    "items of a call": b"ccollections\nOrderedDict\n)RX\x01\x00\x00\x00aK\x01s.",
    "appending to a dict": b"\x80\x02}K\x01a.",
    "a key that is no text": b"\x80\x02}K\x01K\x02s.",
    "a key that has no hash": b"\x80\x02}]K\x02s.",
    "BYTEARRAY8": b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00a.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "EMPTY_SET": b"\x80\x04\x8f.",
    "DUP": b"\x80\x02]2a.",
    "an empty stack": b"\x80\x02R.",
    "no mark": b"\x80\x02K\x01t.",
    "no memo": b"\x80\x02h\x05.",
    "two values": b"\x80\x02K\x01K\x02.",
    "no end": b"\x80\x02K\x01",
    "nothing": b"",
    "a length beyond the end": b"\x80\x02B\xff\xff\xff\x7fabc.",
    "a length of 2**63": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "an unknown opcode": b"\xff.",
}


@pytest.mark.parametrize("name", RAW)
def test_an_opcode_that_plain_data_does_not_need_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="Nothing of it was executed"):
        read(RAW[name])
    assert not Path("CANARY").exists()


def test_extension_codes_are_not_looked_up() -> None:
    copyreg.add_extension("os", "system", 123)
    try:
        with pytest.raises(DataError, match="the opcode EXT1, which no experience needs"):
            read(RAW["EXT1"])
    finally:
        copyreg.remove_extension("os", "system", 123)


def test_a_refused_name_is_told() -> None:
    with pytest.raises(DataError, match=r"the pickle names posix\.system, which is no part of an experience"):
        read(pickle.dumps(os.system))


def test_allowed_names_become_notes_not_things() -> None:
    data = pickle.dumps([collections.OrderedDict, collections.OrderedDict()])
    name, call = read(data)
    assert name == Global("collections.OrderedDict")
    assert isinstance(call, Call)
    assert (call.path, call.arguments, call.state) == ("collections.OrderedDict", (), None)


def test_a_value_that_names_its_parts_again_and_again_is_refused() -> None:
    bomb: list[Any] = ["x" * 1000]
    for _ in range(60):
        bomb = [bomb, bomb]
    assert len(pickle.dumps(bomb)) < 2000
    with pytest.raises(DataError, match="names its parts so often that it would fill more than 67108864 bytes"):
        plain(read(pickle.dumps(bomb)), number)


def test_a_value_that_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(DataError, match="nested deeper than 64"):
        plain(read(pickle.dumps(cycle)), number)
    with pytest.raises(DataError, match="nested deeper than 64"):
        plain(read(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), number)


@pytest.mark.parametrize("value", [b"bytes", (1, 2), 2**64, torch.zeros(2)])
def test_what_json_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(DataError):
        plain(read(pickle.dumps({"a": value})), number)


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, -2, 2**31 - 1], dtype=torch.int32),
        torch.tensor([1, 2**62]),
        torch.tensor([0.1, -3e-45, float("inf")]),
        torch.tensor([0.1, 1e300], dtype=torch.float64),
        torch.tensor([0.1, -2.5], dtype=torch.float16),
        torch.tensor([0.1, -2.5, 3e38], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1, 255], dtype=torch.uint8),
        torch.tensor([]),
        torch.tensor(3.5),
        torch.arange(10)[3:9:2],
        torch.arange(12).reshape(3, 4)[:, 1],
        torch.tensor([7]).expand(4),
        torch.tensor([0.5], requires_grad=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_tensors_are_read_without_torch_bit_for_bit(value: torch.Tensor, protocol: int) -> None:
    expected = (value.detach().float() if value.dtype == torch.bfloat16 else value.detach()).numpy()
    found = tensor(read(pickle.dumps(value, protocol)))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_tensors_that_reach_beyond_their_storage_are_refused() -> None:
    good = pickle.dumps(torch.arange(3), 3)
    assert tensor(read(good)).tolist() == [0, 1, 2]
    far = good.replace(b"K\x00K\x03\x85", b"K\x01K\x03\x85", 1)
    assert far != good
    with pytest.raises(DataError, match="3 elements from 1 at steps of 1 in a storage of 3"):
        tensor(read(far))
    huge = pickle.dumps(torch.tensor([7]).expand(2**40), 3)
    assert len(huge) < 1000
    with pytest.raises(DataError, match="1099511627776 elements"):
        tensor(read(huge))
    with pytest.raises(DataError, match="tensors of one dimension"):
        tensor(read(pickle.dumps(torch.zeros(2, 2))))


@pytest.mark.parametrize("value", [np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), torch.tensor(0.1)])
def test_numbers_of_numpy_are_the_equal_python_numbers(value: Any) -> None:
    found = plain(read(pickle.dumps({"a": value})), number)["a"]
    assert (found, type(found)) == (value.item(), type(value.item()))


def test_an_object_array_scalar_is_refused(tmp_path: Path) -> None:
    hostile = pickle.dumps(Asks(exec, touch(tmp_path / "ran")))
    dtype = np.dtype("O")
    data = pickle.dumps(Asks(np.float32(1).__reduce__()[0], dtype, hostile))
    with pytest.raises(DataError, match=r"type .O8. Nothing of it was executed"):
        plain(read(data), number)
    assert not (tmp_path / "ran").exists()


def test_safetensors_are_read_bit_for_bit() -> None:
    from safetensors.torch import save

    given = {"a": torch.tensor([1, 2], dtype=torch.int32), "b": torch.tensor([0.1], dtype=torch.bfloat16)}
    found = read_safetensors(save(given))
    assert sorted(found) == ["a", "b"]
    assert found["a"].tolist() == [1, 2]
    assert found["b"].tolist() == given["b"].float().tolist()
    assert read_safetensors(save({})) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 57) + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets":[0,4]}}'[:57] + b"abcd",
    ],
)
def test_damaged_safetensors_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="no safetensors"):
        read_safetensors(data)


@pytest.mark.parametrize(
    ("given", "dtype", "fault"),
    [
        ([1, 2**31], "int32", r"x\[1\] is 2147483648; as int32"),
        ([0.5, 0.1], "float32", r"x\[1\] is 0.1; as float32"),
        ([1.5], "int32", r"x\[0\] is 1.5"),
        ([float("nan")], "int32", r"x\[0\] is nan"),
        ([1e300], "float32", r"x\[0\] is 1e\+300"),
        ([0, 1, 2], "bool", r"x\[2\] is 2; as bool"),
    ],
)
def test_a_number_that_another_type_does_not_have_is_refused(given: list[Any], dtype: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        exactly(np.asarray(given), np.dtype(dtype), "x")


def test_equal_numbers_change_their_type() -> None:
    changed = exactly(np.asarray([0.5, -3.0]), np.dtype(np.float32), "x")
    assert (changed.dtype, changed.tolist()) == (np.dtype(np.float32), [0.5, -3.0])
    assert exactly(np.asarray([0, 1]), np.dtype(np.bool_), "x").tolist() == [False, True]


def test_damage_anywhere_gives_a_refusal_or_a_value_and_no_other_error() -> None:
    random_ = random.Random(7)
    whole = pickle.dumps([torch.arange(3), {"a": [1, 2.5, None, "text"]}, np.float64(0.5)])
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        del data[random_.randrange(len(data) + 1) if random_.random() < 0.2 else len(data) :]
        try:
            value = read(bytes(data))
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Call):
                    tensor(part)
                plain(part, number)
        except DataError:
            refused += 1
    assert refused > 1000
