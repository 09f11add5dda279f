"""`pack_`, `unpack_` and packed layers: the numbers of the dense network, its keys, and errors where they cannot serve.

The kernels themselves are compared with F.conv2d and F.linear in fp64, on sizes at and around the edges of registers and tiles.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import nofm
from nofm.deploy import Bench, PackedLayer, bench, packing
from nofm.deploy.timing import Seconds, Spread, in_turns
from nofm.kernels import products

PATTERNS = ("2:4", "1:4", "4:8", "1:8", "1:16", "3:5")


def sparse(shape: tuple[int, ...], pattern: str | None, seed: int = 0) -> Tensor:
    """A weight with zeros: N:M along its inputs, or 80 % of them anywhere, a whole output of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    if pattern is not None:
        return torch.where(nofm.mask(w, pattern, pad=True), w, 0.0)
    w = torch.where(torch.rand(shape, generator=generator) < 0.2, w, 0.0)
    w[0] = 0.0
    return w


def assert_same(ours: Tensor, exact: Tensor) -> None:
    """Within the roundings of fp32 sums."""
    assert ours.shape == exact.shape
    assert ours.dtype == torch.float32
    assert float((ours - exact).abs().max()) <= 2e-6 * max(1.0, float(exact.abs().max())) * 10


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    pattern=st.sampled_from([*PATTERNS, None]),
    groups=st.sampled_from([1, 1, 2, 4]),
    channels=st.sampled_from([1, 5, 16, 48]),
    outputs=st.sampled_from([1, 3, 8, 17]),
    kernel=st.tuples(st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 3, 5])),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    images=st.sampled_from([1, 2, 5, 20]),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    threads=st.sampled_from([1, 2]),
    cache=st.sampled_from([500, 40_000]),
    biased=st.booleans(),
)
def test_convolutions(
    pattern, groups, channels, outputs, kernel, stride, padding, dilation, images, size, threads, cache, biased, monkeypatched_cache
):
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(s, r - 2 * p) for s, r, p in zip(size, reach, padding, strict=True))
    w = sparse((outputs * groups, channels, *kernel), pattern)
    bias = torch.randn(outputs * groups) if biased else None
    x = torch.randn(images, channels * groups, *size)
    exact = F.conv2d(x.double(), w.double(), None if bias is None else bias.double(), stride, padding, dilation, groups)
    monkeypatched_cache(cache)
    with torch_threads(threads):
        plan = products.convolution(w, bias, size=(images, *size), stride=stride, padding=padding, dilation=dilation, groups=groups)
        assert_same(plan(x), exact)
        assert_same(plan(x), exact)  # scratch memory is used again


@pytest.fixture(scope="module")
def monkeypatched_cache():
    """Small caches cut weights into many blocks."""
    before = products._CACHE
    yield lambda size: setattr(products, "_CACHE", size)
    products._CACHE = before


class torch_threads:
    def __init__(self, threads: int) -> None:
        self.threads, self.before = threads, torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self.threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 15, 16, 17, 31, 127, 128, 129, 300])
@pytest.mark.parametrize("pattern", [*PATTERNS, None])
def test_linear(rows, pattern):
    for (inputs, outputs), threads in itertools.product([(1, 1), (16, 16), (15, 33), (80, 7), (100, 40)], [1, 2]):
        w, bias, x = sparse((outputs, inputs), pattern), torch.randn(outputs), torch.randn(rows, inputs)
        exact = F.linear(x.double(), w.double(), bias.double())
        with torch_threads(threads):
            assert_same(products.linear(w, bias)(x), exact)
            assert_same(products.linear(w, None)(x), exact - bias.double())


def test_two_outputs_by_hand():
    """The output of each row is the sum of two kept weights times their inputs."""
    w = torch.tensor([[0.0, 3.0, 0.0, -1.0], [2.0, 0.0, 0.0, 5.0]])
    x = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    assert products.linear(w, None)(x).tolist() == [[30.0 - 1000.0, 2.0 + 5000.0]]


def test_nothing_is_read_or_written_beyond_the_end():
    """Inputs that lie next to NaN, and outputs of a plan, come out right: 49 pixels and 17 rows do not fill registers."""
    w = sparse((8, 16, 1, 1), "1:4")
    room = torch.full((3, 1, 16, 7, 7), torch.nan)
    room[1] = torch.randn(1, 16, 7, 7)
    exact = F.conv2d(room[1].double(), w.double())
    plan = products.convolution(w, None, size=(1, 7, 7), stride=(1, 1), padding=(0, 0), dilation=(1, 1))
    assert_same(plan(room[1]), exact)
    rows = torch.full((3, 17, 40), torch.nan)
    rows[1] = torch.randn(17, 40)
    v = sparse((9, 40), "1:8")
    assert_same(products.linear(v, None)(rows[1]), F.linear(rows[1].double(), v.double()))


def test_a_zero_that_is_left_out_does_not_meet_infinity():
    w = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    x = torch.tensor([[torch.inf, 3.0, torch.nan, 1.0]])
    assert products.linear(w, None)(x).item() == 6.0


# ---- layers ----


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding="valid", bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding="same", groups=2, dilation=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Linear(64, 10),
    )


def folded(pattern: str = "1:4") -> nn.Sequential:
    model = network()
    nofm.sparsify_(model, pattern)
    nofm.fold_(model)
    return model.eval()


X = torch.randn(4, 3, 14, 14, generator=torch.Generator().manual_seed(1))


def measuring(second: Callable[..., float], rounds: Sequence[float] = (1.0, 1.0, 1.0)) -> Callable[..., list[Seconds]]:
    """Stands for `in_turns`: of two calls, the first takes a second, the other what is said, if not these `rounds` of the first."""

    def in_turns(calls: Sequence[Callable[[], Any]], _: int) -> list[Seconds]:
        took = second(*calls)
        return [Seconds(tuple(rounds)), Seconds((took,) * len(rounds))]

    return in_turns


@pytest.fixture
def packed() -> nn.Sequential:
    model = folded()
    report = nofm.pack_(model, only_faster=False)
    assert [row.name for row in report.rows if row.packed] == ["3", "5", "8"]
    return model


def test_a_packed_network_computes_what_the_dense_one_does(packed):
    dense = folded()
    with torch.no_grad():
        for x in (X, X[:1], torch.randn(70, 3, 14, 14), torch.randn(2, 3, 21, 17), torch.randn(0, 3, 14, 14)):
            torch.testing.assert_close(packed(x), dense(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed(X.to(memory_format=torch.channels_last)), dense(X), rtol=1e-4, atol=1e-5)


def test_keys_and_values_of_the_state_dict_stay(packed):
    plain, ours = folded().state_dict(), packed.state_dict()
    assert list(ours) == list(plain)
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    dense = network()
    dense.load_state_dict(ours)  # strict
    assert nofm.verify(dense)["3.weight"].ok


def test_another_checkpoint_of_the_pattern_loads_and_a_dense_one_is_refused(packed):
    other = network()
    nn.init.normal_(other[3].weight)
    nn.init.normal_(other[8].bias)
    dense = copy.deepcopy(other).state_dict()
    nofm.sparsify_(other, "1:4")
    nofm.fold_(other)
    with torch.no_grad():
        packed(X)  # plans of the weights of before
        packed.load_state_dict(other.state_dict())
        torch.testing.assert_close(packed(X), other.eval()(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"3\.weight: 4,608 weights, and the packed layer keeps 1,152; nofm\.unpack_ the model first"):
        packed.load_state_dict(dense)
    del dense["3.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"3\.weight\""):
        packed.load_state_dict(dense)
    with pytest.raises(RuntimeError, match=r"3\.weight: shape \(2, 2\), and the packed layer has \(32, 16, 3, 3\)"):
        packed.load_state_dict({**other.state_dict(), "3.weight": torch.zeros(2, 2)})


def test_unpacked_it_is_the_layer_that_it_was():
    model = folded()
    layers, before = list(model), model.state_dict()
    nofm.pack_(model, only_faster=False)
    assert layers[3].weight.numel() == 0  # nothing dense is kept
    assert nofm.unpack_(model) == 3
    assert all(now is then for now, then in zip(model, layers, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(X).sum().backward()
    assert model[3].weight.grad is not None
    assert nofm.unpack_(model) == 0


def test_an_optimizer_from_before_trains_on_after_unpacking():
    model = folded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.pack_(model, only_faster=False)
    nofm.unpack_(model)
    before = copy.deepcopy(model.state_dict())
    model(X).square().sum().backward()
    optimizer.step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == set(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "verb",
    [lambda m: nofm.pack_(m, X), nofm.fold_, lambda m: nofm.sparsify_(m, "1:4"), nofm.summary, lambda m: nofm.cost(m, (1, 3, 14, 14))],
    ids=["pack_", "fold_", "sparsify_", "summary", "cost"],
)
def test_verbs_that_need_plain_layers_say_that_some_are_packed(verb, packed):
    with pytest.raises(nofm.LayerError, match=r"3, 5, 8 of this Sequential are packed; nofm\.unpack_\(model\) first"):
        verb(packed)


def test_verify_reads_packed_layers(packed):
    assert {w.name: str(w.pattern) for w in nofm.verify(packed).weights if w.ok} == {f"{name}.weight": "1:4" for name in "358"}


def test_copies_and_pickles_compute_by_themselves(packed):
    with torch.no_grad():
        expected = packed(X)
        copied = copy.deepcopy(packed)
        file = io.BytesIO()
        torch.save(packed, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        del packed
        for model in (copied, read):
            assert torch.equal(model(X), expected)


def test_a_packed_file_is_the_same_before_and_after(packed, tmp_path):
    nofm.save_packed(folded(), tmp_path / "a.safetensors")
    nofm.save_packed(packed, tmp_path / "b.safetensors")
    a, b = nofm.load_packed(tmp_path / "a.safetensors"), nofm.load_packed(tmp_path / "b.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_one_graph_when_compiled(packed):
    with torch.no_grad():
        expected = packed(X)
        compiled = torch.compile(packed, fullgraph=True)
        torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-5)
        shorter = torch.randn(3, 3, 16, 14)
        torch.testing.assert_close(compiled(shorter), packed(shorter), rtol=1e-4, atol=1e-5)


def test_conv1d_without_a_batch_too():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv1d(16, 8, 5, stride=2, padding=1, dilation=2), nn.Conv1d(8, 8, 1)).eval()
    nofm.sparsify_(dense, "1:4", preset="all")
    nofm.fold_(dense)
    ours = copy.deepcopy(dense)
    assert nofm.pack_(ours, only_faster=False).packed == 2
    with torch.no_grad():
        for x in (torch.randn(3, 16, 33), torch.randn(16, 20)):
            torch.testing.assert_close(ours(x), dense(x), rtol=1e-4, atol=1e-5)


# ---- what is timed, and what is decided ----


def test_the_faster_one_stays(monkeypatch):
    model = folded()
    monkeypatch.setattr(packing, "in_turns", measuring(lambda dense, packed: 0.5 if dense() is not None and packed().dim() == 2 else 2.0))
    report = nofm.pack_(model, X)
    assert {row.name: (row.packed, row.note) for row in report.rows} == {
        "3": (False, "dense is faster"),
        "5": (False, "dense is faster"),
        "8": (True, "packed"),
    }
    assert report.rows[0].input == (4, 16, 14, 14)
    assert [type(layer) for layer in (model[3], model[8])] == [nn.Conv2d, PackedLayer]
    threads = torch.get_num_threads()
    assert str(report).splitlines()[-4:] == [
        "1 of 3 weights with many zeros are packed; 25.0% of each is not zero.",
        f"Timed layers, all calls: 2500.000 ms instead of 3000.000, 1.20 x, {threads} thread{'s' * (threads != 1)}.",
        "Layers are compared as they lie in memory; a dense network in channels_last may",
        "be faster, and nofm bench times it, too.",
    ]


def test_what_speaks_against_the_times_is_told():
    """Where rounds differ so much that either may be faster; and that convolutions have another layout, which pack_ does not try."""
    row = packing.PackedRow("0", (8, 8), 0.25, (2, 8), 1.0, 0.5, True, "packed", 1, packing.Spread(2.0, 1.5, 3.0))
    unsure = dataclasses.replace(row, name="1", speed_up=packing.Spread(2.0, 0.9, 3.0))
    assert "not certain" not in str(packing.Packing((row,), 1))
    assert "channels_last" not in str(packing.Packing((row,), 1)), "linear layers have one layout"
    assert "In 1 of 2 layers the range holds 1" in str(packing.Packing((row, unsure), 1))


# Of seven rounds each: dense, packed, and what is chosen.
CHOICES: dict[str, tuple[Sequence[float], Sequence[float], str]] = {
    "faster in all": ((2, 2, 2, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1), "packed"),
    "slower once": ((2, 2, 2, 2, 2, 2, 2), (1, 1, 9, 1, 1, 1, 1), "packed"),
    "slower twice": ((2, 2, 2, 2, 2, 2, 2), (1, 1, 9, 1, 9, 1, 1), "not faster in nearly all rounds"),
    "as slow twice": ((2, 2, 2, 2, 2, 2, 2), (1, 1, 2, 1, 2, 1, 1), "not faster in nearly all rounds"),
    # Both had a slow machine in half of the rounds; side by side one is always the faster, though not by the ranges.
    "a machine that changes": ((2, 8, 2, 8, 2, 8, 2), (1.8, 7, 1.8, 7, 1.8, 7, 1.8), "packed"),
    # The same sets of times in other rounds: medians alone would take it.
    "the same times apart": ((2, 8, 2, 8, 2, 8, 2), (7, 1.8, 7, 1.8, 1.8, 1.8, 7), "not faster in nearly all rounds"),
    "too little": ((2, 2, 2, 2, 2, 2, 2), (1.95, 1.95, 1.95, 1.95, 1.95, 1.95, 1.95), "gains less than 5%"),
    "just too little": ((2, 2, 2, 2, 2, 2, 2), (1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9), "gains less than 5%"),
    "slower": ((2, 2, 2, 2, 2, 2, 2), (3, 3, 3, 3, 3, 3, 3), "dense is faster"),
    "as fast": ((2, 2, 2, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2, 2), "dense is faster"),
}


@pytest.mark.parametrize(("dense", "without", "chosen"), CHOICES.values(), ids=CHOICES)
def test_a_layer_is_packed_where_that_is_beyond_the_spread(dense, without, chosen, monkeypatch):
    model = folded()
    monkeypatch.setattr(packing, "in_turns", lambda calls, rounds: [Seconds(tuple(map(float, each))) for each in (dense, without)])
    report = nofm.pack_(model, X)
    assert {row.note for row in report.rows} == {chosen}
    assert report.packed == (3 if chosen == "packed" else 0) == sum(isinstance(layer, PackedLayer) for layer in model)
    unsure = "3 of 3 would gain by the medians, but not in 2 or more of 7 rounds, and stay as they are."
    assert (unsure in " ".join(str(report).split())) == (chosen == "not faster in nearly all rounds")


def test_a_layer_that_gains_next_to_nothing_stays_and_calls_are_counted(monkeypatch):
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(self.layer(x)))

    monkeypatch.setattr(packing, "in_turns", measuring(lambda dense, packed: 0.97))
    model = Often().eval()
    model.layer.weight.data[:, ::2] = 0.0
    report = nofm.pack_(model, (2, 32))  # a shape will do
    assert "packed where it gains 5% or more and is faster in all rounds but 1" in " ".join(str(report).split())
    (row,) = report.rows
    assert (row.packed, row.note, row.calls) == (False, "gains less than 5%", 3)
    monkeypatch.setattr(packing, "in_turns", measuring(lambda dense, packed: 0.5))
    report = nofm.pack_(model, (2, 32))
    assert "2.00 (2.00-2.00)  packed, 3 calls" in str(report)
    assert "where it gains" not in str(report), "all are, which may have been asked for"
    assert "1500.000 ms instead of 3000.000, 2.00 x" in str(report)


def test_layers_inside_a_checkpoint_wrapper_are_packed_too():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = folded()
    keys = list(model.state_dict())
    model[8] = checkpoint_wrapper(model[8])
    with torch.no_grad():
        before = model(X)
        assert nofm.pack_(model, only_faster=False).packed == 3
        torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert nofm.unpack_(model) == 3


def test_an_empty_example_is_refused():
    with pytest.raises(nofm.LayerError, match="3: is given nothing by the example"):
        nofm.pack_(folded(), torch.randn(0, 3, 14, 14))


def test_times_are_real():
    slow, fast = in_turns([lambda: torch.randn(300, 300) @ torch.randn(300, 300), lambda: None], 3)
    assert [len(times.rounds) for times in (slow, fast)] == [3, 3]
    assert slow.median > 10 * fast.median > 0


def test_calls_take_turns():
    """What comes over the machine for a while then comes over all of them; before, each is called twice, which is not counted."""
    called: list[str] = []
    in_turns([lambda: (called.append("a"), time.sleep(0.006)), lambda: (called.append("b"), time.sleep(0.006))], 3)
    assert "".join(called) == "ab" * 5


def test_the_spread_of_a_ratio_is_of_rounds_side_by_side():
    """Both were slow in the second round and fast in the third: their ratio has varied less than they have."""
    dense, packed = Seconds((4.0, 8.0, 1.0)), Seconds((2.0, 5.0, 0.4))
    assert packed.milliseconds() == Spread(2000.0, 400.0, 5000.0)
    assert packed.speed_up_from(dense) == Spread(2.0, 1.6, 2.5)
    assert packed.speed_up_from(dense).told(2) == "2.00 (1.60-2.50)"


NAMES = {"short": "layer", "long": "encoder_layer_11_of_a_network_whose_names_are_long_to_read"}


@pytest.mark.parametrize("names", NAMES)
def test_the_table_fits_a_terminal(names, monkeypatch):
    """80 columns, whatever the names; each layer is there, and so is why some were not tried."""
    model = nn.Sequential(*(nn.Sequential() for _ in range(12)))
    for part in model:
        part.add_module(NAMES[names], nn.Linear(1024, 16))
        part.add_module("other", nn.Linear(1024, 8).double())
    for parameter in model.parameters():
        parameter.data[..., ::2] = 0.0
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: [part[0](x) for part in self])
    monkeypatch.setattr(packing, "in_turns", measuring(lambda dense, packed: 0.5, rounds=(1.0, 10.5, 0.25)))
    lines = str(nofm.pack_(model.eval(), torch.randn(2, 1024))).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for i in range(12):
        assert f"{i}.{NAMES[names]} 16x1024 1000.000 500.000 2.00 (0.50-21.00) packed" in text
        assert f"{i}.other (8x1024)" in text
    assert text.count("its weight is torch.float64 on cpu, and packed layers are fp32 on the CPU") == 1, "once, with all names"
    assert "range: from the lowest to the highest speed-up of a round" in text
    assert len(lines) < (30 if names == "short" else 45)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    monkeypatch.setattr(products, "linear", lambda weight, bias: lambda x: F.linear(x, weight, bias) * 1.01)
    model = folded()
    with pytest.raises(nofm.LayerError, match=r"8: packed, its output differs from the dense one by .*; this is a bug of nofm"):
        nofm.pack_(model, X)
    assert not any(isinstance(layer, PackedLayer) for layer in model)
    assert not model[8]._forward_hooks


def test_examples_as_arguments_and_keywords(monkeypatch):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.first(x) * scale

    monkeypatch.setattr(packing, "in_turns", measuring(lambda dense, packed: 0.5))
    for example in ({"x": torch.randn(2, 32), "scale": torch.ones(1)},):
        model = Two()
        nofm.sparsify_(model, "1:8", preset="all")
        nofm.fold_(model)
        report = nofm.pack_(model.eval(), example)
        assert {row.name: row.note for row in report.rows} == {"first": "packed", "unused": "not called by the example"}
        assert "not called by the example" in str(report)


def test_layers_that_cannot_be_packed_say_why():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inner.weight

    torch.manual_seed(0)
    embedding, tied = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
    tied.weight = embedding.weight
    model = nn.ModuleDict(
        {
            "reader": Reader(),
            "circular": nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
            "uneven": nn.Conv2d(8, 8, 2, padding="same"),
            "turned": nn.ConvTranspose2d(8, 8, 3),
            "fp64": nn.Linear(8, 8).double(),
            "embedding": embedding,
            "tied": tied,
            "hooked": nn.Linear(8, 8),
            "fine": nn.Linear(8, 8),
        }
    ).eval()
    model["hooked"].register_forward_hook(lambda *_: None)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data[..., : parameter.shape[-1] // 2] = 0.0
            parameter.data[: len(parameter) // 2] = 0.0
    notes = {row.name: row.note for row in nofm.pack_(model, only_faster=False).rows}
    assert notes == {
        "reader.inner": "another module reads its weight",
        "circular": "it is padded by circular, not by zeros",
        "uneven": 'its padding="same" is larger on one side',
        "turned": "ConvTranspose2d is no plain Linear, Conv1d or Conv2d",
        "fp64": "its weight is torch.float64 on cpu, and packed layers are fp32 on the CPU",
        "embedding": "Embedding is no plain Linear, Conv1d or Conv2d",
        "tied": "its weight has another name, too",
        "hooked": "it has hooks",
        "fine": "packed, not timed",
    }


def test_a_model_that_is_one_layer_stays_whole():
    model = nn.Linear(8, 8).eval()
    model.weight.data[:, ::2] = 0.0
    x = torch.randn(2, 8)
    with torch.no_grad():
        before = model(x)
        (row,) = nofm.pack_(model, x, only_faster=False).rows
        assert row.note == "it is the model itself, which cannot be replaced in place: take nn.Sequential(model).eval()"
        assert torch.equal(model(x), before)


def test_a_layer_under_two_names_stays_whole():
    layer = nn.Linear(8, 8)
    layer.weight.data[:, ::2] = 0.0
    model, x = nn.Sequential(layer, nn.ReLU(), layer).eval(), torch.randn(2, 8)
    with torch.no_grad():
        before = model(x)
        (row,) = nofm.pack_(model, only_faster=False).rows
        assert row.note == "its weight has another name, too"
        assert torch.equal(model(x), before)


def test_transformers_own_kernels_read_weights_and_stay_dense():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    nofm.sparsify_(model, "1:4", preset="all")
    nofm.fold_(model)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        before = model(x)
        notes = {row.name: row.note for row in nofm.pack_(model, only_faster=False).rows}
        torch.testing.assert_close(model(x), before)
    assert notes["layers.0.linear1"] == "another module reads its weight"
    assert notes["layers.0.self_attn.in_proj_weight"] == "MultiheadAttention is no plain Linear, Conv1d or Conv2d"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda m: nofm.sparsify_(m, "1:4"), r"this model is sparsified, .*; nofm\.fold_\(model\) first"),
        (lambda m: m.train(), r"in training mode, .*; model\.eval\(\) first"),
        (lambda m: None, r"no layer has zeros worth leaving out, 40% or more of a weight; see nofm\.verify"),
    ],
    ids=["sparsified", "training", "dense"],
)
def test_models_that_are_not_ready_are_refused(prepare, message):
    model = network().eval()
    prepare(model)
    with pytest.raises(nofm.LayerError, match=message):
        nofm.pack_(model, X)


def test_without_an_example_it_asks_for_one():
    with pytest.raises(nofm.LayerError, match=r"give an example input, .*; or only_faster=False"):
        nofm.pack_(folded())


def test_what_a_packed_layer_is_given_is_looked_at(packed):
    layer: Any = packed[8]
    with pytest.raises(nofm.LayerError, match=r"8: is packed, for fp32 on the CPU, and was given torch\.float64 on cpu"):
        layer(torch.randn(2, 128).double())
    with pytest.raises(nofm.LayerError, match=r"8: is packed, and has no gradient; use torch\.inference_mode"):
        layer(torch.randn(2, 128, requires_grad=True))
    with pytest.raises(nofm.LayerError, match=r"8: is packed, .* moved to torch\.float64 on cpu; move it back"):
        packed.double()[8](torch.randn(2, 128))
    with pytest.raises(RuntimeError):  # torch's own words
        packed.float()[8](torch.randn(2, 100))


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(products, "unavailable", lambda: "no C compiler was found")
    with pytest.raises(nofm.LayerError, match="packed layers need a C compiler at first use: no C compiler was found"):
        nofm.pack_(folded(), X)


def test_the_printed_layer_tells_what_it_keeps(packed):
    assert "8): PackedLayer(in_features=128, out_features=64, bias=True, kept=25.0%)" in repr(packed)


def test_a_bench_is_beside_the_faster_dense_network():
    rows = nofm.pack_(folded(), only_faster=False)
    dense = {"dense": (4.0, 4.0, 4.0), "dense, channels_last": (3.0, 2.5, 6.0), "dense, compiled": (2.0, 2.0, 2.0)}
    times = {**dense, "packed": (1.5, 2.0, 1.0), "packed, compiled": (0.5, 0.5, 0.25)}
    found = Bench(rows, {name: Seconds(rounds) for name, rounds in times.items()})
    assert found.speed_up == 2.0
    assert found.seconds["dense, channels_last"] == 3.0
    assert str(found).splitlines()[-8:] == [
        "the whole network     ms (range)                 speed-up (range)",
        "dense                 4000.00 (4000.00-4000.00)",
        "dense, channels_last  3000.00 (2500.00-6000.00)",
        "dense, compiled       2000.00 (2000.00-2000.00)",
        "packed                1500.00 (1000.00-2000.00)  2.00 (1.25-6.00)",
        "packed, compiled      500.00 (250.00-500.00)     4.00 (4.00-8.00)",
        "Medians of 3 rounds in turns; range: the lowest and the highest of a round.",
        "Speed-up: beside the faster dense network that is compiled or not, as this one.",
    ]


def test_a_bench_of_a_small_network_has_digits_to_show_it():
    times = {name: Seconds((0.00012, 0.00013, 0.00011)) for name in ("dense", "packed")}
    assert "packed             0.120 (0.110-0.130)  1.00 (1.00-1.00)" in str(Bench(packing.Packing((), 1), times))


def test_a_bench_says_where_nothing_was_packed():
    times = {"dense": Seconds((4.0,)), "dense, channels_last": Seconds((3.0,)), "packed": Seconds((3.1,))}
    said = ["No layer was faster without its zeros, so dense and packed are the same network,", "and differ by noise."]
    assert said[0] not in str(Bench(nofm.pack_(folded(), only_faster=False), times))
    assert str(Bench(packing.Packing((), 1), times)).splitlines()[-2:] == said


def test_a_bench_runs_and_leaves_the_model_alone():
    model = folded()
    before = model.state_dict()
    found = bench(model, X, rounds=1)
    assert set(found.seconds) == {"dense", "dense, channels_last", "packed", "packed, channels_last"}
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(layer, PackedLayer) for layer in model)


def test_the_code_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)  # that of other runtimes is in test_onnx.py
    exec(compile(code, "docs/inference.md", "exec", dont_inherit=True), {})
    assert "of 19 weights with many zeros are packed" in capsys.readouterr().out
