"""Which N of M weights are the largest, for a group in the registers of one thread: the part that all Triton kernels share.

Keys are tuples of tensors, one tensor for each weight of a group and one group in each place of the tensors.
"""

# Another language in Python's clothes: its tuples know addition, not unpacking, and it has no types.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_ones", "keep_bits", "keep_n", "magnitude_key"]


@triton.jit
def _sorted(values, M: tl.constexpr):
    """M keys in descending order: Batcher's odd-even merge sort, two instructions for each exchange.

    Only the n-th largest is looked at, so the compiler drops every exchange that does not lead there: for 16:32 it is left
    with two sorts of 16 and 32 minima and maxima.
    """
    for log_p in tl.static_range(6):
        for log_back in tl.static_range(6):
            if log_back <= log_p and 2**log_p < M:
                values = _exchange(values, 2**log_p, 2 ** (log_p - log_back), M)
    return values


@triton.jit
def _exchange(values, p: tl.constexpr, k: tl.constexpr, M: tl.constexpr):
    """One stage of the sort: compare-exchange all pairs (i, i + k) that the network has at (p, k)."""
    after = ()
    for i in tl.static_range(M):
        # i is the upper partner of i - k, the lower partner of i + k, or neither
        if i >= k and (i - k) >= k % p and ((i - k) - k % p) % (2 * k) < k and (i - k) // (2 * p) == i // (2 * p):
            after = after + (tl.minimum(values[i - k], values[i]),)
        elif i + k < M and i >= k % p and (i - k % p) % (2 * k) < k and i // (2 * p) == (i + k) // (2 * p):
            after = after + (tl.maximum(values[i], values[i + k]),)
        else:
            after = after + (values[i],)
    return after


@triton.jit
def _own_keys(keys, FIRST: tl.constexpr, M: tl.constexpr):
    """Keys FIRST .. FIRST + M. Those of 16 bits leave room for the place in the group, the earlier the larger: no two are equal then."""
    own = ()
    for m in tl.static_range(M):
        if keys[FIRST + m].dtype == tl.int16:
            own = own + (keys[FIRST + m].to(tl.int32) * M + (M - 1 - m),)
        else:
            own = own + (keys[FIRST + m],)
    return own


@triton.jit
def keep_n(keys, N: tl.constexpr, FIRST: tl.constexpr, M: tl.constexpr):
    """For keys FIRST .. FIRST + M of a lane: a tuple of M flags, True at the N largest, the earlier first among equals."""
    own = _own_keys(keys, FIRST, M)
    ranked = _sorted(own, M)
    if keys[FIRST].dtype == tl.int16 or N == M:
        keep = ()
        for m in tl.static_range(M):
            keep = keep + (own[m] >= ranked[N - 1],)
    else:
        keep = _first_of_equals(own, ranked[N - 1], N, M)
    return keep


@triton.jit
def _first_of_equals(own, threshold, N: tl.constexpr, M: tl.constexpr):
    """The flags of `keep_n` whatever keys are equal."""
    above = tl.zeros_like(threshold)
    for m in tl.static_range(M):
        above += (own[m] > threshold).to(tl.int32)
    room = N - above  # for this many of those equal to the threshold
    keep = ()
    for m in tl.static_range(M):
        equal = own[m] == threshold
        keep = keep + ((own[m] > threshold) | (equal & (room > 0)),)
        room -= equal.to(tl.int32)
    return keep


@triton.jit
def keep_bits(keys, N: tl.constexpr, FIRST: tl.constexpr, M: tl.constexpr):
    """What `keep_n` says, as one word for each group: bit m is set where key FIRST + m is kept."""
    if M < 4:
        keep = keep_n(keys, N, FIRST, M)
        bits = keep[0].to(tl.uint32)
        for m in tl.static_range(1, M):
            bits |= keep[m].to(tl.uint32) << m
    else:
        own = _own_keys(keys, FIRST, M)
        ranked = _sorted(own, M)
        if keys[FIRST].dtype == tl.int16 or N == M:
            bits = _bits_beyond(own, ranked[N - 1], False, M) ^ (0xFFFFFFFF >> (32 - M))
        else:
            bits = _first_bits_of_equals(own, ranked[N - 1], N, M)
    return bits


@triton.jit
def _bits_beyond(own, threshold, ABOVE: tl.constexpr, M: tl.constexpr):
    """Bit m is set where key m is below the threshold or, where ABOVE, above it. Cheaper than packing M flags: the sign of a difference
    of two keys is what the comparison would say, and one instruction shifts it into the word."""
    bits = tl.zeros_like(threshold).to(tl.uint32)
    for i in tl.static_range(M):
        difference = threshold - own[M - 1 - i] if ABOVE else own[M - 1 - i] - threshold
        bits = (bits << 1) | (difference.to(tl.uint32, bitcast=True) >> 31)
    return bits


@triton.jit
def _first_bits_of_equals(own, threshold, N: tl.constexpr, M: tl.constexpr):
    """The bits of `keep_bits` whatever keys are equal."""
    above = _bits_beyond(own, threshold, True, M)
    equal = (above | _bits_beyond(own, threshold, False, M)) ^ (0xFFFFFFFF >> (32 - M))
    room = N - count_ones(above)  # for this many of those equal to the threshold, and at least one
    rest = equal
    for i in tl.static_range(N):
        rest = tl.where(room > i, rest & (rest - 1), rest)  # without its lowest bit
    return above | (equal ^ rest)


@triton.jit
def count_ones(x):
    """The ones of a 32-bit word: in pairs of bits, fours, eights, then all four bytes."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def magnitude_key(x):
    """|x| as an integer that orders as the magnitude does, of as many bits as x has."""
    if x.dtype == tl.float32:
        key = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        key = x.to(tl.int16, bitcast=True) & 0x7FFF
    return key
