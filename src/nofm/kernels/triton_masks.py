"""Triton kernels over many weights at once: masked copies, the SR-STE term, masks as bits with flip counts.

What makes them fast is that each thread holds whole groups in registers, so that a mask costs no exchange between threads: a sorting
network of integer minima and maxima finds the N-th largest magnitude, and hides behind the memory traffic. Where groups are
contiguous (Linear, channels_last convolutions) a thread reads its group as 16-byte vectors; where they are strided (NCHW
convolutions, K kernel positions apart) it reads one weight per load and neighbouring threads read neighbouring positions. Every
kernel reads each weight once.

One launch serves all weights of one pattern: `table` holds a row for each weight (addresses, size, stride), `block_weight` says
which weight a program works on. A group is `lane`: element m of lane q is at (q // K) * S * K + m * K + q % K, where K is the axis
stride and S the weights of a lane (M, or 8 where bits are written and M is smaller).

Suffixes: B lanes of a program, S weights of a lane. Tuples of tensors hold one [B] tensor for each weight of a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_sort import count_ones, keep_bits, keep_n, magnitude_key

__all__ = ["bits_kernel", "masked_kernel", "not_finite_kernel", "one_masked_kernel", "refine_kernel"]


@triton.jit
def _columns(x_B4, B: tl.constexpr):
    """A [B, 4] tile as four [B] tensors; free, since a thread holds all four."""
    even, odd = tl.split(tl.reshape(x_B4, (B, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _tile(x0, x1, x2, x3, B: tl.constexpr):
    """The inverse of `_columns`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (B, 4))


@triton.jit
def _lanes(table, block_weight, first_block, ROW: tl.constexpr, B: tl.constexpr):
    """This program's weight, as the address of its row in the table, and its lanes."""
    weight = tl.load(block_weight + tl.program_id(0))
    block = tl.program_id(0) - tl.load(first_block + weight)
    return table + weight * ROW, block * B + tl.arange(0, B)


@triton.jit
def _base(lane, row, S: tl.constexpr, K: tl.constexpr, K4: tl.constexpr):
    """The offset of each lane's first weight, and the stride between its weights: K, or if that is 0 the table's.

    K4 says that the table's strides divide by 4, so that four lanes side by side are read as one vector.
    """
    if K == 0:
        stride = tl.multiple_of(tl.load(row + 1).to(tl.int32), 4) if K4 else tl.load(row + 1).to(tl.int32)
        offset = (lane // stride) * (S * stride) + lane % stride
    else:
        stride = K
        offset = (lane // K) * (S * K) + lane % K
    return offset, stride


@triton.jit
def _load(pointer, offset, stride, live, S: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr):
    """The weights of each lane: S/4 tiles of [B, 4] where VECTOR, else S tensors of [B]."""
    parts = ()
    if VECTOR:
        for c in tl.static_range(S // 4):
            address = pointer + offset[:, None] + (4 * c + tl.arange(0, 4))[None, :]
            parts = parts + (tl.load(address, mask=live[:, None], other=0.0),)
    else:
        for s in tl.static_range(S):
            parts = parts + (tl.load(pointer + offset + s * stride, mask=live, other=0.0),)
    return parts


@triton.jit
def _store(pointer, offset, stride, live, parts, S: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr):
    """The inverse of `_load`."""
    if VECTOR:
        for c in tl.static_range(S // 4):
            address = pointer + offset[:, None] + (4 * c + tl.arange(0, 4))[None, :]
            tl.store(address, parts[c].to(pointer.dtype.element_ty), mask=live[:, None])
    else:
        for s in tl.static_range(S):
            tl.store(pointer + offset + s * stride, parts[s].to(pointer.dtype.element_ty), mask=live)


@triton.jit
def _keys(parts, S: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr):
    """The magnitude key of each weight of a lane."""
    keys = ()
    if VECTOR:
        for c in tl.static_range(S // 4):
            keys = keys + _columns(magnitude_key(parts[c]), B)
    else:
        for s in tl.static_range(S):
            keys = keys + (magnitude_key(parts[s]),)
    return keys


@triton.jit
def _flags(parts, N: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr):
    """Which weights of each lane (of one group) are kept, shaped as the parts are."""
    keep = keep_n(_keys(parts, M, VECTOR, B), N, 0, M)
    flags = ()
    if VECTOR:
        for c in tl.static_range(M // 4):
            flags = flags + (_tile(keep[4 * c], keep[4 * c + 1], keep[4 * c + 2], keep[4 * c + 3], B),)
    else:
        flags = keep
    return flags


@triton.jit
def _write_masked(
    w_ptr, out_ptr, offset, stride, live, FLAGS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The kept weights of each lane and +0.0 elsewhere or, where FLAGS, ones and zeros."""
    parts = _load(w_ptr, offset, stride, live, M, VECTOR, B)
    flags = _flags(parts, N, M, VECTOR, B)
    masked = ()
    for p in tl.static_range(M // 4 if VECTOR else M):
        if FLAGS:
            masked = masked + (flags[p],)
        else:
            masked = masked + (tl.where(flags[p], parts[p], 0.0),)
    _store(out_ptr, offset, stride, live, masked, M, VECTOR, B)


@triton.jit
def masked_kernel(
    table, block_weight, first_block, in_like, out_like, FLAGS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K4: tl.constexpr, VECTOR: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Masked weights (or, where FLAGS, masks) of many weights. A row: lanes, stride, place, address of in, address of out."""
    row, lane = _lanes(table, block_weight, first_block, ROW, B)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(in_like.dtype.element_ty)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(out_like.dtype.element_ty)), 16)
    offset, stride = _base(lane, row, M, K, K4)
    _write_masked(w_ptr, out_ptr, offset, stride, lane < tl.load(row), FLAGS, N, M, VECTOR, B)


@triton.jit
def one_masked_kernel(
    w_ptr, out_ptr, lanes, any_stride,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K4: tl.constexpr, VECTOR: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The masked form of one weight, for compiled code, which knows tensors and not addresses."""
    lane = tl.program_id(0) * B + tl.arange(0, B)
    if K == 0:
        stride = tl.multiple_of(any_stride, 4) if K4 else any_stride
        offset = (lane // stride) * (M * stride) + lane % stride
    else:
        stride = K
        offset = (lane // K) * (M * K) + lane % K
    _write_masked(w_ptr, out_ptr, offset, stride, lane < lanes, False, N, M, VECTOR, B)


@triton.jit
def refine_kernel(
    table, block_weight, first_block, factors, scale, weight_like, out_like, SIGN: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K4: tl.constexpr, VECTOR: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out += factor * scale * (w, or sign(w)) where pruned. A row: lanes, stride, place, address of w, address of out.

    `factors` has one number for each weight, at its place; `scale` is one number for all. `out` is the gradient, or the weight itself.
    """
    row, lane = _lanes(table, block_weight, first_block, ROW, B)
    live = lane < tl.load(row)
    factor = tl.load(factors + tl.load(row + 2)) * tl.load(scale)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(weight_like.dtype.element_ty)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(out_like.dtype.element_ty)), 16)
    offset, stride = _base(lane, row, M, K, K4)
    parts = _load(w_ptr, offset, stride, live, M, VECTOR, B)
    before = _load(out_ptr, offset, stride, live, M, VECTOR, B)
    flags = _flags(parts, N, M, VECTOR, B)
    after = ()
    for p in tl.static_range(M // 4 if VECTOR else M):
        w = parts[p].to(tl.float32)
        if SIGN:
            w = (w > 0).to(tl.float32) - (w < 0).to(tl.float32)
        after = after + (tl.where(flags[p], before[p].to(tl.float32), before[p].to(tl.float32) + factor * w),)
    _store(out_ptr, offset, stride, live, after, M, VECTOR, B)


@triton.jit
def bits_kernel(
    table, block_weight, first_block, counts, weight_like, bits_like, S: tl.constexpr, COMPARE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K4: tl.constexpr, VECTOR: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The mask of each lane as S bits, lowest first. A row: lanes, stride, place, address of w, of bits, of bits to compare.

    Where COMPARE, `counts` at the weight's place grows by the number of bits that differ from those of the last address.
    """
    row, lane = _lanes(table, block_weight, first_block, ROW, B)
    live = lane < tl.load(row)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(weight_like.dtype.element_ty)), 16)
    bits_ptr = tl.load(row + 4).to(tl.pointer_type(bits_like.dtype.element_ty))
    offset, stride = _base(lane, row, S, K, K4)
    keys = _keys(_load(w_ptr, offset, stride, live, S, VECTOR, B), S, VECTOR, B)
    bits = tl.zeros((B,), dtype=tl.uint32)
    for group in tl.static_range(S // M):
        bits |= keep_bits(keys, N, group * M, M) << (group * M)
    tl.store(bits_ptr + lane, bits.to(bits_ptr.dtype.element_ty), mask=live)
    if COMPARE:
        before_ptr = tl.load(row + 5).to(tl.pointer_type(bits_like.dtype.element_ty))
        x = tl.where(live, bits ^ tl.load(before_ptr + lane, mask=live, other=0).to(tl.uint32), 0)
        tl.atomic_add(counts + tl.load(row + 2), tl.sum(count_ones(x), axis=0).to(tl.int64))


@triton.jit
def not_finite_kernel(table, block_weight, first_block, word, like, ROW: tl.constexpr, B: tl.constexpr):
    """Writes the bits of Inf to `word` if a weight is Inf or NaN. A row: weights, address. They are read in the order of memory."""
    row, place = _lanes(table, block_weight, first_block, ROW, B)
    pointer = tl.load(row + 1).to(tl.pointer_type(like.dtype.element_ty))
    key = magnitude_key(tl.load(pointer + place, mask=place < tl.load(row), other=0.0))
    if like.dtype.element_ty == tl.float32:
        infinite = 0x7F800000
    elif like.dtype.element_ty == tl.bfloat16:
        infinite = 0x7F80
    else:
        infinite = 0x7C00
    tl.atomic_max(word, 0x7F800000, mask=tl.max(key, axis=0) >= infinite)
