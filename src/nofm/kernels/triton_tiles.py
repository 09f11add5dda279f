"""Groups that lie strided in memory (NCHW convolutions), by programs that read and write memory in order.

Walking strided groups weight by weight (`triton_masks`) is right but slow: with 9 kernel positions a warp's loads and its 2-byte
stores come in runs of 9. Here a program reads a stretch of whole blocks in order, as wide as the machine can, and so it writes. (A
block is M * K consecutive weights: K groups that interleave.) In between, the weights of a group must come together in one
thread. Two ways:

    exchange   A stretch is B weights. Every thread picks the weights of its groups out of it (`tl.gather`, through shared memory),
               finds which are kept, and hands the answer back as a word of M bits for each group, in the same manner.
    blocks     Each thread gets whole blocks: a stretch is B rows of S weights, a matrix that Triton turns through shared memory. All
               indices are known when it is compiled, but S weights must fit in a thread's registers.

Both end with flags for tensors in memory order. Tables and rows are those of `triton_masks`. Weights must begin on 16 bytes and
their number must divide by 8.
"""

# Another language in Python's clothes: its tuples know addition, not unpacking, and it has no types.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_sort import keep_bits, keep_n, magnitude_key

__all__ = ["in_order_masked_kernel", "in_order_refine_kernel", "one_in_order_masked_kernel"]


@triton.jit
def _exchange_flags(w_T, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    """Which of T weights are kept. Those after the last whole block get some answer."""
    G: tl.constexpr = T // M
    group = tl.arange(0, G)
    place_GM = ((group // K) * (M * K) + group % K)[:, None] + (tl.arange(0, M) * K)[None, :]
    key_T = tl.gather(magnitude_key(w_T), tl.reshape(tl.minimum(place_GM, T - 1), (T,)), 0)
    bits = keep_bits(_columns(tl.reshape(key_T, (G, M)), G, M), N, 0, M)
    place = tl.arange(0, T)
    home = tl.minimum((place // (M * K)) * K + place % K, G - 1)
    bit = tl.full((T,), 1, tl.uint32) << ((place // K) % M).to(tl.uint32)
    return (tl.gather(bits, home, 0) & bit) != 0


@triton.jit
def _mask_blocks(parts, FLAGS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
    """Rows of S weights, whole blocks, in parts: the same masked or, where FLAGS, as ones and zeros. Masked while a thread has the
    whole row, so that the stretch need not be held twice."""
    columns = ()
    for p in tl.static_range(len(parts)):
        columns = columns + _columns(parts[p], B, parts[p].shape[1])
    by_group = ()
    for g in tl.static_range(S // M):
        keys = ()
        for m in tl.static_range(M):
            keys = keys + (magnitude_key(columns[(g // K) * M * K + m * K + g % K]),)
        by_group = by_group + keep_n(keys, N, 0, M)
    masked = ()
    for s in tl.static_range(S):
        keep = by_group[(s // (M * K)) * M * K + (s % K) * M + (s // K) % M]
        if FLAGS:
            masked = masked + (keep,)
        else:
            masked = masked + (tl.where(keep, columns[s], 0.0),)
    return masked


@triton.jit
def _columns(x_BW, B: tl.constexpr, W: tl.constexpr):
    """The W columns of a tile, in order."""
    if W == 1:
        columns = (tl.reshape(x_BW, (B,)),)
    else:
        even, odd = tl.split(tl.reshape(x_BW, (B, W // 2, 2)))
        evens = _columns(even, B, W // 2)
        odds = _columns(odd, B, W // 2)
        columns = ()
        for i in tl.static_range(W // 2):
            columns = columns + (evens[i], odds[i])
    return columns


@triton.jit
def _joined(columns, FIRST: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """A tile of W columns: FIRST, FIRST + STEP, and so on."""
    if W == 1:
        tile = tl.reshape(columns[FIRST], (B, 1))
    else:
        even = _joined(columns, FIRST, 2 * STEP, B, W // 2)
        odd = _joined(columns, FIRST + STEP, 2 * STEP, B, W // 2)
        tile = tl.reshape(tl.join(even, odd), (B, W))
    return tile


# ---- the kernels ----


@triton.jit
def _write_masked(
    w_ptr, out_ptr, program, end, FLAGS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    if S == 0:
        _exchange_masked(w_ptr, out_ptr, program, end, FLAGS, N, M, K, B, L)
    else:
        _blocks_masked(w_ptr, out_ptr, program, end, FLAGS, N, M, K, S, B)


@triton.jit
def _exchange_masked(
    w_ptr, out_ptr, program, end, FLAGS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, T: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """L stretches a program: what depends on places only is worked out once, and the next stretch is under way while one is masked."""
    BLOCK: tl.constexpr = M * K * (1 if M * K % 8 == 0 else 2 if M * K % 4 == 0 else 4 if M * K % 2 == 0 else 8)
    SIZE: tl.constexpr = T // BLOCK * BLOCK  # `ways.whole_blocks`, written out: the compiler takes kernels along, not functions
    place = tl.arange(0, T)
    at = tl.multiple_of(program * (L * SIZE), 8)
    w = tl.load(w_ptr + at + place, mask=place < _left(at, end, SIZE), other=0.0)
    for stretch in range(L):
        coming = w
        if L > 1:
            left = _left(at + SIZE, end if stretch + 1 < L else at, SIZE)
            coming = tl.load(w_ptr + at + SIZE + place, mask=place < left, other=0.0)
        flags = _exchange_flags(w, N, M, K, T)
        masked = flags if FLAGS else tl.where(flags, w, 0.0)
        tl.store(out_ptr + at + place, masked.to(out_ptr.dtype.element_ty), mask=place < _left(at, end, SIZE))
        w = coming
        at += SIZE


@triton.jit
def _left(at, end, SIZE: tl.constexpr):
    """How many of a stretch's weights there are."""
    return tl.multiple_of(tl.minimum(end - at, SIZE), 8)


@triton.jit
def _blocks_masked(
    w_ptr, out_ptr, program, end, FLAGS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """B rows of S weights in parts whose widths are powers of two, widest first."""
    row = (program * (B * S) + tl.arange(0, B) * S)[:, None]
    parts = ()
    for b in tl.static_range(8):
        if S & (128 >> b):
            places = row + _start(S, 128 >> b) + tl.arange(0, 128 >> b)[None, :]
            parts = parts + (tl.load(w_ptr + places, mask=row < end, other=0.0),)
    masked = _mask_blocks(parts, FLAGS, N, M, K, S, B)
    for b in tl.static_range(8):
        if S & (128 >> b):
            places = row + _start(S, 128 >> b) + tl.arange(0, 128 >> b)[None, :]
            tile = _joined(masked, _start(S, 128 >> b), 1, B, 128 >> b)
            tl.store(out_ptr + places, tile.to(out_ptr.dtype.element_ty), mask=row < end)


@triton.constexpr_function
def _start(size, width):
    """Where in a row of `size` weights the part of `width` begins: after the wider ones."""
    return size // (2 * width) * (2 * width)


@triton.jit
def _program(table, block_weight, first_block, ROW: tl.constexpr):
    """This program's weight, as the address of its row in the table, and which of the weight's programs it is."""
    weight = tl.load(block_weight + tl.program_id(0))
    return table + weight * ROW, tl.program_id(0) - tl.load(first_block + weight)


@triton.jit
def in_order_masked_kernel(
    table, block_weight, first_block, in_like, out_like, FLAGS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """What `masked_kernel` does."""
    row, program = _program(table, block_weight, first_block, ROW)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(in_like.dtype.element_ty)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(out_like.dtype.element_ty)), 16)
    _write_masked(w_ptr, out_ptr, program, tl.load(row).to(tl.int32) * M, FLAGS, N, M, K, S, B, L)


@triton.jit
def one_in_order_masked_kernel(
    w_ptr, out_ptr, lanes,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """What `one_masked_kernel` does."""
    _write_masked(w_ptr, out_ptr, tl.program_id(0), lanes * M, False, N, M, K, S, B, L)


@triton.jit
def in_order_refine_kernel(
    table, block_weight, first_block, factors, scale, weight_like, out_like, SIGN: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """What `refine_kernel` does, always by exchange: two tensors of whole blocks do not fit in registers."""
    row, program = _program(table, block_weight, first_block, ROW)
    factor = tl.load(factors + tl.load(row + 2)) * tl.load(scale)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(weight_like.dtype.element_ty)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(out_like.dtype.element_ty)), 16)
    BLOCK: tl.constexpr = M * K * (1 if M * K % 8 == 0 else 2 if M * K % 4 == 0 else 4 if M * K % 2 == 0 else 8)
    SIZE: tl.constexpr = B // BLOCK * BLOCK
    place = tl.arange(0, B)
    at = tl.multiple_of(program * (L * SIZE), 8)
    end = tl.load(row).to(tl.int32) * M
    for _ in range(L):
        live = place < _left(at, end, SIZE)
        w = tl.load(w_ptr + at + place, mask=live, other=0.0)
        before = tl.load(out_ptr + at + place, mask=live, other=0.0).to(tl.float32)
        flags = _exchange_flags(w, N, M, K, B)
        w = w.to(tl.float32)
        if SIGN:
            w = (w > 0).to(tl.float32) - (w < 0).to(tl.float32)
        after = tl.where(flags, before, before + factor * w)
        tl.store(out_ptr + at + place, after.to(out_ptr.dtype.element_ty), mask=live)
        at += SIZE
