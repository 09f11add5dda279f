"""What is saved comes back: structure, types, order and every bit, whatever tensors are like in memory.

Compared with `assert_same`, which looks at bytes: `==` is blind to the sign of zero and to NaN, and both are part of a state that
shall go on bitwise. The tensor file is also read with the safetensors library, which knows nothing of this store.
"""

from __future__ import annotations

import enum
import math
import random
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k7_states import QuickDisk, assert_same, bits, state_of
from torch import Tensor, nn

from nofm.engine.checkpoint import CheckpointError, Store
from nofm.engine.states import pack, plan

REALS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5), (1,) * 20]


def again(state: dict[str, Any]) -> dict[str, Any]:
    """Through bytes and back, without a disk."""
    packed = pack(state)
    data = bytearray(b"".join(packed.chunks()))
    assert packed.nbytes == len(packed.json) + len(data)
    return plan(packed.json, len(data)).state(data)


def with_random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bit pattern: NaNs with payloads, infinities, denormals, and the extremes of integers."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*REALS, *INTEGERS, *COMPLEX, torch.bool], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]):
    if dtype == torch.bool:
        tensor = with_random_bits(shape, torch.uint8) > 127
    else:
        tensor = with_random_bits(shape, dtype)
    assert_same(again({"t": tensor}), {"t": tensor})


def test_nan_payloads_signs_of_zero_and_denormals_to_the_bit():
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x400000 + 5, -0x80000000, 1, 0x7F800000, -0x800000], dtype=torch.int32)
    back = again({"t": patterns.view(torch.float32)})["t"]
    assert torch.equal(back.view(torch.int32), patterns)


def layouts() -> dict[str, Tensor]:
    base = torch.arange(240.0).view(2, 5, 4, 6)
    complex_numbers = torch.complex(torch.randn(4), torch.randn(4))
    return {
        "transposed": base.transpose(0, 3),
        "strided": base[:, ::2, 1:, ::3],
        "channels_last": base.to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugated": complex_numbers.conj(),
        "negative bit": complex_numbers.conj().imag,
        "with gradient": torch.randn(3, requires_grad=True),
        "not a leaf": torch.randn(3, requires_grad=True) * 2,
        "offset": torch.arange(10)[3:7],
        "in inference mode": _in_inference_mode(),
    }


def _in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.arange(5.0) * 2


@pytest.mark.parametrize("name", layouts())
def test_tensors_lie_in_memory_in_many_ways(name: str):
    tensor = layouts()[name]
    if name == "negative bit":
        assert tensor.is_neg()
    back = again({"t": tensor})["t"]
    assert back.is_contiguous()
    assert not back.requires_grad
    assert back.dtype == tensor.dtype
    assert back.tolist() == tensor.tolist()
    back.add_(1)  # it is an ordinary tensor


def test_tensors_that_share_memory_come_back_whole_and_apart():
    base = torch.arange(12.0)
    state = {"whole": base, "same": base, "part": base[2:5], "view": base.view(3, 4).t(), "tied": [base, base]}
    back = again(state)
    for key in ("whole", "same", "part", "view"):
        assert bits(back[key]) == bits(state[key]), key
        assert back[key].untyped_storage().nbytes() == back[key].nbytes, "and does not keep the rest of the file alive"
    back["whole"].zero_()
    assert torch.equal(back["same"], base)
    assert torch.equal(back["tied"][1], base)


def test_a_parameter_becomes_a_plain_tensor():
    weight = nn.Parameter(torch.randn(2, 3))
    assert_same(again({"w": weight}), {"w": weight.detach()})


LEAVES: dict[str, Any] = {
    "zero": 0,
    "below zero": -1,
    "64 bits": 2**64 + 1,
    "1,024 bits": 2**1024 - 1,
    "1,025 bits": -(2**1024),
    "too long for decimal": 3**20_000,
    "true": True,
    "false": False,
    "none": None,
    "float": 0.1,
    "minus zero": -0.0,
    "smallest": 5e-324,
    "largest": sys.float_info.max,
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "nan": float("nan"),
    "minus nan": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "empty text": "",
    "odd text": 'quote " slash / back \\ NUL \0 newline \n \u2028 \U0001f600 lone \ud800',
    "text like a mark": "/tensor",
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "nested": [(1, [2.0, (None, {"a": (True,)})]), ({},)],
    "long": list(range(1000)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_every_kind_of_leaf(name: str):
    state = {"x": LEAVES[name], "list": [LEAVES[name]], "tuple": (LEAVES[name],)}
    assert_same(again(state), state)


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a.b", "\0", "\n", '"', "\\", "\u00e9", "e\u0301", "\U0001f600", " ", "0", "latest", "x" * 5000]
)
def test_odd_keys(key: str):
    state = {key: torch.ones(2), "inside": {key: torch.zeros(1), "also": {key: {key: 1}}}}
    assert_same(again(state), state)


def test_keys_keep_their_order_and_a_dict_is_not_taken_for_a_list():
    state = {"b": 1, "a": torch.ones(1), "list": [torch.ones(1)], "dict": {"0": torch.zeros(1)}, "0": {"z": 1, "y": 2}}
    assert_same(again(state), state)


class Level(enum.IntEnum):
    HIGH = 3


class Word(str, enum.Enum):  # noqa: UP042 - unlike StrEnum, str() of one is not its text
    RED = "red"


def test_subclasses_come_back_as_what_they_are_made_of():
    state = {
        "ordered": OrderedDict(b=1),
        "default": defaultdict(int, a=2),
        "size": torch.Size([2, 3]),
        "level": Level.HIGH,
        "word": Word.RED,
    }
    assert_same(again(state), {"ordered": {"b": 1}, "default": {"a": 2}, "size": (2, 3), "level": 3, "word": "red"})
    assert_same(again({Word.RED: 1}), {"red": 1})


keys = st.text(max_size=6).filter(lambda key: "/" not in key and key != "__metadata__" and key.isprintable())
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
tensors = st.builds(
    with_random_bits,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([*REALS, *INTEGERS, *COMPLEX]),
    st.integers(0, 99),
)
values = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(state=st.dictionaries(keys, values, max_size=5))
def test_any_state(state: dict[str, Any]):
    assert_same(again(state), state)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(state=st.dictionaries(keys, values, max_size=5))
def test_any_state_through_files(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    store = Store(tmp_path_factory.mktemp("store"), disk=QuickDisk())
    store.save(1, state)
    assert_same(store.load(), state)
    store.close()


def test_real_training_state_through_the_real_disk(tmp_path: Path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    inner = {str(i): entry for i, entry in optimizer.state_dict()["state"].items()}
    version, internal, gauss = random.getstate()
    state = {
        "model": model.state_dict(),
        "optimizer": {"state": inner, "param_groups": optimizer.state_dict()["param_groups"]},
        "rng": {"torch": torch.get_rng_state(), "python": [version, internal, gauss]},
    }
    path = Store(tmp_path).save(7, state)
    back = Store(tmp_path).load()
    assert_same(back, {**state, "model": dict(state["model"])})
    outside = safetensors.torch.load_file(path / "tensors.safetensors")
    wanted = {"rng/torch": state["rng"]["torch"], **{f"model/{key}": value for key, value in model.state_dict().items()}}
    wanted |= {f"optimizer/state/{i}/{key}": value for i, entry in inner.items() for key, value in entry.items()}
    assert outside.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert_same(outside[key], tensor, key)


@pytest.mark.parametrize("dtype", [*REALS, *INTEGERS, torch.bool], ids=str)
def test_the_safetensors_library_reads_every_dtype(dtype: torch.dtype, tmp_path: Path):
    tensor = torch.tensor([True, False]) if dtype == torch.bool else with_random_bits((2, 3), dtype)
    packed = pack({"a": tensor, "b": torch.zeros(3, dtype=torch.uint8), "c": torch.empty(0, 2), "0": torch.tensor(1.5)})
    outside = safetensors.torch.load(b"".join(packed.chunks()))
    assert_same(outside["a"], tensor)
    assert outside["c"].shape == (0, 2)
    assert outside["0"].item() == 1.5


REFUSED: dict[str, tuple[Any, str]] = {
    "not a dict": ([1], "a state is a dict, got list"),
    "slash": ({"model": {"a/b": 1}}, r"model: key 'a/b' holds a \"/\""),
    "slash at the top": ({"/tensor": 1}, r"state: key '/tensor' holds a \"/\""),
    "number as key": ({"state": {0: 1}}, "state: key 0 is int; the keys of a state are text"),
    "object": ({"model": {"x": [object()]}}, "model/x/0: object cannot be saved"),
    "set": ({"x": {1, 2}}, "x: set cannot be saved"),
    "bytes": ({"x": b"abc"}, "x: bytes cannot be saved"),
    "complex number": ({"x": 1j}, "x: complex cannot be saved"),
    "module": ({"x": nn.Linear(1, 1)}, "x: Linear cannot be saved"),
    "meta tensor": ({"x": torch.empty(2, device="meta")}, "x: a meta tensor cannot be saved"),
    "sparse tensor": ({"x": torch.eye(2).to_sparse()}, r"x: a Tensor \(torch.sparse_coo\) cannot be saved"),
    "quantized tensor": (
        {"x": torch.empty(2, dtype=torch.float4_e2m1fn_x2)},
        r"x: torch.float4_e2m1fn_x2 cannot be saved; possible are F64, ",
    ),
    "tensor subclass": ({"x": torch.ones(1).as_subclass(type("Own", (Tensor,), {}))}, r"x: a Own \(torch.strided\) cannot be saved"),
    "too many dimensions": ({"x": torch.ones((1,) * 65)}, "x: a tensor of 65 dimensions cannot be saved"),
    "reserved name": ({"__metadata__": torch.ones(1)}, "'__metadata__': not a name that a tensor can have"),
    "lone surrogate": ({"a\ud800": torch.ones(1)}, "not a name that a tensor can have"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_named_before_the_disk_is_touched(name: str, tmp_path: Path):
    state, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        Store(tmp_path / "store").save(1, state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_holds_itself_or_is_too_deep_or_too_long():
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(CheckpointError, match="at most 100 levels"):
        pack(circle)
    deepest: Any = 0
    for _ in range(100):
        deepest = [deepest]
    assert_same(again({"x": deepest[0]}), {"x": deepest[0]})
    with pytest.raises(CheckpointError, match="at most 100 levels"):
        pack({"x": deepest})
    with pytest.raises(CheckpointError, match="make tensors of long lists"):
        pack({"history": ["x" * (9 << 20)]})


def test_reserved_words_are_free_where_they_are_not_names_of_tensors():
    state = {"__metadata__": 1, "inner": {"__metadata__": torch.ones(1)}, "a\ud800": 2}
    assert_same(again(state), state)


def test_nothing_but_torch_is_needed(tmp_path: Path):
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['safetensors'] = None\n"
        "import torch; from nofm.engine.checkpoint import Store\n"
        "Store(sys.argv[1]).save(1, {'a': torch.arange(3), 'b': torch.ones(2).bfloat16()})\n"
        "print(Store(sys.argv[1]).load()['a'].tolist())"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert result.stdout == "[0, 1, 2]\n", result.stderr
    assert_same(Store(tmp_path).load(), {"a": torch.arange(3), "b": torch.ones(2).bfloat16()})


def test_states_differ_from_step_to_step():
    with pytest.raises(AssertionError):
        assert_same(state_of(1), state_of(2))
    with pytest.raises(AssertionError):
        assert_same(state_of(1), state_of(1, take=1))
