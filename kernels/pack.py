"""Packed copy-in and copy-out in Triton: one launch over a table of matrices. Oracles: `pack_reference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fused_lw.kernels import pack_kernels as kernels
from fused_lw.kernels.device import interpreting
from fused_lw.kernels.launch import launch
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided
from fused_lw.kernels.products import Update

BLOCK = 64
NUM_WARPS = 16


class _Entry(NamedTuple):
    """A matrix of a table and its place in a batch. Gradients are not held: they would stay alive."""

    matrix: PackedMatrix
    momentum: Strided  # or fp32 master weights, or the parameter where there are none
    batch: Tensor  # [B, r, s]
    place: int  # in the batch
    group: PackedGroup


class _Table(NamedTuple):
    """What one launch works on, described on the device."""

    entries: list[_Entry]
    options: dict[str, Any]  # of the kernel
    sources: list[int]  # where the sources were when `rows` was last written
    host_rows: Tensor  # int64 [n, FIELDS]; pageable, so that a copy has read it when it returns
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
            self.host_rows[:, kernels.SOURCE.value] = torch.tensor(now, dtype=torch.int64)
            self.host_rows[:, kernels.ALIGNED.value] = torch.tensor(wide)
            self.rows.copy_(self.host_rows, non_blocking=True)


def copy_in(pack: Pack) -> None:
    """As `pack_reference.copy_in`, in two launches per combination of dtypes (three for an fp16 workspace)."""
    if "in" not in pack.prepared:
        pack.prepared["in"] = _copy_in_tables(pack)
    for table in pack.prepared["in"]:
        table.refresh([_grad(entry.matrix) for entry in table.entries])
        # An fp16 workspace takes two passes: its scale must be known before anything is written.
        two_passes = table.options["PACKED_DTYPE"] == tl.float16
        _launch_over_tiles(kernels.copy_in_kernel, table, table.partial, UPDATE=True, PACK=not two_passes)
        launch(
            kernels.sum_tiles_kernel,
            (len(table.entries),),
            table.rows,
            table.partial,
            len(table.tile_matrix),
            PACKED_DTYPE=table.options["PACKED_DTYPE"],
            BLOCK=1024,
        )
        if two_passes:
            _launch_over_tiles(kernels.copy_in_kernel, table, table.partial, UPDATE=False, PACK=True)


def copy_out(pack: Pack, factors: Sequence[Tensor | None], hyper: Tensor) -> None:
    """As `pack_reference.copy_out`, in one launch per combination of dtypes and kind of rounding."""
    where = [None if factor is None else factor.data_ptr() for factor in factors]
    if pack.prepared.get("factors") != where:
        pack.prepared["factors"] = where
        pack.prepared["out"] = _copy_out_tables(pack, factors)
    for table in pack.prepared["out"]:
        _launch_over_tiles(kernels.copy_out_kernel, table, hyper)


def fused_update(group: PackedGroup, hyper: Tensor) -> Update | None:
    """What the last Newton-Schulz product needs to update the group's parameters itself, so that its result never
    reaches memory; None where only `copy_out` can: unless all are fp32, or all bf16 and rounded in one way, lie in
    whole aligned rows, and have no master weights.
    """
    param, stochastic = group.matrices[0].param.tensor.dtype, group.matrices[0].stochastic
    entries = [
        _Entry(matrix, matrix.param, group.workspace, place, group) for place, matrix in enumerate(group.matrices)
    ]
    if param not in (torch.float32, torch.bfloat16) or not all(
        matrix.param.tensor.dtype == param
        and matrix.stochastic == stochastic
        and matrix.master is None
        and _wide(entry, matrix.param)
        for matrix, entry in zip(group.matrices, entries, strict=True)
    ):
        return None
    table = _table(entries, _params(entries), {}, _copy_out_rules(entries))
    return Update(table.rows, table.rules, hyper, param, stochastic)


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
            entry = _Entry(matrix, matrix.momentum, group.workspace, place, group)
            launches.setdefault(key, []).append(entry)
    tables = []
    for dtypes, entries in launches.items():
        options = dict(zip(("GRAD_DTYPE", "MOMENTUM_DTYPE", "PACKED_DTYPE"), map(triton_dtype, dtypes), strict=True))
        rules = [(m.mu, 1 - m.mu, m.ema, m.nesterov) for m in (entry.matrix for entry in entries)]
        gradients = [_grad(entry.matrix) for entry in entries]
        tables.append(_table(entries, gradients, options, torch.tensor(rules, dtype=torch.float32)))
    return tables


def _copy_out_tables(pack: Pack, factors: Sequence[Tensor | None]) -> list[_Table]:
    launches: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[_Entry]] = {}
    for group, factor in zip(pack.groups, factors, strict=True):
        if factor is None:
            continue
        for place, matrix in enumerate(group.matrices):
            key = (matrix.param.tensor.dtype, factor.dtype, matrix.master is not None, matrix.stochastic)
            entry = _Entry(matrix, matrix.master or matrix.param, factor, place, group)
            launches.setdefault(key, []).append(entry)
    tables = []
    for (param, factor_dtype, master, stochastic), entries in launches.items():
        options = {
            "PARAM_DTYPE": triton_dtype(param),
            "FACTOR_DTYPE": triton_dtype(factor_dtype),
            "MASTER": master,
            "STOCHASTIC": stochastic,
        }
        tables.append(_table(entries, _params(entries), options, _copy_out_rules(entries)))
    return tables


def _params(entries: Sequence[_Entry]) -> list[Strided]:
    return [entry.matrix.param for entry in entries]


def _copy_out_rules(entries: Sequence[_Entry]) -> Tensor:  # fp64 [n, 3]
    rules = [(m.scale, m.group, m.noise_key) for m in (entry.matrix for entry in entries)]
    return torch.tensor(rules, dtype=torch.float64)


def _table(entries: list[_Entry], sources: Sequence[Strided], options: dict[str, Any], rules: Tensor) -> _Table:
    host_rows = torch.empty(len(entries), kernels.FIELDS.value, dtype=torch.int64)
    tiles: list[int] = []
    first_tile = 0
    for n, (entry, source) in enumerate(zip(entries, sources, strict=True)):
        matrix, momentum, batch, place, group = entry
        stride = batch.stride(1)
        tall = matrix.rows > matrix.cols
        padded_rows, padded_cols = (stride, matrix.cols) if tall else (matrix.rows, stride)
        across = -(-padded_cols // BLOCK)
        row = {
            kernels.SOURCE: source.data_ptr(),
            kernels.MOMENTUM: momentum.data_ptr(),
            kernels.PACKED: batch.data_ptr() + place * batch.stride(0) * batch.element_size(),
            kernels.ROWS: matrix.rows,
            kernels.COLS: matrix.cols,
            kernels.SOURCE_ROW_STRIDE: source.row_stride,
            kernels.SOURCE_COL_STRIDE: source.col_stride,
            kernels.MOMENTUM_ROW_STRIDE: momentum.row_stride,
            kernels.MOMENTUM_COL_STRIDE: momentum.col_stride,
            kernels.PACKED_STRIDE: stride,
            kernels.PADDED_ROWS: padded_rows,
            kernels.PADDED_COLS: padded_cols,
            kernels.TILES_ACROSS: across,
            kernels.FIRST_TILE: first_tile,
            kernels.SQ_NORM: group.sq_norm[place].data_ptr(),
            kernels.FP16_SCALE: 0 if group.scale is None else group.scale[place].data_ptr(),
            kernels.ALIGNED: _wide(entry, source),
        }
        for column, value in row.items():
            host_rows[n, column.value] = value
        tiles.append(across * -(-padded_rows // BLOCK))
        first_tile += tiles[-1]
    device = entries[0].batch.device
    tile_matrix = torch.repeat_interleave(torch.arange(len(entries), dtype=torch.int32), torch.tensor(tiles))
    partial = torch.empty(first_tile, dtype=torch.float32, device=device)
    # A copy even on a CPU: the interpreter's kernels must not see what is being written to `host_rows`.
    rows = host_rows.to(device, copy=True)
    addresses = [source.data_ptr() for source in sources]
    return _Table(entries, options, addresses, host_rows, rows, rules.to(device), tile_matrix.to(device), partial)


def _wide(entry: _Entry, source: Strided) -> bool:
    """Whether source and momentum can be read along their rows 16 bytes at a time."""
    return entry.matrix.cols % 8 == 0 and all(
        side.col_stride == 1 and side.data_ptr() % 16 == 0 and side.row_stride * side.tensor.element_size() % 16 == 0
        for side in (source, entry.momentum)
    )


def _grad(matrix: PackedMatrix) -> Strided:
    assert matrix.grad is not None
    return matrix.grad


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
