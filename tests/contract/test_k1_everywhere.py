"""K1, the same mask everywhere: in every dtype, memory layout, torch mode and thread count, compiled or not, bit for bit.

The mask of a contiguous float32 weight is checked against the oracle in test_k1_masks.py; here every other way to the same
values has to give that same mask. The weights are full of ties, denormals and numbers one ulp apart, where shortcuts show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing
from k1_oracle import assert_same_mask, nasty_weight, oracle_mask
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import nofm
from nofm import Pattern
from nofm.masks import Grouping
from nofm.ste import select

PATTERNS = ["1:2", "2:4", "3:7", "4:8", "1:16", "8:32"]  # the last one is too large for the pairwise way

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    return x.view(INTEGER[x.element_size()])


def finite_weight_of_any_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every finite number of the format is as likely as any other; one weight in four repeats its neighbour, negated."""
    generator = torch.Generator().manual_seed(0)
    width = 8 * dtype.itemsize
    code = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1) - 1, shape, generator=generator).to(INTEGER[dtype.itemsize])
    repeat = torch.rand(shape, generator=generator) < 0.25
    code = torch.where(repeat, code.roll(1, dims=-1) ^ torch.iinfo(code.dtype).min, code)
    weight = code.view(dtype)
    return torch.where(weight.double().isfinite(), code, 0).view(dtype)


# ---- dtypes ----

WIDER = {
    torch.float8_e4m3fn: [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    torch.float8_e5m2: [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    torch.float16: [torch.float32, torch.float64],
    torch.bfloat16: [torch.float32, torch.float64],  # its denormals are denormals in float32 and normal in float64
    torch.float32: [torch.float64],
    torch.float64: [],
}


@pytest.mark.parametrize("dtype", WIDER, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_wider_dtype_with_the_same_values_has_the_same_mask(pattern: str, dtype: torch.dtype):
    n, m = Pattern(pattern).n, Pattern(pattern).m
    w_GM = finite_weight_of_any_bits(dtype, 2048, m)
    expected = oracle_mask(w_GM, n)
    assert_same_mask(nofm.mask(w_GM, pattern), expected, w_GM)
    for wider in WIDER[dtype]:
        same_values = w_GM.to(wider)
        assert torch.equal(same_values.double(), w_GM.double())
        assert_same_mask(nofm.mask(same_values, pattern), expected, same_values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_number_against_every_other(dtype: torch.dtype):
    every = torch.arange(-128, 128).to(torch.int8).view(dtype)
    every = every[every.double().isfinite()]
    i, j = torch.cartesian_prod(torch.arange(len(every)), torch.arange(len(every))).unbind(-1)
    w_GM = torch.stack([bits(every)[i], bits(every)[j]], dim=-1).view(dtype)
    assert_same_mask(nofm.mask(w_GM, "1:2"), oracle_mask(w_GM, 1), w_GM)


# ---- memory layouts ----


def with_steps(w: Tensor) -> Tensor:
    """The same values as every second one, in every dimension, of a larger tensor that is NaN in between."""
    larger = torch.full([2 * size for size in w.shape], torch.nan)
    view = larger[tuple(slice(None, None, 2) for _ in w.shape)]
    return view.copy_(w)


def inside_a_larger_one(w: Tensor) -> Tensor:
    larger = torch.full([size + 3 for size in w.shape], torch.nan)
    view = larger[tuple(slice(1, 1 + size) for size in w.shape)]
    return view.copy_(w)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda w: w.to(memory_format=torch.channels_last),
    "dimensions reversed": lambda w: w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "two dimensions transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "steps of two": with_steps,
    "inside a larger one": inside_a_larger_one,
}


@pytest.mark.parametrize("axis", [0, 1, 2, -1, "flat"])
@pytest.mark.parametrize("relay", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_layout_does_not_matter(relay: Callable[[Tensor], Tensor], axis: int | str):
    plain = nasty_weight(32, 64, 3, 5)
    weight = relay(plain)
    assert weight.stride() != plain.stride()
    assert torch.equal(bits(weight.contiguous()), bits(plain))
    for pattern in PATTERNS:
        assert_same_mask(nofm.mask(weight, pattern, axis, pad=True), nofm.mask(plain, pattern, axis, pad=True), plain)


@pytest.mark.parametrize("axis", [0, 1, 2, "flat"])
def test_an_expanded_weight(axis: int | str):
    weight = nasty_weight(1, 64, 1).expand(32, 64, 32)
    for pattern in PATTERNS:
        kept = nofm.mask(weight, pattern, axis, pad=True)
        assert_same_mask(kept, nofm.mask(weight.contiguous(), pattern, axis, pad=True), weight)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_transposing_the_weight_and_the_axis_transposes_the_mask(pattern: str):
    weight = nasty_weight(224, 224)
    assert torch.equal(nofm.mask(weight.T, pattern, axis=0), nofm.mask(weight, pattern, axis=1).T)


def test_a_3d_convolution_in_channels_last():
    weight = nasty_weight(8, 16, 3, 3, 3)
    for axis in (1, 4, "flat"):
        expected = nofm.mask(weight, "2:4", axis, pad=True)
        assert_same_mask(nofm.mask(weight.to(memory_format=torch.channels_last_3d), "2:4", axis, pad=True), expected, weight)


# ---- torch's modes and settings ----


@contextlib.contextmanager
def setting(set_it: Callable[..., object], value: object, before: object) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "one thread": lambda: setting(torch.set_num_threads, 1, torch.get_num_threads()),
    "default dtype float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
    "default device meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_do_not_matter(mode: Callable[[], contextlib.AbstractContextManager]):
    weight = nasty_weight(128, 7 * 32).requires_grad_()
    expected = {pattern: nofm.mask(weight, pattern) for pattern in PATTERNS}
    with mode():
        kept = {pattern: nofm.mask(weight, pattern) for pattern in PATTERNS}
    for pattern in PATTERNS:
        assert_same_mask(kept[pattern], expected[pattern], weight)


def test_flushing_denormals_does_not_change_a_mask_or_a_kept_weight():
    # Integers are compared, so it cannot matter that 2^-149 then reads as 0. Small tensors: the setting holds for this thread.
    denormal = torch.tensor([0, 1, 0, 2, 5, 4, -(2**31) + 9, 3, 0, 0, 0, 1], dtype=torch.int32).view(torch.float32).expand(4, 12)
    inputs = [denormal.contiguous(), nasty_weight(64, 7 * 32), finite_weight_of_any_bits(torch.bfloat16, 64, 7 * 32)]
    inputs += [torch.tensor([[0, 1, 0, 2]]).view(torch.float64), torch.tensor([[0, 1, 0, 2]], dtype=torch.int16).view(torch.float16)]
    expected = [[nofm.mask(w, pattern, pad=True) for pattern in PATTERNS] for w in inputs]
    assert torch.set_flush_denormal(True), "this machine cannot flush denormals, so the test would show nothing"
    try:
        assert (denormal * 1.0).count_nonzero() == 0  # it does flush
        flushed = [[nofm.mask(w, pattern, pad=True) for pattern in PATTERNS] for w in inputs]
        seen = [select(w, flushed[i][1]) for i, w in enumerate(inputs)]
    finally:
        torch.set_flush_denormal(False)
    for i, w in enumerate(inputs):
        for kept, before in zip(flushed[i], expected[i], strict=True):
            assert_same_mask(kept, before, w)
        assert torch.equal(bits(seen[i]), bits(w) * expected[i][1])
    assert nofm.mask(denormal, "2:4").tolist() == [[False, True, False, True, True, False, True, False, True, False, False, True]] * 4


def test_a_mask_only_reads_its_weight_and_shares_nothing_with_it():
    weight = torch.nn.Parameter(nasty_weight(8, 32))
    before, version, seed = bits(weight.detach()).clone(), weight._version, torch.get_rng_state()
    first, second = nofm.mask(weight, "2:4"), nofm.mask(weight, "2:4")
    assert not first.requires_grad
    assert type(first) is Tensor
    first.logical_not_()  # the caller may do what they like with it
    assert torch.equal(first, ~second)
    assert torch.equal(bits(weight.detach()), before)
    assert weight._version == version
    assert torch.equal(torch.get_rng_state(), seed)


def test_an_inference_tensor_outside_of_inference_mode():
    plain = nasty_weight(8, 32)
    with torch.inference_mode():
        weight = plain.clone()
    assert weight.is_inference()
    assert_same_mask(nofm.mask(weight, "2:4"), nofm.mask(plain, "2:4"), plain)


@pytest.mark.parametrize("pattern", ["2:4", "8:32"])
def test_a_weight_without_values_has_a_mask_without_values(pattern: str):
    on_meta = nofm.mask(torch.empty(8, 32, 3, 3, device="meta"), pattern)
    assert (on_meta.device.type, on_meta.dtype, on_meta.shape) == ("meta", torch.bool, (8, 32, 3, 3))
    with FakeTensorMode():
        fake = nofm.mask(torch.randn(8, 32, 3, 3), pattern)
    assert isinstance(fake, FakeTensor)
    assert (fake.device.type, fake.dtype, fake.shape) == ("cpu", torch.bool, (8, 32, 3, 3))


def test_a_batch_of_weights_under_vmap():
    weights = nasty_weight(3, 16, 32)
    for pattern in ("2:4", "8:32"):
        grouping = Grouping(Pattern(pattern))
        kept = torch.func.vmap(grouping.mask)(weights)
        assert torch.equal(kept, torch.stack([nofm.mask(w, pattern) for w in weights]))


# ---- torch.compile ----


def masks_of_a_convolution(weight: Tensor) -> tuple[Tensor, ...]:
    return (
        nofm.mask(weight, "2:4"),
        nofm.mask(weight, "1:4", axis=0),
        nofm.mask(weight, "8:32"),
        nofm.mask(weight, "3:7", axis="flat", pad=True),
    )


def test_compiled_is_eager():
    compiled = torch.compile(masks_of_a_convolution, fullgraph=True)
    for seed in (0, 1):
        weight = nasty_weight(16, 32, 3, 3, seed=seed)
        for kept, expected in zip(compiled(weight), masks_of_a_convolution(weight), strict=True):
            assert_same_mask(kept, expected, weight)
    # A compiled graph does not look for non-finite weights; that it keeps N of each group all the same is what forward relies on.
    broken = torch.where(torch.rand(weight.shape) < 0.2, torch.nan, weight)
    assert (compiled(broken)[0].sum(1) == 16).all()
    assert (compiled(broken)[2].sum(1) == 8).all()


def test_compiled_with_dynamic_shapes_is_eager():
    def both_ways(weight: Tensor) -> tuple[Tensor, Tensor]:
        return nofm.mask(weight, "2:4"), nofm.mask(weight, "8:32")

    graphs = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(both_ways, fullgraph=True, dynamic=True, backend=graphs)
    for shape in ((6, 64), (7, 96), (33, 160)):
        weight = nasty_weight(*shape).bfloat16()
        weight = torch.where(weight.isfinite(), weight, 1.0)  # the largest float32 numbers round to Inf
        for kept, expected in zip(compiled(weight), both_ways(weight), strict=True):
            assert_same_mask(kept, expected, weight)
    assert graphs.frame_count == 1  # one graph for all shapes


# ---- the weight that is used ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pruned_is_plus_zero_and_kept_is_untouched(pattern: str, dtype: torch.dtype):
    m = Pattern(pattern).m
    weight = finite_weight_of_any_bits(dtype, 512, m)
    weight[0::8, m - 1], weight[1::8, 0], weight[2::8, m // 2], weight[3::8, m - 1] = -0.0, torch.nan, torch.inf, -torch.inf
    weight[4::8], weight[5::8] = torch.inf, torch.nan  # more of them than can be kept
    kept = Grouping(Pattern(pattern)).mask(weight)
    pruned = weight[~kept]  # holds all that a multiplication by zero would not turn into +0.0:
    assert all(case.any() for case in (pruned < 0, pruned.signbit() & (pruned == 0), pruned.isinf(), pruned.isnan()))
    seen = select(weight, kept)
    assert seen.dtype == dtype
    assert (bits(seen)[~kept] == 0).all()
    assert torch.equal(bits(seen)[kept], bits(weight)[kept])
