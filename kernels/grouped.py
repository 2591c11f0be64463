"""The product kernels: one launch computes the products of many batches of unlike shapes.

Persistent programs walk the tiles of all problems of a table (`table.py`). A tile's sum always runs over its whole
depth in the same steps, so a matrix gets the same bits whatever else is in the launch.

Letters: r rows, s columns; a tile is (i, j) in units of tiles. Imported only where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_lw.kernels import table as _table
from fused_lw.kernels.pack_kernels import COLS as PARAM_COLS
from fused_lw.kernels.pack_kernels import FIELDS as PACK_FIELDS
from fused_lw.kernels.pack_kernels import ROWS as PARAM_ROWS
from fused_lw.kernels.pack_kernels import apply_update
from fused_lw.kernels.rounding import cast

FIRST_TILE = tl.constexpr(_table.FIRST_TILE)
MATRIX_TILES = tl.constexpr(_table.MATRIX_TILES)
LEFT = tl.constexpr(_table.LEFT)
RIGHT = tl.constexpr(_table.RIGHT)
OUT = tl.constexpr(_table.OUT)
ROWS = tl.constexpr(_table.ROWS)
COLUMNS = tl.constexpr(_table.COLUMNS)
DEPTH = tl.constexpr(_table.DEPTH)
LEFT_STRIDE = tl.constexpr(_table.LEFT_STRIDE)
RIGHT_STRIDE = tl.constexpr(_table.RIGHT_STRIDE)
OUT_STRIDE = tl.constexpr(_table.OUT_STRIDE)
ALPHA = tl.constexpr(_table.ALPHA)
BETA = tl.constexpr(_table.BETA)
DELTA = tl.constexpr(_table.DELTA)
GAMMA = tl.constexpr(_table.GAMMA)
SQ_NORM = tl.constexpr(_table.SQ_NORM)
SCALE = tl.constexpr(_table.SCALE)
EPS = tl.constexpr(_table.EPS)
EPS_IS_ADDED = tl.constexpr(_table.EPS_IS_ADDED)
NORM_FACTOR = tl.constexpr(_table.NORM_FACTOR)
UPDATE_ROWS = tl.constexpr(_table.UPDATE_ROWS)
UPDATE_RULES = tl.constexpr(_table.UPDATE_RULES)
UPDATE_HYPER = tl.constexpr(_table.UPDATE_HYPER)
FIELDS = tl.constexpr(_table.FIELDS)


@triton.jit
def _float(field):
    """A table entry that holds a float32's bits."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _stride(field, DTYPE: tl.constexpr):
    """A row stride in elements. Tables hold it in units of 16 bytes, so that the compiler sees what divides it."""
    return tl.load(field).to(tl.int32) * (128 // DTYPE.primitive_bitwidth)


@triton.jit
def _matrix(field, DTYPE: tl.constexpr, offset):
    """The matrix `offset` elements into a batch, aligned to 16 bytes as all are."""
    # The hint has to follow the last addition: of an integer that becomes a pointer the compiler believes nothing.
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(DTYPE)) + offset, 16)


@triton.jit
def _tile_of(rows, columns, stride, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Offsets and mask of a tile with `rows` x `columns` elements left from its corner on.

    Offsets are 32-bit: a tile spans few rows, and the pointer to its corner is 64-bit.
    """
    m = tl.arange(0, TILE_M)
    n = tl.arange(0, TILE_N)
    offsets = m[:, None] * stride + n[None, :]
    return offsets, (m < rows)[:, None] & (n < columns)[None, :]


@triton.jit
def _sigma(row, b):
    """1/‖X_b‖ of an input stored unnormalized, or 1. See `products.InputNorm.sigma`."""
    sigma = tl.full((), 1.0, tl.float32)
    sq_norm = tl.load(row + SQ_NORM)
    if sq_norm != 0:
        norm = tl.sqrt_rn(tl.load(sq_norm.to(tl.pointer_type(tl.float32)) + b)) * _float(row + NORM_FACTOR)
        eps = _float(row + EPS)
        if tl.load(row + EPS_IS_ADDED) != 0:
            norm += eps
        else:
            # NaN has to stay: a clamp that drops it would hide that the matrix is broken.
            norm = tl.where(norm < eps, eps, norm)
        sigma = tl.where(norm == 0.0, 0.0, tl.div_rn(1.0, norm))
        scale = tl.load(row + SCALE)
        if scale != 0:
            sigma = tl.div_rn(sigma, tl.load(scale.to(tl.pointer_type(tl.float32)) + b))
    return sigma


@triton.jit
def _triangle(t):
    """(row, column) of entry t of a lower triangle numbered row by row."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # fp32 sqrt may be off by one row in either direction.
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def _lower_tile(t, n, GROUP: tl.constexpr):
    """Tile t of the lower triangle of n x n tiles, in bands of GROUP rows.

    A band is a rectangle left of the diagonal, walked column by column, and a small triangle.
    """
    # Numbered row by row or band by band, the same tiles lie above the top of a band.
    row, _ = _triangle(t)
    top = row // GROUP * GROUP
    t -= top * (top + 1) // 2
    rows = tl.minimum(GROUP, n - top)
    i = top + t % rows
    j = t // rows
    if j >= top:
        di, dj = _triangle(t - top * rows)
        i = top + di
        j = top + dj
    return i, j


@triton.jit
def _grouped_tile(t, rows, columns, GROUP: tl.constexpr):
    """Tile t of rows x columns tiles, in bands of GROUP rows walked column by column."""
    top = t // (GROUP * columns) * GROUP
    height = tl.minimum(GROUP, rows - top)
    t -= top * columns
    return top + t % height, t // height


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET and a.dtype == tl.bfloat16:
        # The interpreter multiplies the raw bits of bf16 operands.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _rows_by_rows(
    P,  # [r, depth] one matrix
    Q,  # [r, depth]
    r,
    depth,
    stride,
    i,
    j,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Tile (i, j) of P Q^T, fp32."""
    acc = tl.zeros((TILE, TILE), dtype=tl.float32)
    if TMA:
        p_tiles = tl.make_tensor_descriptor(P, [r, depth], [stride, 1], [TILE, BLOCK_K])
        q_tiles = tl.make_tensor_descriptor(Q, [r, depth], [stride, 1], [TILE, BLOCK_K])
        for k in range(0, depth, BLOCK_K):
            acc = _dot(p_tiles.load([i * TILE, k]), q_tiles.load([j * TILE, k]).T, acc, PRECISION, INTERPRET)
    else:
        # Rows past the end repeat the tile's first: their products are never stored, and no load needs a mask.
        m = tl.arange(0, TILE)
        ks = tl.arange(0, BLOCK_K)
        p_rows = tl.where(i * TILE + m < r, m, 0)
        q_rows = tl.where(j * TILE + m < r, m, 0)
        p = tl.multiple_of(P + (i * TILE).to(tl.int64) * stride, 16)
        q = tl.multiple_of(Q + (j * TILE).to(tl.int64) * stride, 16)
        p_offsets = p_rows[:, None] * stride + ks[None, :]
        q_offsets = q_rows[:, None] * stride + ks[None, :]
        whole = depth // BLOCK_K * BLOCK_K
        for _ in range(0, whole, BLOCK_K):
            acc = _dot(tl.load(p + p_offsets), tl.load(q + q_offsets).T, acc, PRECISION, INTERPRET)
            p += BLOCK_K
            q += BLOCK_K
        if whole < depth:
            # Loads stay 16 bytes wide by taking in a row's padding, whose contents are then dropped.
            WIDE: tl.constexpr = 128 // P.dtype.element_ty.primitive_bitwidth
            stored = (ks < tl.cdiv(depth, WIDE) * WIDE - whole)[None, :]
            wanted = (ks < depth - whole)[None, :]
            a = tl.where(wanted, tl.load(p + p_offsets, mask=stored, other=0.0), 0.0)
            b = tl.where(wanted, tl.load(q + q_offsets, mask=stored, other=0.0), 0.0)
            acc = _dot(a, b.T, acc, PRECISION, INTERPRET)
    return acc


@triton.jit
def _rows_by_columns(
    L,  # [r, r] one matrix
    X,  # [r, s]
    r,
    s,
    left_stride,
    right_stride,
    i,
    j,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Tile (i, j) of L X, fp32."""
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if TMA:
        l_tiles = tl.make_tensor_descriptor(L, [r, r], [left_stride, 1], [TILE_M, BLOCK_K])
        x_tiles = tl.make_tensor_descriptor(X, [r, s], [right_stride, 1], [BLOCK_K, TILE_N])
        for k in range(0, r, BLOCK_K):
            acc = _dot(l_tiles.load([i * TILE_M, k]), x_tiles.load([k, j * TILE_N]), acc, PRECISION, INTERPRET)
    else:
        # Rows and columns past the end repeat the tile's first, columns 16 bytes at a time so that loads stay wide.
        WIDE: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        m = tl.arange(0, TILE_M)
        n = tl.arange(0, TILE_N)
        ks = tl.arange(0, BLOCK_K)
        rows = tl.where(i * TILE_M + m < r, m, 0)
        columns = tl.where(n < right_stride - j * TILE_N, n, n % WIDE)
        columns = tl.max_contiguous(tl.multiple_of(columns, WIDE), WIDE)
        left = tl.multiple_of(L + (i * TILE_M).to(tl.int64) * left_stride, 16)
        right = tl.multiple_of(X + j * TILE_N, 16)
        left_offsets = rows[:, None] * left_stride + ks[None, :]
        right_offsets = ks[:, None] * right_stride + columns[None, :]
        whole = r // BLOCK_K * BLOCK_K
        for _ in range(0, whole, BLOCK_K):
            acc = _dot(tl.load(left + left_offsets), tl.load(right + right_offsets), acc, PRECISION, INTERPRET)
            left += BLOCK_K
            right += BLOCK_K * right_stride
        if whole < r:
            wanted = ks < r - whole
            a = tl.load(left + left_offsets, mask=(ks < left_stride - whole)[None, :], other=0.0)
            a = tl.where(wanted[None, :], a, 0.0)
            b = tl.load(right + right_offsets, mask=wanted[:, None], other=0.0)
            acc = _dot(a, b, acc, PRECISION, INTERPRET)
    return acc


@triton.jit
def _store_mirrored(
    field,
    acc,  # [TILE, TILE] fp32
    b,
    r,
    stride,
    i,
    j,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Store lower tile (i, j) of matrix b and, off the diagonal, its mirror image."""
    top = i * TILE
    left = j * TILE
    result = cast(acc, DTYPE, INTERPRET)
    mirror = result.T
    if i == j:
        m = tl.arange(0, TILE)
        result = tl.where(m[:, None] >= m[None, :], result, mirror)
    else:
        # The mirror of a diagonal tile is the tile itself: storing it twice would be a race.
        offsets, mask = _tile_of(r - left, stride - top, stride, TILE, TILE)
        tl.store(_matrix(field, DTYPE, (b * r + left) * stride + top) + offsets, mirror, mask=mask)
    offsets, mask = _tile_of(r - top, stride - left, stride, TILE, TILE)
    tl.store(_matrix(field, DTYPE, (b * r + top) * stride + left) + offsets, result, mask=mask)


@triton.jit(do_not_specialize=["total_tiles"])
def symmetric_kernel(
    table,  # [problems + 1, FIELDS] int64
    total_tiles,
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Every problem's out = sigma^2 alpha P Q^T + beta P + delta Q + gamma I: lower tiles, and their mirrors."""
    row = table
    for t in range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        while tl.load(row + FIELDS + FIRST_TILE) <= t:
            row += FIELDS
        r = tl.load(row + ROWS).to(tl.int32)
        depth = tl.load(row + DEPTH).to(tl.int32)
        stride = _stride(row + LEFT_STRIDE, IN)
        out_stride = _stride(row + OUT_STRIDE, OUT_DTYPE)
        matrix_tiles = tl.load(row + MATRIX_TILES).to(tl.int32)
        t_of_problem = t - tl.load(row + FIRST_TILE).to(tl.int32)
        b = (t_of_problem // matrix_tiles).to(tl.int64)
        i, j = _lower_tile(t_of_problem % matrix_tiles, tl.cdiv(r, TILE), GROUP)

        P = _matrix(row + LEFT, IN, b * r * stride)
        Q = _matrix(row + RIGHT, IN, b * r * stride)
        acc = _rows_by_rows(P, Q, r, depth, stride, i, j, TILE, BLOCK_K, TMA, PRECISION, INTERPRET)

        sigma = _sigma(row, b)
        acc *= _float(row + ALPHA) * sigma * sigma
        top = i * TILE
        left = j * TILE
        corner = b * r + top
        beta = _float(row + BETA)
        delta = _float(row + DELTA)
        # Masks reach to the end of the padded row, so that loads and stores stay 16 bytes wide.
        offsets, mask = _tile_of(r - top, stride - left, stride, TILE, TILE)
        if beta != 0.0:
            tile = _matrix(row + LEFT, IN, corner * stride + left)
            acc += beta * tl.load(tile + offsets, mask=mask, other=0.0).to(tl.float32)
        if delta != 0.0:
            tile = _matrix(row + RIGHT, IN, corner * stride + left)
            acc += delta * tl.load(tile + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.arange(0, TILE)[:, None] + top
        n = tl.arange(0, TILE)[None, :] + left
        acc = tl.where(m == n, acc + _float(row + GAMMA), acc)
        if IN.primitive_bitwidth < OUT_DTYPE.primitive_bitwidth:
            # A partial product: the sum of all is mirrored.
            offsets, mask = _tile_of(r - top, out_stride - left, out_stride, TILE, TILE)
            tl.store(_matrix(row + OUT, OUT_DTYPE, corner * out_stride + left) + offsets, acc, mask=mask)
        else:
            _store_mirrored(row + OUT, acc, b, r, out_stride, i, j, OUT_DTYPE, TILE, INTERPRET)


@triton.jit
def _general_tile(
    row,
    b,
    i,
    j,
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Tile (i, j) of matrix b of one problem: sigma (alpha L X + beta X), rounded."""
    r = tl.load(row + ROWS).to(tl.int32)
    s = tl.load(row + COLUMNS).to(tl.int32)
    left_stride = _stride(row + LEFT_STRIDE, IN)
    right_stride = _stride(row + RIGHT_STRIDE, IN)
    L = _matrix(row + LEFT, IN, b * r * left_stride)
    X = _matrix(row + RIGHT, IN, b * r * right_stride)
    acc = _rows_by_columns(
        L, X, r, s, left_stride, right_stride, i, j, TILE_M, TILE_N, BLOCK_K, TMA, PRECISION, INTERPRET
    )
    acc *= _float(row + ALPHA)
    beta = _float(row + BETA)
    if beta != 0.0:
        # Masks reach to the end of the padded row, so that loads and stores stay 16 bytes wide.
        top = i * TILE_M
        left = j * TILE_N
        offsets, mask = _tile_of(r - top, right_stride - left, right_stride, TILE_M, TILE_N)
        tile = _matrix(row + RIGHT, IN, (b * r + top) * right_stride + left)
        acc += beta * tl.load(tile + offsets, mask=mask, other=0.0).to(tl.float32)
    return cast(acc * _sigma(row, b), OUT_DTYPE, INTERPRET)


@triton.jit
def _general_place(row, t, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Matrix and tile of a problem that tile t of the launch is."""
    r = tl.load(row + ROWS).to(tl.int32)
    s = tl.load(row + COLUMNS).to(tl.int32)
    matrix_tiles = tl.load(row + MATRIX_TILES).to(tl.int32)
    t_of_problem = t - tl.load(row + FIRST_TILE).to(tl.int32)
    i, j = _grouped_tile(t_of_problem % matrix_tiles, tl.cdiv(r, TILE_M), tl.cdiv(s, TILE_N), GROUP)
    return (t_of_problem // matrix_tiles).to(tl.int64), i, j


@triton.jit(do_not_specialize=["total_tiles"])
def general_kernel(
    table,  # [problems + 1, FIELDS] int64
    total_tiles,
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Every problem's out = sigma (alpha L X + beta X)."""
    row = table
    for t in range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        while tl.load(row + FIELDS + FIRST_TILE) <= t:
            row += FIELDS
        b, i, j = _general_place(row, t, TILE_M, TILE_N, GROUP)
        result = _general_tile(row, b, i, j, IN, OUT_DTYPE, TILE_M, TILE_N, BLOCK_K, TMA, PRECISION, INTERPRET)
        r = tl.load(row + ROWS).to(tl.int32)
        out_stride = _stride(row + OUT_STRIDE, OUT_DTYPE)
        top = i * TILE_M
        left = j * TILE_N
        offsets, mask = _tile_of(r - top, out_stride - left, out_stride, TILE_M, TILE_N)
        tl.store(_matrix(row + OUT, OUT_DTYPE, (b * r + top) * out_stride + left) + offsets, result, mask=mask)


@triton.jit(do_not_specialize=["total_tiles"])
def update_kernel(
    table,  # [problems + 1, FIELDS] int64
    total_tiles,
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """As `general_kernel`, but what would be stored updates the parameters and never reaches memory."""
    row = table
    for t in range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        while tl.load(row + FIELDS + FIRST_TILE) <= t:
            row += FIELDS
        b, i, j = _general_place(row, t, TILE_M, TILE_N, GROUP)
        factor = _general_tile(row, b, i, j, IN, OUT_DTYPE, TILE_M, TILE_N, BLOCK_K, TMA, PRECISION, INTERPRET)
        rules = tl.load(row + UPDATE_RULES).to(tl.pointer_type(tl.float64))
        hyper = tl.load(row + UPDATE_HYPER).to(tl.pointer_type(tl.float64))
        param = tl.load(row + UPDATE_ROWS).to(tl.pointer_type(tl.int64)) + b * PACK_FIELDS
        m = (i * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
        n = (j * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        # Turned back to the parameter's orientation.
        if tl.load(param + PARAM_ROWS) > tl.load(param + PARAM_COLS):
            o = tl.trans(factor).to(tl.float32)
            apply_update(
                o, rules, hyper, b, param, n[:, None], m[None, :], PARAM_DTYPE, False, STOCHASTIC, INTERPRET, True
            )
        else:
            o = factor.to(tl.float32)
            apply_update(
                o, rules, hyper, b, param, m[:, None], n[None, :], PARAM_DTYPE, False, STOCHASTIC, INTERPRET, True
            )


@triton.jit(do_not_specialize=["total_tiles"])
def reduce_kernel(
    table,  # [problems + 1, FIELDS] int64; DEPTH partial products, from LEFT on, as far apart as LEFT and RIGHT
    total_tiles,
    IN: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Every problem's out = sigma^2 alpha (sum of its partial products), added in order; lower triangles are read."""
    row = table
    for t in range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        while tl.load(row + FIELDS + FIRST_TILE) <= t:
            row += FIELDS
        r = tl.load(row + ROWS).to(tl.int32)
        stride = _stride(row + LEFT_STRIDE, IN)
        out_stride = _stride(row + OUT_STRIDE, OUT_DTYPE)
        matrix_tiles = tl.load(row + MATRIX_TILES).to(tl.int32)
        t_of_problem = t - tl.load(row + FIRST_TILE).to(tl.int32)
        b = (t_of_problem // matrix_tiles).to(tl.int64)
        i, j = _triangle(t_of_problem % matrix_tiles)
        top = i * TILE
        left = j * TILE
        # From one partial product to the next, in elements; the pointers are apart by bytes.
        step = (tl.load(row + RIGHT) - tl.load(row + LEFT)) // (IN.primitive_bitwidth // 8)
        offsets, mask = _tile_of(r - top, stride - left, stride, TILE, TILE)
        acc = tl.zeros((TILE, TILE), dtype=tl.float32)
        for n in range(tl.load(row + DEPTH).to(tl.int32)):
            partial = _matrix(row + LEFT, IN, n * step + (b * r + top) * stride + left)
            acc += tl.load(partial + offsets, mask=mask, other=0.0)
        sigma = _sigma(row, b)
        acc *= _float(row + ALPHA) * sigma * sigma
        _store_mirrored(row + OUT, acc, b, r, out_stride, i, j, OUT_DTYPE, TILE, INTERPRET)
