"""Triton kernels for an optimizer's step with the SR-STE term inside: mask, term and update of each weight in one pass over memory.

A step reads weight, gradient and the optimizer's state and writes weight and state, as an optimizer without the term does; the mask is
made from the weight while it is in registers, so the term costs no traffic. Whether the new weights are finite is seen on the way.

The numbers of a step (learning rate, momentum, ...) lie in `settings`, a row of `WIDTH` fp32 for each weight, so that weights of
several parameter groups share a launch. Where the device knows one of them only (a learning rate in a tensor, Adam's count of steps)
`settings_kernel` makes the rows; else the host does (`steps.finished`). Arithmetic is fp32 whatever the weights are, in the order of
torch's own single-tensor optimizers; the compiler may fuse a multiplication and an addition, as it does in torch's CUDA kernels.

Tables, rows and layouts are those of `triton_masks` and `triton_tiles`; the addresses of a row: weight, gradient, states.
"""

# Another language in Python's clothes: its tuples know addition, not unpacking, and it has no types.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_masks import _base, _flags, _lanes, _load, _store
from .triton_sort import magnitude_key
from .triton_tiles import _exchange_flags, _left, _program

__all__ = ["in_order_step_kernel", "settings_kernel", "step_kernel"]


# ---- what happens to one weight ----


@triton.jit
def _settings(row):
    """The numbers of a weight's step, see `steps.finished`."""
    s = ()
    for i in tl.static_range(11):
        s = s + (tl.load(row + i),)
    return s


@triton.jit
def _moved(
    w, g, m, v, keep, s,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, REFINE: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    """Weight and states after the step; `keep` says where the mask is. All fp32."""
    d = g * s[4]  # uphill under maximize
    if REFINE == "weight":
        term = w
    elif REFINE == "sign":
        term = (w > 0).to(tl.float32) - (w < 0).to(tl.float32)
    else:
        term = s[0] * d
    if not DECOUPLED:
        d = tl.where(keep, d, d + s[3] * term)
    d = tl.where(s[1] == 0, d, d + s[1] * w)  # an infinite weight is none of a decay's business that there is not
    if ADAM:
        m = m + s[5] * (d - m)
        v = s[6] * v + s[7] * d * d
        w = w * s[2] - tl.div_rn(s[8] * m, tl.div_rn(tl.sqrt_rn(v), s[9]) + s[10])
    elif MOMENTUM:
        m = s[5] * m + s[6] * d
        w = w - s[0] * (d + s[5] * m if NESTEROV else m)
    else:
        w = w - s[0] * d
    if DECOUPLED:
        w = tl.where(keep, w, w - s[3] * (s[0] * term))
    return w, m, v


@triton.jit
def _tell_if_not_finite(word, top, like):
    """`word` becomes Inf if `top`, magnitudes of new weights as integers, holds that of Inf or more."""
    if like.dtype.element_ty == tl.float32:
        infinite = 0x7F800000
    elif like.dtype.element_ty == tl.bfloat16:
        infinite = 0x7F80
    else:
        infinite = 0x7C00
    tl.atomic_max(word, 0x7F800000, mask=tl.max(top) >= infinite)


# ---- all weights ----


@triton.jit
def step_kernel(
    table, block_weight, first_block, settings, scale, found_inf, word, like,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, REFINE: tl.constexpr, DECOUPLED: tl.constexpr,
    SCALED: tl.constexpr, SKIPS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, K4: tl.constexpr, VECTOR: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A step of many weights. SCALED: gradients are `scale` times too large, and are left without it, as torch does. SKIPS: nothing
    happens where `found_inf` is not 0."""
    row, lane = _lanes(table, block_weight, first_block, ROW, B)
    lanes = tl.load(row)
    if SKIPS:
        lanes = tl.where(tl.load(found_inf) == 0, lanes, 0)
    live = lane < lanes
    s = _settings(settings + tl.load(row + 2) * 11)
    offset, stride = _base(lane, row, M, K, K4)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(like.dtype.element_ty)), 16)
    g_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(like.dtype.element_ty)), 16)
    w = _load(w_ptr, offset, stride, live, M, VECTOR, B)
    g = _load(g_ptr, offset, stride, live, M, VECTOR, B)
    m = w
    v = w
    if MOMENTUM or ADAM:
        m_ptr = tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(like.dtype.element_ty)), 16)
        m = _load(m_ptr, offset, stride, live, M, VECTOR, B)
    if ADAM:
        v_ptr = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(like.dtype.element_ty)), 16)
        v = _load(v_ptr, offset, stride, live, M, VECTOR, B)
    keep = _flags(w, N, M, VECTOR, B)
    alive = live[:, None] if VECTOR else live
    top = tl.zeros((B, 4), tl.int32) if VECTOR else tl.zeros((B,), tl.int32)
    g_after = ()
    w_after = ()
    m_after = ()
    v_after = ()
    for p in tl.static_range(M // 4 if VECTOR else M):
        grad = g[p].to(tl.float32)
        if SCALED:
            grad = tl.div_rn(grad, tl.load(scale))
        new = _moved(
            w[p].to(tl.float32), grad, m[p].to(tl.float32), v[p].to(tl.float32), keep[p], s, ADAM, MOMENTUM, NESTEROV, REFINE, DECOUPLED
        )
        top = tl.maximum(top, tl.where(alive, magnitude_key(new[0].to(like.dtype.element_ty)), 0))
        g_after = g_after + (grad,)
        w_after = w_after + (new[0],)
        m_after = m_after + (new[1],)
        v_after = v_after + (new[2],)
    _store(w_ptr, offset, stride, live, w_after, M, VECTOR, B)
    if SCALED:
        _store(g_ptr, offset, stride, live, g_after, M, VECTOR, B)
    if MOMENTUM or ADAM:
        _store(m_ptr, offset, stride, live, m_after, M, VECTOR, B)
    if ADAM:
        _store(v_ptr, offset, stride, live, v_after, M, VECTOR, B)
    _tell_if_not_finite(word, top, like)


@triton.jit
def in_order_step_kernel(
    table, block_weight, first_block, settings, scale, found_inf, word, like,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, REFINE: tl.constexpr, DECOUPLED: tl.constexpr,
    SCALED: tl.constexpr, SKIPS: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """What `step_kernel` does, for strided groups, by exchange: see `triton_tiles`."""
    row, program = _program(table, block_weight, first_block, ROW)
    s = _settings(settings + tl.load(row + 2) * 11)
    w_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(like.dtype.element_ty)), 16)
    g_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(like.dtype.element_ty)), 16)
    m_ptr = tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(like.dtype.element_ty)), 16) if MOMENTUM or ADAM else w_ptr
    v_ptr = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(like.dtype.element_ty)), 16) if ADAM else w_ptr
    BLOCK: tl.constexpr = M * K * (1 if M * K % 8 == 0 else 2 if M * K % 4 == 0 else 4 if M * K % 2 == 0 else 8)
    SIZE: tl.constexpr = B // BLOCK * BLOCK
    place = tl.arange(0, B)
    at = tl.multiple_of(program * (L * SIZE), 8)
    end = tl.load(row).to(tl.int32) * M
    if SKIPS:
        end = tl.where(tl.load(found_inf) == 0, end, 0)
    top = tl.zeros((B,), tl.int32)
    for _ in range(L):
        live = place < _left(at, end, SIZE)
        w = tl.load(w_ptr + at + place, mask=live, other=0.0)
        grad = tl.load(g_ptr + at + place, mask=live, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + at + place, mask=live, other=0.0).to(tl.float32) if MOMENTUM or ADAM else grad
        v = tl.load(v_ptr + at + place, mask=live, other=0.0).to(tl.float32) if ADAM else grad
        keep = _exchange_flags(w, N, M, K, B)
        if SCALED:
            grad = tl.div_rn(grad, tl.load(scale))
            tl.store(g_ptr + at + place, grad.to(like.dtype.element_ty), mask=live)
        new = _moved(w.to(tl.float32), grad, m, v, keep, s, ADAM, MOMENTUM, NESTEROV, REFINE, DECOUPLED)
        stored = new[0].to(like.dtype.element_ty)
        tl.store(w_ptr + at + place, stored, mask=live)
        if MOMENTUM or ADAM:
            tl.store(m_ptr + at + place, new[1].to(like.dtype.element_ty), mask=live)
        if ADAM:
            tl.store(v_ptr + at + place, new[2].to(like.dtype.element_ty), mask=live)
        top = tl.maximum(top, tl.where(live, magnitude_key(stored), 0))
        at += SIZE
    _tell_if_not_finite(word, top, like)


# ---- the numbers of the step ----


@triton.jit
def settings_kernel(
    numbers, addresses, settings, found_inf, count, ADAM: tl.constexpr, SKIPS: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Rows of `settings` from rows of `numbers`, fp64, both as in `steps`; and counts Adam's steps.

    `addresses` has two for each weight: of its learning rate and of its count of steps, 0 where `numbers` has them.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    row = numbers + i * 9
    out = settings + i * WIDTH
    lr_at = tl.load(addresses + 2 * i, mask=live, other=0)
    lr = tl.load(row, mask=live, other=0.0)
    lr = tl.where(lr_at == 0, lr, tl.load(lr_at.to(tl.pointer_type(tl.float32)), mask=live & (lr_at != 0), other=0.0).to(tl.float64))
    for c in tl.static_range(3, 7):  # decay, sign, and two of the rule's own
        if c != 5 or not ADAM:
            tl.store(out + c, tl.load(row + c, mask=live, other=0.0).to(tl.float32), mask=live)
    tl.store(out, lr.to(tl.float32), mask=live)
    tl.store(out + 1, tl.load(row + 1, mask=live, other=0.0).to(tl.float32), mask=live)
    tl.store(out + 2, (1.0 - lr * tl.load(row + 2, mask=live, other=0.0)).to(tl.float32), mask=live)
    if ADAM:
        step_at = tl.load(addresses + 2 * i + 1, mask=live, other=0)
        step_ptr = step_at.to(tl.pointer_type(tl.float32))
        before = tl.load(step_ptr, mask=live & (step_at != 0), other=0.0)
        counted = before + 1.0
        tl.store(step_ptr, tl.where(tl.load(found_inf) == 0, counted, before) if SKIPS else counted, mask=live & (step_at != 0))
        step = tl.where(step_at == 0, tl.load(row + 8, mask=live, other=1.0), counted.to(tl.float64))
        beta1 = tl.load(row + 5, mask=live, other=0.0)
        beta2 = tl.load(row + 6, mask=live, other=0.0)
        tl.store(out + 5, (1.0 - beta1).to(tl.float32), mask=live)
        tl.store(out + 7, (1.0 - beta2).to(tl.float32), mask=live)
        tl.store(out + 8, (lr / (1.0 - _power(beta1, step))).to(tl.float32), mask=live)
        tl.store(out + 9, tl.sqrt(1.0 - _power(beta2, step)).to(tl.float32), mask=live)
        tl.store(out + 10, tl.load(row + 7, mask=live, other=0.0).to(tl.float32), mask=live)


@triton.jit
def _power(base, exponent):
    """`base` to a whole number, by squaring."""
    left = exponent.to(tl.int32)
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(24):  # fp32 counts no further
        result = tl.where(left % 2 == 1, result * base, result)
        base = base * base
        left = left // 2
    return result
