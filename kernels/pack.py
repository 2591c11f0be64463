"""Packed copy-in and copy-out in Triton: one launch over a table of matrices. Oracles: `pack_reference.py`.

Letters: R rows and C columns as the parameter has them, r <= s the same two oriented for Newton-Schulz.
A tile is BLOCK x BLOCK in the parameter's orientation, so that gradients, momenta and parameters are read along
their rows; only the packed side is transposed, in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lw.kernels.device import interpreting
from fused_lw.kernels.launch import launch
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided

BLOCK = 64
NUM_WARPS = 8

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
def _mix(h):
    """A bijection of 32-bit integers whose outputs look random (MurmurHash3's finalizer)."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return h


@triton.jit
def _round_stochastically(x, key, index):
    """fp32 to bf16, up with the probability of what is cut off. As `pack_reference.round_stochastically`."""
    noise = _mix(key ^ _mix(index)) & 0xFFFF
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


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
        rounded = _round_to(p, PARAM_DTYPE, INTERPRET)
    elif STOCHASTIC:
        p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32) * decay - rate * o
        step = tl.load(hyper + group * 3 + 2).to(tl.int64).to(tl.uint32)
        number = tl.load(rules + matrix * 3 + 2).to(tl.int64).to(tl.uint32)
        rounded = _round_stochastically(p, _mix(number + step * 0x9E3779B9), (i * cols + j).to(tl.uint32))
    else:
        # Two roundings, as torch.optim.Muon's two operations have.
        p = _round_to(tl.load(p_at, mask=inside, other=0.0).to(tl.float32) * decay, PARAM_DTYPE, INTERPRET)
        rounded = _round_to(p.to(tl.float32) - rate * o, PARAM_DTYPE, INTERPRET)
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


class _Entry(NamedTuple):
    """A matrix of a table: its two unpacked tensors, and its place in a batch."""

    matrix: PackedMatrix
    source: Strided  # gradient or parameter
    momentum: Strided  # or fp32 master weights; the source again where there are none
    batch: Tensor  # [B, r, s]
    place: int  # in the batch
    group: PackedGroup


class _Table(NamedTuple):
    """What one launch works on, described on the device."""

    entries: list[_Entry]
    options: dict[str, Any]  # of the kernel
    sources: list[int]  # where the sources were when `rows` was last written
    host_rows: Tensor  # int64 [n, FIELDS], pinned where the device is a GPU
    rows: Tensor  # the same on the device
    rules: Tensor  # [n, ...]
    tile_matrix: Tensor  # int32 [tiles]
    partial: Tensor  # fp32 [tiles]

    def refresh(self, sources: Sequence[Strided]) -> None:
        """Note where the sources are now; nothing is copied unless one has moved."""
        now = [source.data_ptr() for source in sources]
        if now != self.sources:
            self.sources[:] = now
            wide = [_wide(entry, source) for entry, source in zip(self.entries, sources, strict=True)]
            self.host_rows[:, SOURCE.value] = torch.tensor(now, dtype=torch.int64)
            self.host_rows[:, ALIGNED.value] = torch.tensor(wide)
            self.rows.copy_(self.host_rows, non_blocking=True)


def copy_in(pack: Pack) -> None:
    """As `pack_reference.copy_in`, in two launches per combination of dtypes (three for an fp16 workspace)."""
    if "in" not in pack.prepared:
        pack.prepared["in"] = _copy_in_tables(pack)
    for table in pack.prepared["in"]:
        table.refresh([_grad(entry.matrix) for entry in table.entries])
        # An fp16 workspace takes two passes: its scale must be known before anything is written.
        two_passes = table.options["PACKED_DTYPE"] == tl.float16
        _launch_over_tiles(copy_in_kernel, table, table.partial, UPDATE=True, PACK=not two_passes)
        launch(
            sum_tiles_kernel,
            (len(table.entries),),
            table.rows,
            table.partial,
            len(table.tile_matrix),
            PACKED_DTYPE=table.options["PACKED_DTYPE"],
            BLOCK=1024,
        )
        if two_passes:
            _launch_over_tiles(copy_in_kernel, table, table.partial, UPDATE=False, PACK=True)


def copy_out(pack: Pack, factors: Sequence[Tensor], hyper: Tensor) -> None:
    """As `pack_reference.copy_out`, in one launch per combination of dtypes and kind of rounding."""
    where = [factor.data_ptr() for factor in factors]
    if pack.prepared.get("factors") != where:
        pack.prepared["factors"] = where
        pack.prepared["out"] = _copy_out_tables(pack, factors)
    for table in pack.prepared["out"]:
        _launch_over_tiles(copy_out_kernel, table, hyper)


def _launch_over_tiles(kernel: Any, table: _Table, *arguments: Tensor, **options: Any) -> None:
    launch(
        kernel,
        (len(table.tile_matrix),),
        table.rows,
        table.rules,
        table.tile_matrix,
        *arguments,
        **table.options,
        **options,
        BLOCK=BLOCK,
        INTERPRET=interpreting(),
        num_warps=NUM_WARPS,
    )


def _copy_in_tables(pack: Pack) -> list[_Table]:
    launches: dict[tuple[torch.dtype, ...], list[_Entry]] = {}
    for group in pack.groups:
        for place, matrix in enumerate(group.matrices):
            grad = _grad(matrix)
            key = (grad.tensor.dtype, matrix.momentum.tensor.dtype, group.workspace.dtype)
            entry = _Entry(matrix, grad, matrix.momentum, group.workspace, place, group)
            launches.setdefault(key, []).append(entry)
    tables = []
    for dtypes, entries in launches.items():
        options = dict(zip(("GRAD_DTYPE", "MOMENTUM_DTYPE", "PACKED_DTYPE"), map(_triton_dtype, dtypes), strict=True))
        rules = [(m.mu, 1 - m.mu, m.ema, m.nesterov) for m in (entry.matrix for entry in entries)]
        tables.append(_table(entries, options, torch.tensor(rules, dtype=torch.float32)))
    return tables


def _copy_out_tables(pack: Pack, factors: Sequence[Tensor]) -> list[_Table]:
    launches: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[_Entry]] = {}
    for group, factor in zip(pack.groups, factors, strict=True):
        for place, matrix in enumerate(group.matrices):
            key = (matrix.param.tensor.dtype, factor.dtype, matrix.master is not None, matrix.stochastic)
            entry = _Entry(matrix, matrix.param, matrix.master or matrix.param, factor, place, group)
            launches.setdefault(key, []).append(entry)
    tables = []
    for (param, factor_dtype, master, stochastic), entries in launches.items():
        options = {
            "PARAM_DTYPE": _triton_dtype(param),
            "FACTOR_DTYPE": _triton_dtype(factor_dtype),
            "MASTER": master,
            "STOCHASTIC": stochastic,
        }
        rules = [(m.scale, m.group, m.noise_key) for m in (entry.matrix for entry in entries)]
        tables.append(_table(entries, options, torch.tensor(rules, dtype=torch.float64)))
    return tables


def _table(entries: list[_Entry], options: dict[str, Any], rules: Tensor) -> _Table:
    host_rows = torch.empty(len(entries), FIELDS.value, dtype=torch.int64)
    tiles: list[int] = []
    first_tile = 0
    for n, entry in enumerate(entries):
        matrix, source, momentum, batch, place, group = entry
        stride = batch.stride(1)
        tall = matrix.rows > matrix.cols
        padded_rows, padded_cols = (stride, matrix.cols) if tall else (matrix.rows, stride)
        across = -(-padded_cols // BLOCK)
        row = {
            SOURCE: source.data_ptr(),
            MOMENTUM: momentum.data_ptr(),
            PACKED: batch.data_ptr() + place * batch.stride(0) * batch.element_size(),
            ROWS: matrix.rows,
            COLS: matrix.cols,
            SOURCE_ROW_STRIDE: source.row_stride,
            SOURCE_COL_STRIDE: source.col_stride,
            MOMENTUM_ROW_STRIDE: momentum.row_stride,
            MOMENTUM_COL_STRIDE: momentum.col_stride,
            PACKED_STRIDE: stride,
            PADDED_ROWS: padded_rows,
            PADDED_COLS: padded_cols,
            TILES_ACROSS: across,
            FIRST_TILE: first_tile,
            SQ_NORM: group.sq_norm.data_ptr() + place * group.sq_norm.element_size(),
            FP16_SCALE: 0 if group.scale is None else group.scale.data_ptr() + place * group.scale.element_size(),
            ALIGNED: _wide(entry, source),
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
    rows = host_rows.to(device, copy=True)
    sources = [entry.source.data_ptr() for entry in entries]
    return _Table(entries, options, sources, host_rows, rows, rules.to(device), tile_matrix.to(device), partial)


def _wide(entry: _Entry, source: Strided) -> bool:
    """Whether source and momentum can be read along their rows 16 bytes at a time."""
    return entry.matrix.cols % 8 == 0 and all(
        side.col_stride == 1 and side.data_ptr() % 16 == 0 and side.row_stride * side.tensor.element_size() % 16 == 0
        for side in (source, entry.momentum)
    )


def _grad(matrix: PackedMatrix) -> Strided:
    assert matrix.grad is not None
    return matrix.grad


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
