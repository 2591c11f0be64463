"""Where the matrices of a parameter lie: 2-D parameters, stacked experts, convolutions, blocks of rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from fused_lw.kernels.pack_reference import Strided

HigherDims = Literal["auto", "batch", "flatten"]


class Block(NamedTuple):
    """One matrix of a parameter: the index of its leading dimensions, and which of its rows."""

    lead: tuple[int, ...]
    first_row: int
    rows: int
    cols: int


class MatrixView(NamedTuple):
    """How a parameter is read as matrices.

    `flat_order` are the dimensions that make up the columns, outermost first. It follows the parameter's memory
    (channels-last convolutions included), because Newton-Schulz commutes with a permutation of columns: any
    order gives the same update, as long as gradient, momentum and parameter are read in the same one.
    """

    row_dim: int
    flat_order: tuple[int, ...]
    blocks: tuple[Block, ...]

    def locate(self, tensor: Tensor, block: Block) -> Strided:
        """The block inside `tensor`, which has the parameter's shape and `collapses`."""
        row_stride = tensor.stride(self.row_dim)
        offset = block.first_row * row_stride
        for dim, index in enumerate(block.lead):
            offset += index * tensor.stride(dim)
        col_stride = _collapsed_stride(tensor.shape, tensor.stride(), self.flat_order)
        assert col_stride is not None  # 0 for an expanded gradient
        return Strided(tensor, offset, row_stride, col_stride)

    def collapses(self, tensor: Tensor) -> bool:
        """Whether the columns of `tensor` lie at one constant stride."""
        return _collapsed_stride(tensor.shape, tensor.stride(), self.flat_order) is not None


def view_as_matrices(
    param: Tensor, higher_dims: HigherDims = "auto", split_rows: Sequence[int] | None = None
) -> MatrixView:
    """Read a parameter as matrices.

    Args:
        param: two dimensions or more.
        higher_dims: what more than two dimensions mean: "batch", (..., M, N) are stacked matrices, for example
            experts; "flatten", (out, in, kh, kw) is a convolution and one matrix (out, in * kh * kw); "auto",
            three dimensions are a batch and more are a convolution.
        split_rows: sizes of blocks of rows that are matrices of their own (fused QKV, gate and up).

    Raises:
        ValueError: for fewer than two dimensions, sizes that do not add up to the rows, or memory in which the
            flattened columns do not lie at one stride. The message says what was expected; the caller names
            the parameter.
    """
    split = None if split_rows is None else tuple(split_rows)
    return _view_as_matrices(tuple(param.shape), param.stride(), higher_dims, split)


@functools.lru_cache(maxsize=4096)
def _view_as_matrices(
    shape: tuple[int, ...], strides: tuple[int, ...], higher_dims: HigherDims, split_rows: tuple[int, ...] | None
) -> MatrixView:
    ndim = len(shape)
    if ndim < 2:
        raise ValueError(f"Muon takes matrices, parameters of two dimensions or more, not shape {shape}")
    batched = ndim == 2 or higher_dims == "batch" or (higher_dims == "auto" and ndim == 3)
    row_dim = ndim - 2 if batched else 0
    columns = range(row_dim + 1, ndim)
    flat_order = tuple(sorted(columns, key=lambda dim: (-strides[dim], dim)))
    rows, cols = shape[row_dim], math.prod(shape[dim] for dim in columns)

    sizes = (rows,) if split_rows is None else split_rows
    if sum(sizes) != rows or min(sizes, default=0) < (rows > 0):
        raise ValueError(f"split_rows={sizes} must be positive and add up to the {rows} rows of shape {shape}")
    if _collapsed_stride(shape, strides, flat_order) is None:
        raise ValueError(f"the columns of shape {shape} with strides {strides} do not lie at one constant stride")
    blocks = tuple(
        Block(lead, sum(sizes[:k]), size, cols)
        for lead in itertools.product(*(range(size) for size in shape[:row_dim]))
        for k, size in enumerate(sizes)
        if size and cols
    )
    return MatrixView(row_dim, flat_order, blocks)


def _collapsed_stride(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> int | None:
    """The stride of the dimensions `order` read as one, or None where they have no single stride."""
    stride: int | None = None
    extent = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride is None:
            stride = strides[dim]
        elif strides[dim] != stride * extent:
            return None
        extent *= shape[dim]
    return 1 if stride is None else stride
