"""The kernels of the packed copies, over a table of matrices; `pack.py` launches them.

Letters: R rows and C columns as the parameter has them, r <= s the same two oriented for Newton-Schulz.
A tile is BLOCK x BLOCK in the parameter's orientation, so that gradients, momenta and parameters are read along
their rows; only the packed side is transposed, in registers. Imported only where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_lw.kernels.rounding import cast, mix, round_stochastically

# The int64 fields of a table's row. "Source" is the gradient on the way in, the parameter on the way out.
SOURCE = tl.constexpr(0)  # pointer
MOMENTUM = tl.constexpr(1)  # pointer; unused on the way out
PACKED = tl.constexpr(2)  # pointer into the workspace or the factors
ROWS = tl.constexpr(3)
COLS = tl.constexpr(4)
SOURCE_ROW_STRIDE = tl.constexpr(5)  # strides in elements
SOURCE_COL_STRIDE = tl.constexpr(6)
MOMENTUM_ROW_STRIDE = tl.constexpr(7)
MOMENTUM_COL_STRIDE = tl.constexpr(8)
PACKED_STRIDE = tl.constexpr(9)
PADDED_ROWS = tl.constexpr(10)  # extent of the packed rows with their padding, in the parameter's orientation
PADDED_COLS = tl.constexpr(11)
TILES_ACROSS = tl.constexpr(12)
FIRST_TILE = tl.constexpr(13)
SQ_NORM = tl.constexpr(14)  # pointer to one fp32
FP16_SCALE = tl.constexpr(15)  # pointer to one fp32, for an fp16 workspace
ALIGNED = tl.constexpr(16)  # whether all but the packed side can be read 16 bytes at a time
FIELDS = tl.constexpr(17)


@triton.jit
def _locate(table, tile_matrix, BLOCK: tl.constexpr):
    """The matrix of this program, its row of the table, and the rows and columns of its tile."""
    tile = tl.program_id(0)
    matrix = tl.load(tile_matrix + tile).to(tl.int64)
    row = table + matrix * FIELDS
    across = tl.load(row + TILES_ACROSS)
    local = tile - tl.load(row + FIRST_TILE)
    i = (local // across) * BLOCK + tl.arange(0, BLOCK)
    j = (local % across) * BLOCK + tl.arange(0, BLOCK)
    return matrix, row, i[:, None].to(tl.int64), j[None, :].to(tl.int64)


@triton.jit
def _elements(
    row,
    POINTER: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COL_STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    i,
    j,
    WIDE: tl.constexpr,
):
    """Pointers to elements (i, j) of the matrix at field POINTER; WIDE: rows are contiguous and 16-byte aligned."""
    address = tl.load(row + POINTER)
    row_stride = tl.load(row + ROW_STRIDE)
    if WIDE:
        row_stride = tl.multiple_of(row_stride, 128 // DTYPE.primitive_bitwidth)
        at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + i * row_stride + j
    else:
        at = address.to(tl.pointer_type(DTYPE)) + i * row_stride + j * tl.load(row + COL_STRIDE)
    return at


@triton.jit
def _extent(row, WIDE: tl.constexpr):
    rows = tl.load(row + ROWS)
    cols = tl.load(row + COLS)
    if WIDE:
        cols = tl.multiple_of(cols, 8)
    return rows, cols


@triton.jit
def _packed_elements(row, DTYPE: tl.constexpr, i, j, tall: tl.constexpr):
    """Pointers to the packed elements of (i, j), in the packed orientation."""
    stride = tl.multiple_of(tl.load(row + PACKED_STRIDE), 128 // DTYPE.primitive_bitwidth)
    base = tl.multiple_of(tl.load(row + PACKED).to(tl.pointer_type(DTYPE)), 16)
    if tall:
        at = base + tl.trans(j * stride) + tl.trans(i)
    else:
        at = base + i * stride + j
    return at


@triton.jit
def _copy_in_tile(
    rules,
    matrix,
    row,
    i,
    j,
    GRAD_DTYPE: tl.constexpr,
    MOMENTUM_DTYPE: tl.constexpr,
    PACKED_DTYPE: tl.constexpr,
    UPDATE: tl.constexpr,
    PACK: tl.constexpr,
    INTERPRET: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Update one tile's momentum and pack it; its sum of squares."""
    mu = tl.load(rules + matrix * 4)
    weight = tl.load(rules + matrix * 4 + 1)
    ema = tl.load(rules + matrix * 4 + 2) != 0
    nesterov = tl.load(rules + matrix * 4 + 3) != 0
    rows, cols = _extent(row, WIDE)
    inside = (i < rows) & (j < cols)
    g_at = _elements(row, SOURCE, SOURCE_ROW_STRIDE, SOURCE_COL_STRIDE, GRAD_DTYPE, i, j, WIDE)
    m_at = _elements(row, MOMENTUM, MOMENTUM_ROW_STRIDE, MOMENTUM_COL_STRIDE, MOMENTUM_DTYPE, i, j, WIDE)
    # The second pass of an fp16 workspace needs the gradient for Nesterov's look-ahead only.
    g = tl.load(g_at, mask=inside & (UPDATE | nesterov), other=0.0).to(tl.float32)
    m = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
    # Rounded wherever the unfused formulas round, so that a bf16 momentum follows them step by step.
    if UPDATE:
        decayed = cast(m * mu, MOMENTUM_DTYPE, INTERPRET).to(tl.float32)
        m = tl.where(ema, m + (g - m) * weight, decayed + g)
        rounded = cast(m, MOMENTUM_DTYPE, INTERPRET)
        tl.store(m_at, rounded, mask=inside)
        m = rounded.to(tl.float32)
    if nesterov:
        # lerp(g, m, mu) from its nearer end, as torch does
        blend = tl.where(mu < 0.5, g + (m - g) * mu, m - (m - g) * (1.0 - mu))
        m = tl.where(ema, blend, g + m * mu)
        m = cast(m, MOMENTUM_DTYPE, INTERPRET).to(tl.float32)
    if PACK:
        if tl.float16 == PACKED_DTYPE:
            m *= tl.load(tl.load(row + FP16_SCALE).to(tl.pointer_type(tl.float32)))
        u = cast(m, PACKED_DTYPE, INTERPRET)
        # Beyond the matrix both loads gave zero, so the padding of the packed rows is zeroed by the same store.
        PER_16_BYTES: tl.constexpr = 128 // PACKED_DTYPE.primitive_bitwidth
        if rows > cols:
            within = (i < tl.multiple_of(tl.load(row + PADDED_ROWS), PER_16_BYTES)) & (j < cols)
            tl.store(_packed_elements(row, PACKED_DTYPE, i, j, True), tl.trans(u), mask=tl.trans(within))
        else:
            within = (i < rows) & (j < tl.multiple_of(tl.load(row + PADDED_COLS), PER_16_BYTES))
            tl.store(_packed_elements(row, PACKED_DTYPE, i, j, False), u, mask=within)
        m = u.to(tl.float32)
    return tl.sum(m * m)


@triton.jit
def copy_in_kernel(
    table,  # int64 [n, FIELDS]
    rules,  # fp32 [n, 4]: momentum coefficient, weight of the gradient, ema, nesterov
    tile_matrix,  # int32 [tiles]: the matrix of each tile
    partial,  # fp32 [tiles]: sum of squares of what the tile packed
    GRAD_DTYPE: tl.constexpr,
    MOMENTUM_DTYPE: tl.constexpr,
    PACKED_DTYPE: tl.constexpr,
    UPDATE: tl.constexpr,  # update the momentum; off in the second pass of an fp16 workspace
    PACK: tl.constexpr,  # write the workspace; off in the first pass of an fp16 workspace
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    matrix, row, i, j = _locate(table, tile_matrix, BLOCK)
    if tl.load(row + ALIGNED) != 0:
        squares = _copy_in_tile(
            rules, matrix, row, i, j, GRAD_DTYPE, MOMENTUM_DTYPE, PACKED_DTYPE, UPDATE, PACK, INTERPRET, True
        )
    else:
        squares = _copy_in_tile(
            rules, matrix, row, i, j, GRAD_DTYPE, MOMENTUM_DTYPE, PACKED_DTYPE, UPDATE, PACK, INTERPRET, False
        )
    if UPDATE:
        tl.store(partial + tl.program_id(0), squares)


@triton.jit(do_not_specialize=["tiles"])
def sum_tiles_kernel(
    table,  # int64 [n, FIELDS]
    partial,  # fp32 [tiles]
    tiles,  # int32: how many there are
    PACKED_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add each matrix's tiles in a fixed order, the same bits every run; for fp16, choose its scale."""
    matrix = tl.program_id(0)
    row = table + matrix * FIELDS
    begin = tl.load(row + FIRST_TILE)
    end = tl.cast(tiles, tl.int64)
    if matrix + 1 < tl.num_programs(0):
        end = tl.load(row + FIELDS + FIRST_TILE)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partial + offsets, mask=offsets < end, other=0.0)
    sq_norm = tl.sum(total)
    tl.store(tl.load(row + SQ_NORM).to(tl.pointer_type(tl.float32)), sq_norm)
    if tl.float16 == PACKED_DTYPE:
        # As pack_reference.fp16_scale: a power of two, made from its exponent so that it is exact.
        numel = (tl.load(row + ROWS) * tl.load(row + COLS)).to(tl.float32)
        norm = tl.sqrt(sq_norm)
        usable = (norm > 0) & (norm < float("inf"))
        norm = tl.where(usable, norm, 1.0)
        exponent = tl.floor(tl.minimum(0.5 * tl.log2(numel), 15.0) - tl.log2(norm))
        bits = (tl.minimum(tl.maximum(exponent, -126.0), 127.0).to(tl.int32) + 127) << 23
        scale = tl.where(usable, bits.to(tl.float32, bitcast=True), 1.0)
        tl.store(tl.load(row + FP16_SCALE).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def apply_update(
    o,  # fp32 tile of the orthogonal factor, in the parameter's orientation
    rules,
    hyper,
    matrix,
    row,
    i,
    j,
    PARAM_DTYPE: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    INTERPRET: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Update elements (i, j) of the parameter that `row` describes. The arguments are `copy_out_kernel`'s."""
    group = tl.load(rules + matrix * 3 + 1).to(tl.int64)
    lr = tl.load(hyper + group * 3)
    rate = (lr * tl.load(rules + matrix * 3)).to(tl.float32)
    decay = (1.0 - lr * tl.load(hyper + group * 3 + 1)).to(tl.float32)
    rows, cols = _extent(row, WIDE)
    inside = (i < rows) & (j < cols)
    p_at = _elements(row, SOURCE, SOURCE_ROW_STRIDE, SOURCE_COL_STRIDE, PARAM_DTYPE, i, j, WIDE)
    if MASTER:
        master_at = _elements(row, MOMENTUM, MOMENTUM_ROW_STRIDE, MOMENTUM_COL_STRIDE, tl.float32, i, j, WIDE)
        p = tl.load(master_at, mask=inside, other=0.0) * decay - rate * o
        tl.store(master_at, p, mask=inside)
        rounded = cast(p, PARAM_DTYPE, INTERPRET)
    elif STOCHASTIC:
        p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32) * decay - rate * o
        step = tl.load(hyper + group * 3 + 2).to(tl.int64).to(tl.uint32)
        number = tl.load(rules + matrix * 3 + 2).to(tl.int64).to(tl.uint32)
        rounded = round_stochastically(p, mix(number + step * 0x9E3779B9), (i * cols + j).to(tl.uint32))
    else:
        # Two roundings, as torch.optim.Muon's two operations have.
        p = cast(tl.load(p_at, mask=inside, other=0.0).to(tl.float32) * decay, PARAM_DTYPE, INTERPRET)
        rounded = cast(p.to(tl.float32) - rate * o, PARAM_DTYPE, INTERPRET)
    tl.store(p_at, rounded, mask=inside)


@triton.jit
def _copy_out_tile(
    rules,
    hyper,
    matrix,
    row,
    i,
    j,
    PARAM_DTYPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    INTERPRET: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows, cols = _extent(row, WIDE)
    inside = (i < rows) & (j < cols)
    if rows > cols:
        o = tl.load(_packed_elements(row, FACTOR_DTYPE, i, j, True), mask=tl.trans(inside), other=0.0)
        o = tl.trans(o).to(tl.float32)
    else:
        o = tl.load(_packed_elements(row, FACTOR_DTYPE, i, j, False), mask=inside, other=0.0).to(tl.float32)
    apply_update(o, rules, hyper, matrix, row, i, j, PARAM_DTYPE, MASTER, STOCHASTIC, INTERPRET, WIDE)


@triton.jit
def copy_out_kernel(
    table,  # int64 [n, FIELDS]
    rules,  # fp64 [n, 3]: scale of the update, row of `hyper`, number that the noise starts from
    tile_matrix,  # int32 [tiles]
    hyper,  # fp64 [groups, 3]: lr, weight_decay, count of steps
    PARAM_DTYPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    MASTER: tl.constexpr,  # update an fp32 master (in the table's MOMENTUM fields) and round it into the parameter
    STOCHASTIC: tl.constexpr,  # round a bf16 parameter stochastically
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    matrix, row, i, j = _locate(table, tile_matrix, BLOCK)
    if tl.load(row + ALIGNED) != 0:
        _copy_out_tile(rules, hyper, matrix, row, i, j, PARAM_DTYPE, FACTOR_DTYPE, MASTER, STOCHASTIC, INTERPRET, True)
    else:
        _copy_out_tile(rules, hyper, matrix, row, i, j, PARAM_DTYPE, FACTOR_DTYPE, MASTER, STOCHASTIC, INTERPRET, False)
