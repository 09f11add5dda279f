"""Packed files: weights without their zeros, and back bit for bit; what is wrong with a file is an error that names the weight."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import nofm
from nofm.masks import Grouping
from nofm.packed import pack_weight, unpack_weight
from nofm.patterns import Pattern

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize(
    ("pattern", "weight", "values", "places"),
    [
        ("2:4", [0, 3, 0, -1, 2, 0, 0, 5], [3, -1, 2, 5], [2 + 8 + 16 + 128]),  # a bit for each weight, lowest first
        ("1:4", [0, 0, 7, 0, 0, -2, 0, 0], [7, -2], [0b01_10]),  # places 2 and 1, two bits each
        ("1:8", [0, 0, 0, 0, 0, 0, 9, 0], [9], [6]),
        ("1:4", [0, 0, 0, 0, 0, 0, 0, 4], [0, 4], [0b11_00]),  # an empty group keeps its first zero, as a mask does
        (None, [0, 3, 0, -1, 2, 0, 0, 5], [3, -1, 2, 5], [154]),
    ],
)
def test_eight_numbers_by_hand(pattern, weight, values, places):
    w_OI = torch.tensor([weight], dtype=torch.float32)
    found = pack_weight("w", w_OI, None if pattern is None else Grouping(Pattern(pattern)))
    assert found.values.tolist() == values
    assert found.places.tolist() == places
    assert found.line["pattern"] == pattern
    assert torch.equal(unpack_weight("w", found.line, found.values, found.places), w_OI)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    m=st.sampled_from([2, 3, 4, 8, 16, 17, 32]),
    share=st.floats(0.05, 1.0),
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    axis=st.sampled_from([0, 1, -1, "flat"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9999),
)
def test_any_weight_comes_back_bit_for_bit(m, share, shape, axis, dtype, seed):
    """All patterns, axes, short last groups and dtypes; ties, denormals and kept zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    grouping = Grouping(Pattern(f"{max(1, int(share * m))}:{m}"), axis, pad=True)
    wide = torch.randn(shape, generator=generator)
    wide.view(-1)[torch.rand(wide.numel(), generator=generator) < 0.1] = -0.0
    dense = wide.to(dtype)
    weight = bits(dense).where(grouping.mask(dense), 0).view(dtype)
    found = pack_weight("w", weight, grouping)
    assert found.values.numel() == grouping.kept(weight.shape)
    again = unpack_weight("w", json.loads(json.dumps(found.line)), found.values, found.places)
    assert again.dtype == dtype
    assert torch.equal(bits(again), bits(weight))


@pytest.mark.parametrize(
    ("pattern", "share"), [("2:4", 9 / 16), ("4:8", 9 / 16), ("1:4", 4.5 / 16), ("2:8", 4.75 / 16), ("1:16", 1.25 / 16)]
)
def test_places_take_as_few_bits_as_the_pattern_allows(pattern, share):
    grouping = Grouping(Pattern(pattern))
    w_OI = torch.randn(64, 256).bfloat16()
    found = pack_weight("w", w_OI.where(grouping.mask(w_OI), 0), grouping)
    assert found.nbytes == share * w_OI.nbytes


def test_a_weight_that_breaks_its_pattern_is_not_packed():
    w_OI = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    with pytest.raises(nofm.LayerError, match=r"fc\.weight: 1 of its 2 groups hold more than 2:4 keeps"):
        pack_weight("fc.weight", w_OI, Grouping(Pattern("2:4")))
    with pytest.raises(nofm.NonFiniteWeightError, match=r"fc.weight\[0, 1\] is inf"):
        pack_weight("fc.weight", torch.tensor([[0.0, torch.inf, 0.0, 0.0]]), Grouping(Pattern("2:4")))


# ---- models ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.out.weight = self.words.weight
        self.middle = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.words(x)))


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4)), {"preset": "all"}),
    "convolutions, grouped and transposed": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, groups=2), nn.ConvTranspose2d(16, 8, 3), nn.Conv1d(8, 4, 1)),
        {"preset": "all"},
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32), {"preset": "all"}),
    "recurrent": (lambda: nn.LSTM(16, 8, 2), {"preset": "all"}),
    "tied": (Tied, {"preset": "all"}),
    "short last groups": (lambda: nn.Sequential(nn.Linear(18, 6)), {"preset": "all", "pad": True}),
    "flat kernels": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)), {"preset": "all", "axis": "flat"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_come_back_as_fold_leaves_them(name, dtype, tmp_path):
    build, options = MODELS[name]
    model = build().to(dtype)
    nofm.sparsify_(model, "1:4", **options)
    path = tmp_path / "model.safetensors"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    said = nofm.save_packed(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model stays as it is"
    assert said.packed == len(list(nofm.sites(model)))
    assert said.bytes == path.stat().st_size
    assert str(said).startswith(f"{path}: {said.packed} of ")
    nofm.fold_(model)
    loaded = nofm.load_packed(path)
    assert loaded.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(bits(loaded[key]), bits(value)), key
    build().to(dtype).load_state_dict(loaded)
    nofm.save_packed(model, tmp_path / "folded.safetensors")
    again = nofm.load_packed(tmp_path / "folded.safetensors")
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items()), "patterns are found in a folded model"


def test_shared_weights_are_there_once(tmp_path):
    model = Tied()
    nofm.sparsify_(model, "1:4", preset="all")
    nofm.save_packed(model, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert sum("words" in name or "out" in name for name in file.keys()) == 2  # noqa: SIM118
    loaded = nofm.load_packed(tmp_path / "m.safetensors")
    assert loaded["out.weight"].data_ptr() == loaded["words.weight"].data_ptr()


def test_readers_that_do_not_know_of_packing_fail(tmp_path):
    """Rather than to go on with the weights that they had: by the shape of what they find under a weight's name."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    nofm.sparsify_(model, "2:4")
    nofm.save_packed(model, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="mismatch"):
        GPT2LMHeadModel.from_pretrained(tmp_path)
    plain = GPT2LMHeadModel(config)
    with pytest.raises(RuntimeError, match=r"size mismatch for transformer\.h\.0"):
        plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    plain.load_state_dict(nofm.load_packed(tmp_path / "model.safetensors"))
    nofm.fold_(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())


def test_zeros_anywhere_are_left_out_too(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[torch.rand(64, 64) < 0.9] = 0
        model[1].weight[0, 0] = 0  # one zero is not worth 512 bytes
    said = nofm.save_packed(model, tmp_path / "m.safetensors")
    assert said.packed == 1
    loaded = nofm.load_packed(tmp_path / "m.safetensors")
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [*MODELS, "zeros anywhere"])
def test_the_reader_in_the_documents_reads_them(name, tmp_path):
    """It has nothing of nofm, so it is the format that is tested, not one half of it by the other."""
    page = (Path(__file__).parents[2] / "docs" / "packed.md").read_text()
    code: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], code)
    for pattern in ("1:4", "2:4", "2:8", "3:16"):
        if name == "zeros anywhere":
            model: nn.Module = nn.Linear(32, 8)
            with torch.no_grad():
                model.weight[torch.rand(8, 32) < 0.8] = 0
        else:
            build, options = MODELS[name]
            model = build()
            if not nofm.sparsify_(model, pattern, **{**options, "pad": True}):
                continue
        nofm.save_packed(model, tmp_path / "m.safetensors")
        expected = nofm.load_packed(tmp_path / "m.safetensors")
        found = code["load"](tmp_path / "m.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(torch.from_numpy(found[key].copy()), value) for key, value in expected.items())


def test_verify_reads_packed_files(tmp_path):
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    nofm.sparsify_(model, "1:16", preset="all", skip=("2",))
    nofm.save_packed(model, tmp_path / "packed.safetensors")
    nofm.fold_(model)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    packed, plain = nofm.verify(tmp_path / "packed.safetensors"), nofm.verify(tmp_path / "plain.safetensors")
    assert packed.ok
    assert {w.name: w for w in packed.weights} == {w.name: w for w in plain.weights}


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None: ...


def trained_dense() -> nn.Module:
    model = nn.Linear(8, 8)
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.handle = nofm.attach(nofm.Dense(), model, optimizer)
    return model


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (lambda: nn.Linear(8, 8), {}, "no weight has zeros worth leaving out.*fold_ it first"),
        (
            trained_dense,
            {},
            "weight computes with more weights than the pattern keeps .*, and a packed file holds its pattern: the method Dense trains all",
        ),
        (lambda: nn.Linear(8, 8), {"pattern": "2:4"}, r"pattern='2:4': weight \(16 of 16 groups\) do not have it"),
        (lambda: nofm.sparsify_(m := nn.Linear(8, 8), "2:4", preset="all") and m, {"pattern": "2:4"}, "has patterns of its own"),
        (lambda: nn.Linear(8, 8, device="meta"), {}, "weight: is on the meta device"),
        (lambda: WithExtraState(8, 8), {}, "_extra_state: is no tensor but a dict"),
        (lambda: {"a": torch.zeros(4, 4), "b": [1]}, {}, "b: is no tensor but a list"),
        (
            lambda: {"a": torch.eye(8).repeat_interleave(4, 1), "a.nm_places": torch.zeros(3)},
            {},
            "a.nm_places: two tensors of the file would have this name",
        ),
    ],
    ids=["dense", "trained dense", "not that pattern", "two patterns", "meta", "extra state", "no tensor", "a name twice"],
)
def test_what_cannot_be_written_is_said(given, options, message, tmp_path):
    with pytest.raises(nofm.LayerError, match=message):
        nofm.save_packed(given(), tmp_path / "m.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, "m.safetensors"), {}, "save_packed takes a model or a state dict, got int"),
        (("model", "."), {}, r"is a folder; give the file's name in it, such as .*model\.packed\.safetensors"),
        (("model", "no/m.safetensors"), {}, "there is no folder .*no; make it first"),
        (("model", "m.safetensors"), {"metadata": {"a": 1}}, "metadata 'a': 1 is no text"),
        (("model", "m.safetensors"), {"metadata": {"nofm.packed": "x"}}, "metadata 'nofm.packed': is the format's own entry"),
    ],
)
def test_wrong_arguments_are_told(arguments, options, message, tmp_path):
    model = nn.Linear(8, 8)
    nofm.sparsify_(model, "2:4", preset="all")
    given, path = arguments
    with pytest.raises(nofm.NofmError, match=message):
        nofm.save_packed(model if given == "model" else given, tmp_path / path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path, monkeypatch):
    model = nn.Linear(16, 16)
    nofm.sparsify_(model, "1:4", preset="all")
    path = tmp_path / "m.safetensors"
    nofm.save_packed(model, path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with torch.no_grad():
        model.weight.mul_(2)
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            with pytest.raises(OSError, match="No space"):
                nofm.save_packed(model, path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
    nofm.save_packed(model, path)
    assert path.read_bytes() != before


# ---- files from anywhere ----


@pytest.fixture
def parts(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file with a 1:4 weight, a 2:4 one and a plain vector."""
    model = nn.ModuleDict({"a": nn.Linear(16, 4, bias=False), "b": nn.Linear(16, 4)})
    nofm.sparsify_(model, {"a": "1:4", "b": "2:4"}, preset="all")
    nofm.save_packed(model, tmp_path / "good.safetensors")
    with safe_open(tmp_path / "good.safetensors", framework="pt") as file:
        return load_file(tmp_path / "good.safetensors"), json.loads(file.metadata()["nofm.packed"])


def line(**changes: Any) -> Any:
    return lambda tensors, about: about["weights"]["a.weight"].update(changes)


def tensor(name: str, change: Any) -> Any:
    return lambda tensors, about: tensors.update({name: change(tensors[name])})


DAMAGE: dict[str, tuple[Any, str]] = {
    "a later version": (lambda t, a: a.update(version=2), "version 2 of the packed format"),
    "no weights": (lambda t, a: a.pop("weights"), "do not say which weights are packed"),
    "weights as a list": (lambda t, a: a.update(weights=[]), "do not say which weights are packed"),
    "a line that is none": (lambda t, a: a["weights"].update({"a.weight": 3}), "a.weight: the metadata say 3 of it"),
    "a line without its shape": (lambda t, a: a["weights"]["a.weight"].pop("shape"), "a.weight: the metadata say"),
    "a key that is unknown": (line(more=1), "a.weight: the metadata say"),
    "no pattern": (line(pattern="4"), "a.weight: '4' is no pattern"),
    "another pattern": (line(pattern="1:8"), "a.weight: 16 values for a weight of shape .* keeps 8"),
    "an axis that is not there": (line(axis=2), "a.weight: axis 2 does not exist"),
    "an axis that is a text": (line(axis="1"), "a.weight: groups along '1'"),
    "an axis that is true": (line(axis=True), "a.weight: groups along True"),
    "a negative shape": (line(shape=[-4, 16]), r"a.weight: \[-4, 16\] is no shape"),
    "an endless shape": (line(shape=[2**39, 2**39]), "a.weight: .* is no shape"),
    "a larger shape": (line(shape=[2**20, 16]), "a.weight: 16 values for a weight of shape"),
    "a shape in floats": (line(shape=[4.0, 16]), "a.weight: .* is no shape"),
    "places of another kind": (line(places="bits"), "a.weight: places as 'bits', and 1:4 has them as 'index'"),
    "values that are missing": (lambda t, a: t.pop("a.weight"), "a.weight should be there as"),
    "places that are missing": (lambda t, a: t.pop("a.weight.nm_places"), "a.weight should be there as"),
    "the plain weight in place of its values": (lambda t, a: t.update({"a.weight": torch.zeros(4, 16)}), "must be flat"),
    "fewer values": (tensor("a.weight", lambda x: x[:-1]), "a.weight: 15 values"),
    "values that are integers": (tensor("a.weight", lambda x: x.int()), "its values are torch.int32"),
    "fewer places": (tensor("a.weight.nm_places", lambda x: x[:-1]), "a.weight: 3 bytes of places where 4 are needed"),
    "places that are no bytes": (tensor("a.weight.nm_places", lambda x: x.short()), "and these bytes"),
    "bits of too many weights": (tensor("b.weight.nm_places", lambda x: x | 0xFF), "b.weight: its places do not have as many weights"),
    "bits of other groups": (tensor("b.weight.nm_places", lambda x: x.fill_(0x1F)), "b.weight: its places do not have as many weights"),
    "the same as nothing": (lambda t, a: a.update(same={"c": "d"}), "c is said to be the same as 'd'"),
    "the same as itself": (lambda t, a: a.update(same={"a.weight": "a.weight"}), "a.weight is said to be the same"),
    "the same as a number": (lambda t, a: a.update(same={"c": 4}), "c is said to be the same as 4"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused(damage, message, parts, tmp_path):
    tensors, about = parts
    damage(tensors, about)
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path, {"nofm.packed": json.dumps(about)})
    with pytest.raises(nofm.PackedError, match=message):
        nofm.load_packed(path)
    with pytest.raises(nofm.PackedError, match=message):
        nofm.verify(path)


def test_places_beyond_the_group_and_out_of_order_are_refused():
    grouping = Grouping(Pattern("1:3"), pad=True)
    found = pack_weight("w", torch.tensor([[0.0, 0.0, 1.0, 2.0, 0.0, 0.0]]), grouping)
    with pytest.raises(nofm.PackedError, match="w: its places are not ascending places of a group of 3"):
        unpack_weight("w", found.line, found.values, torch.full_like(found.places, 0xFF))
    found = pack_weight("w", torch.cat([torch.ones(1, 2), torch.zeros(1, 14)], 1), Grouping(Pattern("2:16")))
    with pytest.raises(nofm.PackedError, match="w: its places are not ascending"):
        unpack_weight("w", found.line, found.values, torch.tensor([0x01], dtype=torch.uint8))  # 1, then 0


@pytest.mark.parametrize(("pattern", "places"), [("1:4", 0b11_00), ("2:4", 0b1001_0011)])
def test_places_behind_a_short_last_group_are_refused(pattern, places):
    """Which would be cut off with what fills it up, and the value lost."""
    grouping = Grouping(Pattern(pattern), pad=True)
    w_OI = torch.tensor([[1.0, 2.0, 0.0, 0.0, 3.0, 4.0]])
    found = pack_weight("w", w_OI.where(grouping.mask(w_OI), 0), grouping)
    with pytest.raises(nofm.PackedError, match="w: its places do not have as many weights"):
        unpack_weight("w", found.line, found.values, torch.tensor([places], dtype=torch.uint8))


@pytest.mark.parametrize("text", ["", "null", "[]", '{"version": 1', '"x"', "{}"])
def test_metadata_that_are_none_are_refused(text, tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "bad.safetensors", {"nofm.packed": text})
    with pytest.raises(nofm.PackedError, match=r"bad\.safetensors: "):
        nofm.load_packed(tmp_path / "bad.safetensors")


def test_who_wants_a_plain_file_is_told_how_to_get_one(parts, tmp_path):
    from nofm.tasks.weights import read_weights

    with pytest.raises(nofm.NofmError, match=r"good\.safetensors: is packed; nofm export .*good\.safetensors --form plain"):
        read_weights(tmp_path / "good.safetensors")


def test_files_that_are_something_else_are_told_so(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(nofm.PackedError, match=r"plain.safetensors: is not packed; safetensors.torch.load_file reads it"):
        nofm.load_packed(tmp_path / "plain.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(nofm.PackedError, match=r"text.safetensors: not a readable safetensors file"):
        nofm.load_packed(tmp_path / "text.safetensors")
    with pytest.raises(nofm.NofmError, match=r"gone.safetensors: no such file"):
        nofm.load_packed(tmp_path / "gone.safetensors")


def test_flipped_bytes_never_end_in_anything_but_an_error_or_weights(parts, tmp_path):
    data, chance = bytearray((tmp_path / "good.safetensors").read_bytes()), random.Random(0)
    path, refused = tmp_path / "flipped.safetensors", 0
    for _ in range(400):
        flipped = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            nofm.load_packed(path)
        except nofm.NofmError:
            refused += 1
    assert refused > 100
