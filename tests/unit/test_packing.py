"""Masks as bits: `pack`, `unpack` and `differing`.

Packed masks are written to files and compared over a whole run, so the bit order is part of the format: it is spelled out here
in plain Python, one weight at a time, rather than only as a round trip (which two matching mistakes would pass).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nofm.masks import differing, pack, unpack

SHAPES = [(), (0,), (0, 4), (4, 0, 3), (1,), (7,), (8,), (9,), (3, 5), (16, 16), (2, 3, 5, 7), (1000,)]


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def plain_pack(bits: list[bool]) -> list[int]:
    """Weight i is bit i % 8 of byte i // 8, the lowest bit first; what is left of the last byte is 0."""
    return [sum(2**i for i, bit in enumerate(bits[start : start + 8]) if bit) for start in range(0, len(bits), 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_and_bit_order(shape: tuple[int, ...]):
    mask = random_mask(*shape)
    packed = pack(mask)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == plain_pack(mask.flatten().tolist())
    back = unpack(packed, mask.shape)
    assert back.dtype == torch.bool
    assert back.shape == mask.shape
    assert torch.equal(back, mask)


@pytest.mark.parametrize("i", range(17))
def test_one_weight_is_one_bit(i: int):
    mask = torch.zeros(17, dtype=torch.bool)
    mask[i] = True
    assert pack(mask).tolist() == [1 << i & 0xFF, 1 << i >> 8 & 0xFF, 1 << i >> 16]


def test_the_order_is_that_of_the_logical_index_in_every_memory_layout():
    mask = random_mask(6, 8, 3, 3)
    layouts = {
        "channels_last": mask.to(memory_format=torch.channels_last),
        "transposed": mask.transpose(0, 3).contiguous().transpose(0, 3),
        "strided": mask.repeat_interleave(2, dim=1)[:, ::2],
    }
    for name, same in layouts.items():
        assert not same.is_contiguous(), name
        assert torch.equal(pack(same), pack(mask)), name
    expanded = random_mask(1, 13).expand(5, 13)
    assert torch.equal(pack(expanded), pack(expanded.contiguous()))


def test_packing_reads_only():
    mask = random_mask(5, 7)
    before, packed = mask.clone(), pack(mask)
    pack(mask).fill_(0)
    unpack(packed, mask.shape).fill_(False)
    assert torch.equal(mask, before)
    assert torch.equal(packed, pack(before))


def test_differing_is_the_popcount_for_every_pair_of_bytes():
    pairs = torch.tensor(list(itertools.product(range(256), repeat=2)), dtype=torch.uint8)
    for a, b in ((0x00, 0x00), (0xFF, 0x00), (0xAA, 0x55), (0x0F, 0xFF)):
        assert differing(torch.tensor([a], dtype=torch.uint8), torch.tensor([b], dtype=torch.uint8)).item() == (a ^ b).bit_count()
    assert differing(pairs[:, 0], pairs[:, 1]).item() == sum((a ^ b).bit_count() for a in range(256) for b in range(256))
    single = torch.arange(256, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.uint8)
    assert [differing(byte, zero).item() for byte in single.split(1)] == [byte.bit_count() for byte in range(256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_differing_is_the_number_of_weights_whose_mask_changed(shape: tuple[int, ...]):
    a, b = random_mask(*shape, seed=1), random_mask(*shape, seed=2)
    count = differing(pack(a), pack(b))
    assert count.shape == ()
    assert count.dtype == torch.int64
    assert count.item() == sum(x != y for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))


def test_a_count_above_what_a_byte_or_a_short_holds():
    ones, zeros = torch.ones(100_003, dtype=torch.bool), torch.zeros(100_003, dtype=torch.bool)
    assert differing(pack(ones), pack(zeros)).item() == 100_003
    assert differing(pack(ones), pack(ones)).item() == 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.booleans(), max_size=70), st.randoms(use_true_random=False))
def test_any_mask(bits: list[bool], random):
    other = [bit ^ (random.random() < 0.3) for bit in bits]
    a, b = torch.tensor(bits, dtype=torch.bool), torch.tensor(other, dtype=torch.bool)
    assert pack(a).tolist() == plain_pack(bits)
    assert unpack(pack(a), a.shape).tolist() == bits
    assert differing(pack(a), pack(b)).item() == sum(x != y for x, y in zip(bits, other, strict=True))
