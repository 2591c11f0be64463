"""Packed copy-in and copy-out in Triton: one launch over a table of matrices. Oracles: `pack_reference.py`.

Letters: R rows and C columns as the parameter has them, r <= s the same two oriented for Newton-Schulz.
A tile is BLOCK x BLOCK in the parameter's orientation, so that gradients, momenta and parameters are read along
their rows; only the packed side is transposed, in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lw.kernels.device import interpreting
from fused_lw.kernels.launch import launch
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided

BLOCK = 64

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
FIELDS = tl.constexpr(16)


@triton.jit
def _round_to(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 to DTYPE, to nearest even. Triton's interpreter truncates to bf16, so there the bits are rounded."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


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
    grad = tl.load(row + SOURCE).to(tl.pointer_type(GRAD_DTYPE))
    momentum = tl.load(row + MOMENTUM).to(tl.pointer_type(MOMENTUM_DTYPE))
    rows = tl.load(row + ROWS)
    cols = tl.load(row + COLS)
    mu = tl.load(rules + matrix * 4)
    weight = tl.load(rules + matrix * 4 + 1)
    ema = tl.load(rules + matrix * 4 + 2) != 0
    nesterov = tl.load(rules + matrix * 4 + 3) != 0

    inside = (i < rows) & (j < cols)
    g_at = grad + i * tl.load(row + SOURCE_ROW_STRIDE) + j * tl.load(row + SOURCE_COL_STRIDE)
    m_at = momentum + i * tl.load(row + MOMENTUM_ROW_STRIDE) + j * tl.load(row + MOMENTUM_COL_STRIDE)
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
    # Rounded wherever the unfused formulas round, so that a bf16 momentum follows them step by step.
    if UPDATE:
        decayed = _round_to(m * mu, MOMENTUM_DTYPE, INTERPRET).to(tl.float32)
        m = tl.where(ema, m + (g - m) * weight, decayed + g)
        rounded = _round_to(m, MOMENTUM_DTYPE, INTERPRET)
        tl.store(m_at, rounded, mask=inside)
        m = rounded.to(tl.float32)
    if nesterov:
        # lerp(g, m, mu) from its nearer end, as torch does
        blend = tl.where(mu < 0.5, g + (m - g) * mu, m - (m - g) * (1.0 - mu))
        m = tl.where(ema, blend, g + m * mu)
        m = _round_to(m, MOMENTUM_DTYPE, INTERPRET).to(tl.float32)

    if PACK:
        if tl.float16 == PACKED_DTYPE:
            m *= tl.load(tl.load(row + FP16_SCALE).to(tl.pointer_type(tl.float32)))
        u = _round_to(m, PACKED_DTYPE, INTERPRET)
        packed = tl.load(row + PACKED).to(tl.pointer_type(PACKED_DTYPE))
        stride = tl.load(row + PACKED_STRIDE)
        # Beyond the matrix both loads gave zero, so the padding of the packed rows is zeroed by the same store.
        within = (i < tl.load(row + PADDED_ROWS)) & (j < tl.load(row + PADDED_COLS))
        if rows > cols:
            tl.store(packed + tl.trans(j * stride + i), tl.trans(u), mask=tl.trans(within))
        else:
            tl.store(packed + i * stride + j, u, mask=within)
        m = u.to(tl.float32)
    if UPDATE:
        tl.store(partial + tl.program_id(0), tl.sum(m * m))


@triton.jit
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
    end = tiles.to(tl.int64)
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
def copy_out_kernel(
    table,  # int64 [n, FIELDS]
    rules,  # fp64 [n, 2]: scale of the update, row of `hyper`
    tile_matrix,  # int32 [tiles]
    hyper,  # fp64 [groups, 2]: lr, weight_decay
    PARAM_DTYPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    matrix, row, i, j = _locate(table, tile_matrix, BLOCK)
    param = tl.load(row + SOURCE).to(tl.pointer_type(PARAM_DTYPE))
    factor = tl.load(row + PACKED).to(tl.pointer_type(FACTOR_DTYPE))
    rows = tl.load(row + ROWS)
    cols = tl.load(row + COLS)
    group = tl.load(rules + matrix * 2 + 1).to(tl.int64)
    lr = tl.load(hyper + group * 2)
    weight_decay = tl.load(hyper + group * 2 + 1)
    rate = (lr * tl.load(rules + matrix * 2)).to(tl.float32)
    decay = (1.0 - lr * weight_decay).to(tl.float32)

    inside = (i < rows) & (j < cols)
    stride = tl.load(row + PACKED_STRIDE)
    if rows > cols:
        o = tl.trans(tl.load(factor + tl.trans(j * stride + i), mask=tl.trans(inside), other=0.0))
    else:
        o = tl.load(factor + i * stride + j, mask=inside, other=0.0)
    p_at = param + i * tl.load(row + SOURCE_ROW_STRIDE) + j * tl.load(row + SOURCE_COL_STRIDE)
    p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32)
    p = _round_to(p * decay, PARAM_DTYPE, INTERPRET).to(tl.float32)
    p = _round_to(p - rate * o.to(tl.float32), PARAM_DTYPE, INTERPRET)
    tl.store(p_at, p, mask=inside)


class _Entry(NamedTuple):
    """A matrix of a table and its place in a batch."""

    matrix: PackedMatrix
    batch: Tensor  # [B, r, s]
    place: int  # in the batch
    group: PackedGroup


class _Table(NamedTuple):
    """What one launch works on, described on the device."""

    entries: list[_Entry]
    dtypes: tuple[torch.dtype, ...]
    host_rows: Tensor  # int64 [n, FIELDS], pinned where the device is a GPU
    rows: Tensor  # the same on the device
    rules: Tensor  # [n, ...]
    tile_matrix: Tensor  # int32 [tiles]
    partial: Tensor  # fp32 [tiles]

    def refresh(self, sources: Sequence[int]) -> None:
        """Note where the sources (pointers) are now; nothing is copied unless one has moved."""
        column = self.host_rows[:, SOURCE.value]
        now = torch.tensor(sources, dtype=torch.int64)
        if not torch.equal(column, now):
            column.copy_(now)
            self.rows.copy_(self.host_rows, non_blocking=True)


def copy_in(pack: Pack) -> None:
    """As `pack_reference.copy_in`, in two launches per combination of dtypes (four for an fp16 workspace)."""
    if "in" not in pack.prepared:
        pack.prepared["in"] = _copy_in_tables(pack)
    for table in pack.prepared["in"]:
        table.refresh([_grad(entry.matrix).data_ptr() for entry in table.entries])
        grad, momentum, packed = (_triton_dtype(dtype) for dtype in table.dtypes)
        # An fp16 workspace takes two passes: its scale must be known before anything is written.
        passes = ((True, False), (False, True)) if packed == tl.float16 else ((True, True),)
        for update, write in passes:
            launch(
                copy_in_kernel,
                (len(table.tile_matrix),),
                table.rows,
                table.rules,
                table.tile_matrix,
                table.partial,
                GRAD_DTYPE=grad,
                MOMENTUM_DTYPE=momentum,
                PACKED_DTYPE=packed,
                UPDATE=update,
                PACK=write,
                BLOCK=BLOCK,
                INTERPRET=interpreting(),
            )
            if update:
                launch(
                    sum_tiles_kernel,
                    (len(table.entries),),
                    table.rows,
                    table.partial,
                    len(table.tile_matrix),
                    PACKED_DTYPE=packed,
                    BLOCK=1024,
                )


def copy_out(pack: Pack, factors: Sequence[Tensor], hyper: Tensor) -> None:
    """As `pack_reference.copy_out`, in one launch per combination of dtypes."""
    where = [factor.data_ptr() for factor in factors]
    if pack.prepared.get("factors") != where:
        pack.prepared["factors"] = where
        pack.prepared["out"] = _copy_out_tables(pack, factors)
    for table in pack.prepared["out"]:
        param, factor = (_triton_dtype(dtype) for dtype in table.dtypes)
        launch(
            copy_out_kernel,
            (len(table.tile_matrix),),
            table.rows,
            table.rules,
            table.tile_matrix,
            hyper,
            PARAM_DTYPE=param,
            FACTOR_DTYPE=factor,
            BLOCK=BLOCK,
            INTERPRET=interpreting(),
        )


def _copy_in_tables(pack: Pack) -> list[_Table]:
    by_dtype: dict[tuple[torch.dtype, ...], list[_Entry]] = {}
    for group in pack.groups:
        for place, matrix in enumerate(group.matrices):
            key = (_grad(matrix).tensor.dtype, matrix.momentum.tensor.dtype, group.workspace.dtype)
            by_dtype.setdefault(key, []).append(_Entry(matrix, group.workspace, place, group))
    tables = []
    for dtypes, entries in by_dtype.items():
        matrices = [entry.matrix for entry in entries]
        rules = torch.tensor([(m.mu, 1 - m.mu, m.ema, m.nesterov) for m in matrices], dtype=torch.float32)
        tables.append(_table(entries, [_grad(matrix) for matrix in matrices], dtypes, rules))
    return tables


def _copy_out_tables(pack: Pack, factors: Sequence[Tensor]) -> list[_Table]:
    by_dtype: dict[tuple[torch.dtype, ...], list[_Entry]] = {}
    for group, factor in zip(pack.groups, factors, strict=True):
        for place, matrix in enumerate(group.matrices):
            key = (matrix.param.tensor.dtype, factor.dtype)
            by_dtype.setdefault(key, []).append(_Entry(matrix, factor, place, group))
    tables = []
    for dtypes, entries in by_dtype.items():
        matrices = [entry.matrix for entry in entries]
        rules = torch.tensor([(m.scale, m.group) for m in matrices], dtype=torch.float64)
        tables.append(_table(entries, [matrix.param for matrix in matrices], dtypes, rules))
    return tables


def _table(entries: list[_Entry], sources: Sequence[Strided], dtypes: tuple[torch.dtype, ...], rules: Tensor) -> _Table:
    host_rows = torch.empty(len(entries), FIELDS.value, dtype=torch.int64)
    tiles: list[int] = []
    first_tile = 0
    for n, ((matrix, batch, place, group), source) in enumerate(zip(entries, sources, strict=True)):
        stride = batch.stride(1)
        tall = matrix.rows > matrix.cols
        padded_rows, padded_cols = (stride, matrix.cols) if tall else (matrix.rows, stride)
        across = -(-padded_cols // BLOCK)
        row = {
            SOURCE: source.data_ptr(),
            MOMENTUM: matrix.momentum.data_ptr(),
            PACKED: batch.data_ptr() + place * batch.stride(0) * batch.element_size(),
            ROWS: matrix.rows,
            COLS: matrix.cols,
            SOURCE_ROW_STRIDE: source.row_stride,
            SOURCE_COL_STRIDE: source.col_stride,
            MOMENTUM_ROW_STRIDE: matrix.momentum.row_stride,
            MOMENTUM_COL_STRIDE: matrix.momentum.col_stride,
            PACKED_STRIDE: stride,
            PADDED_ROWS: padded_rows,
            PADDED_COLS: padded_cols,
            TILES_ACROSS: across,
            FIRST_TILE: first_tile,
            SQ_NORM: group.sq_norm.data_ptr() + place * group.sq_norm.element_size(),
            FP16_SCALE: 0 if group.scale is None else group.scale.data_ptr() + place * group.scale.element_size(),
        }
        for column, value in row.items():
            host_rows[n, column.value] = value
        tiles.append(across * -(-padded_rows // BLOCK))
        first_tile += tiles[-1]
    device = entries[0].batch.device
    if device.type == "cuda":
        host_rows = host_rows.pin_memory()
    tile_matrix = torch.repeat_interleave(torch.arange(len(entries), dtype=torch.int32), torch.tensor(tiles))
    partial = torch.empty(first_tile, dtype=torch.float32, device=device)
    # A copy even on a CPU: the interpreter's kernels must not see what is being written to `host_rows`.
    return _Table(
        entries, dtypes, host_rows, host_rows.to(device, copy=True), rules.to(device), tile_matrix.to(device), partial
    )


def _grad(matrix: PackedMatrix) -> Strided:
    assert matrix.grad is not None
    return matrix.grad


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
