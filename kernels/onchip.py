"""The whole iteration of small matrices (r <= 64) in one launch: X is read twice and written once.

A program takes a matrix: one pass over X for R = X X^T, all steps on 64 x 64 fp32 tiles that never leave the chip, and
one pass for QX, written over X. It is the Gram iteration without restarts, which fp32 squares do not need: the error is
that of rounding X. A 16-bit X only; imported only where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_lw.kernels.grouped import (
    COLUMNS,
    FIELDS,
    FIRST_TILE,
    LEFT,
    LEFT_STRIDE,
    OUT,
    ROWS,
    _dot,
    _float,
    _matrix,
    _sigma,
    _stride,
)
from fused_lw.kernels.rounding import cast


@triton.jit
def _columns(X, tiles, r, s, stride, k, R: tl.constexpr, BLOCK_S: tl.constexpr, TMA: tl.constexpr):
    """Columns k to k + BLOCK_S of one matrix, zeros outside."""
    if TMA:
        x = tiles.load([0, k])
    else:
        rows = tl.arange(0, R)
        columns = tl.arange(0, BLOCK_S)
        # Loads take in the padding of a row to stay 16 bytes wide; its contents are dropped.
        mask = (rows < r)[:, None] & (columns < stride - k)[None, :]
        x = tl.load(tl.multiple_of(X + k, 16) + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        x = tl.where((columns < s - k)[None, :], x, 0.0)
    return x


@triton.jit
def _product(A, B):
    """A B of fp32 tiles on fp16 tensor cores: both are split in two fp16 parts, and the smallest product is left out.

    That keeps 21 bits. tl.dot's own splitting ("tf32x3") compiles to an empty kernel for sm_100 on Triton 3.7.1.
    """
    a = A.to(tl.float16)
    b = B.to(tl.float16)
    a_rest = (A - a.to(tl.float32)).to(tl.float16)
    b_rest = (B - b.to(tl.float32)).to(tl.float16)
    return tl.dot(a, b, tl.dot(a, b_rest, tl.dot(a_rest, b)))


@triton.jit(do_not_specialize=["steps", "matrices"])
def onchip_kernel(
    table,  # [problems + 1, FIELDS] int64; a problem's tiles are its matrices
    schedule,  # [steps, 3] int64, bits of fp32
    steps,
    matrices,
    q_scale,  # power of two that keeps Q, up to the product of all a, in fp16's range
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Orthogonalize every problem's matrices; the output may be the input."""
    row = table
    m = tl.arange(0, R)
    identity = tl.where(m[:, None] == m[None, :], 1.0, 0.0)
    for t in range(tl.program_id(0), matrices, tl.num_programs(0)):
        while tl.load(row + FIELDS + FIRST_TILE) <= t:
            row += FIELDS
        r = tl.load(row + ROWS).to(tl.int32)
        s = tl.load(row + COLUMNS).to(tl.int32)
        stride = _stride(row + LEFT_STRIDE, IN)
        b = t - tl.load(row + FIRST_TILE)
        X = _matrix(row + LEFT, IN, b * r * stride)
        if TMA:
            tiles = tl.make_tensor_descriptor(X, [r, s], [stride, 1], [R, BLOCK_S])
        else:
            tiles = None
        sigma = _sigma(row, b)

        square = tl.zeros((R, R), dtype=tl.float32)
        for k in range(0, s, BLOCK_S):
            x = _columns(X, tiles, r, s, stride, k, R, BLOCK_S, TMA)
            square = _dot(x, x.T, square, "ieee", INTERPRET)
        square *= sigma * sigma

        Q = q_scale * identity
        for n in range(steps):
            W = _float(schedule + 3 * n + 2) * _product(square, square)
            W += _float(schedule + 3 * n + 1) * square + _float(schedule + 3 * n) * identity
            Q = _product(Q, W)
            square = _product(_product(square, W), W)
            # What rounding makes asymmetric would grow.
            square = 0.5 * (square + square.T)

        high = cast(Q, IN, INTERPRET)
        # The rest of Q in a second product: one rounding of Q would be the largest error of all.
        low = cast(Q - high.to(tl.float32), IN, INTERPRET)
        for k in range(0, s, BLOCK_S):
            x = _columns(X, tiles, r, s, stride, k, R, BLOCK_S, TMA)
            y = tl.zeros((R, BLOCK_S), dtype=tl.float32)
            y = _dot(high, x, y, "ieee", INTERPRET)
            y = _dot(low, x, y, "ieee", INTERPRET)
            columns = tl.arange(0, BLOCK_S)
            mask = (m < r)[:, None] & (columns < stride - k)[None, :]
            y = cast(y * (sigma / q_scale), OUT_DTYPE, INTERPRET)
            out = _matrix(row + OUT, OUT_DTYPE, b * r * stride + k)
            tl.store(out + m[:, None] * stride + columns[None, :], y, mask=mask)
