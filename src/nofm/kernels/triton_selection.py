"""Triton kernels that find the k largest magnitudes of many tensors at once without sorting them: radix selection.

A magnitude is 31 bits (fp32 without the sign), looked at as digits of 8, 8, 8 and 7 bits, most significant first. Pass p counts how often
each value of digit p occurs among the keys that can still be the k-th largest, those that begin with the digits chosen so far; the digit in
which the k-th largest lies is chosen from these counts. After four passes the k-th largest key is known (`threshold`), and how many of the
keys that are equal to it are wanted (`room`). All larger ones are kept, and the first `room` of the equal ones, by index.

What keeps launches few: every program of a pass chooses the last pass's digit for itself, from 256 counts, so that no kernel does only
that; and one launch serves all tensors (`segments`), a row of `table` for each. What keeps ties exact: the programs of a segment work on
consecutive stretches, `ties_kernel` counts the equal keys of each, and the program that writes adds up the counts of those before it. It is
in the graph always and does nothing unless some of the equal keys are wanted and others are not, which fp32 weights hardly ever have.

Digits have no more than 8 bits because `tl.histogram` may cost time in proportion to the bins: a warp looks at its 32 values by ballots,
and every thread counts the bins that are its own. In the third and fourth pass few keys are left, and these are counted one by one.

A row: addresses of scores, of the mask `among` and of the result, size, blocks of a program, first program, count.
Room in `work`, of 32-bit integers, for each segment: counts of four digits, four times (digits chosen, room), equal keys of each program.
"""

# Another language in Python's clothes: it has no types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_sort import magnitude_key

__all__ = ["BINS", "COLUMNS", "MOST_PROGRAMS", "PASSES", "WORK", "digit_kernel", "kept_kernel", "ties_kernel"]

PASSES = 4
BINS = 256
COLUMNS = 7
MOST_PROGRAMS = 1024  # of a segment
WORK = PASSES * BINS + 2 * PASSES + MOST_PROGRAMS

_BINS = tl.constexpr(BINS)
_COLUMNS = tl.constexpr(COLUMNS)
_MOST_PROGRAMS = tl.constexpr(MOST_PROGRAMS)
_WORK = tl.constexpr(WORK)
_CHOSEN = tl.constexpr(PASSES * BINS)  # where in a segment's room the choices begin
_TIES = tl.constexpr(PASSES * BINS + 2 * PASSES)
_FEW = tl.constexpr(64)  # keys of a block that are cheaper counted one by one


@triton.jit
def _digit_chosen(counts, begin, room, BITS: tl.constexpr):
    """The next digit of the `room`-th largest of the keys that begin with `begin`, from the counts of these digits.

    Returns the digits chosen so far, how many of the keys that begin with them are wanted, and how many there are.

    Where there are fewer keys than `room`, -1, which no key begins with and all are above; so it stays for all later digits. Where `room`
    is 0 or less, all ones, which no key is above.
    """
    digits = tl.arange(0, _BINS)
    found = tl.load(counts + digits)
    not_smaller = tl.sum(found, axis=0) - tl.cumsum(found, axis=0) + found
    digit = tl.max(tl.where(not_smaller >= room, digits, -1), axis=0)
    larger = tl.sum(tl.where(digits > digit, found, 0), axis=0)
    alike = tl.sum(tl.where(digits == digit, found, 0), axis=0)
    return tl.where(digit < 0, -1, (begin << BITS) | digit), room - larger, alike


@triton.jit
def _stretch(table, program_segment, work):
    """This program's segment, as its row, its number and its room, and which of the segment's stretches of so many blocks it works on."""
    segment = tl.load(program_segment + tl.program_id(0))
    row = table + segment * _COLUMNS
    number = tl.program_id(0) - tl.load(row + 5).to(tl.int32)
    return row, segment, work + segment * _WORK, number, tl.load(row + 4).to(tl.int32)


@triton.jit
def _size(row, WIDE: tl.constexpr):
    """How many weights the segment has. WIDE: a multiple of 16, as all addresses are, so that several are read at once."""
    size = tl.load(row + 3).to(tl.int32)
    return tl.multiple_of(size, 16) if WIDE else size


@triton.jit
def _keys(row, place, AMONG: tl.constexpr, WIDE: tl.constexpr):
    """The keys at these places, and which of them may be chosen."""
    scores = tl.load(row).to(tl.pointer_type(tl.float32))
    if WIDE:
        scores = tl.multiple_of(scores, 16)
    there = place < _size(row, WIDE)
    key = magnitude_key(tl.load(scores + place, mask=there, other=0.0))
    if AMONG:
        among = tl.load(row + 1).to(tl.pointer_type(tl.int8))
        if WIDE:
            among = tl.multiple_of(among, 16)
        there = there & (tl.load(among + place, mask=there, other=0) != 0)
    return key, there


@triton.jit
def digit_kernel(
    table, program_segment, work, counts,
    PASS: tl.constexpr, DEVICE_COUNTS: tl.constexpr, AMONG: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Choose digit PASS - 1, and count the values of digit PASS among the keys that begin with what is chosen."""
    row, segment, work, number, blocks = _stretch(table, program_segment, work)
    begin, room = 0, 0
    if PASS == 1:
        room = (tl.load(counts + segment) if DEVICE_COUNTS else tl.load(row + 6)).to(tl.int32)
    elif PASS > 1:
        begin, room = tl.load(work + _CHOSEN + 2 * PASS - 2), tl.load(work + _CHOSEN + 2 * PASS - 1)
    if PASS > 0:
        begin, room, _alike = _digit_chosen(work + (PASS - 1) * _BINS, begin, room, 8)
        if number == 0:  # for the next pass; all programs have found the same
            tl.store(work + _CHOSEN + 2 * PASS, begin)
            tl.store(work + _CHOSEN + 2 * PASS + 1, room)
    into = work + PASS * _BINS
    found = tl.zeros((_BINS,), dtype=tl.int32)
    for block in range(blocks):
        key, alike = _keys(row, (number * blocks + block) * B + tl.arange(0, B), AMONG, WIDE)
        if PASS > 0:
            alike = alike & (key >> (31 - 8 * PASS) == begin)
        digit = (key >> (23 - 8 * PASS)) & 0xFF if PASS < 3 else key & 0x7F
        if PASS < 2:
            found += tl.histogram(digit, _BINS, mask=alike)
        else:
            left = tl.sum(alike.to(tl.int32), axis=0)
            if left > _FEW:
                found += tl.histogram(digit, _BINS, mask=alike)
            elif left > 0:
                tl.atomic_add(into + digit, 1, mask=alike, sem="relaxed")
    tl.atomic_add(into + tl.arange(0, _BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _threshold(work):
    """The last choice: the threshold, how many of the keys that are equal to it are wanted, and how many there are."""
    return _digit_chosen(work + 3 * _BINS, tl.load(work + _CHOSEN + 6), tl.load(work + _CHOSEN + 7), 7)


@triton.jit
def ties_kernel(table, program_segment, work, AMONG: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    """Count the keys of each stretch that are equal to the threshold, where some of them are wanted and others are not."""
    row, _segment, work, number, blocks = _stretch(table, program_segment, work)
    threshold, room, alike = _threshold(work)
    if (room > 0) & (room < alike):
        equal = tl.zeros((B,), dtype=tl.int32)
        for block in range(blocks):
            key, there = _keys(row, (number * blocks + block) * B + tl.arange(0, B), AMONG, WIDE)
            equal += (there & (key == threshold)).to(tl.int32)
        tl.store(work + _TIES + number, tl.sum(equal, axis=0))


@triton.jit
def kept_kernel(table, program_segment, work, AMONG: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    """Write the masks."""
    row, _segment, work, number, blocks = _stretch(table, program_segment, work)
    threshold, room, alike = _threshold(work)
    tied = (room > 0) & (room < alike)
    before = 0  # equal keys of lower index, where it matters
    if tied:
        others = tl.arange(0, _MOST_PROGRAMS)
        before += tl.sum(tl.load(work + _TIES + others, mask=others < number, other=0), axis=0)
    out = tl.load(row + 2).to(tl.pointer_type(tl.int8))
    if WIDE:
        out = tl.multiple_of(out, 16)
    size = _size(row, WIDE)
    for block in range(blocks):
        place = (number * blocks + block) * B + tl.arange(0, B)
        key, there = _keys(row, place, AMONG, WIDE)
        equal = there & (key == threshold)
        wanted = equal & (room > 0)
        if tied:
            wanted = equal & (before + tl.cumsum(equal.to(tl.int32), axis=0) <= room)
            before += tl.sum(equal.to(tl.int32), axis=0)
        tl.store(out + place, ((there & (key > threshold)) | wanted).to(tl.int8), mask=place < size)
