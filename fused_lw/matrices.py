"""Where the matrices of a parameter lie: 2-D parameters, stacked experts, convolutions, blocks of rows."""

from __future__ import annotations

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
    """How a parameter of `shape` is read as matrices.

    `flat_order` are the dimensions that make up the columns, outermost first. It follows the parameter's memory
    (channels-last convolutions included), because Newton-Schulz commutes with a permutation of columns: any
    order gives the same update, as long as gradient, momentum and parameter are read in the same one.
    """

    shape: tuple[int, ...]
    row_dim: int
    flat_order: tuple[int, ...]
    blocks: tuple[Block, ...]

    def locate(self, tensor: Tensor, block: Block) -> Strided:
        """The block inside `tensor`, which has the parameter's shape and `collapses`."""
        row_stride = tensor.stride(self.row_dim)
        offset = block.first_row * row_stride
        for dim, index in enumerate(block.lead):
            offset += index * tensor.stride(dim)
        return Strided(tensor, offset, row_stride, _collapsed_stride(tensor, self.flat_order) or 1)

    def collapses(self, tensor: Tensor) -> bool:
        """Whether the columns of `tensor` lie at one constant stride."""
        return _collapsed_stride(tensor, self.flat_order) is not None


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
    shape = tuple(param.shape)
    if param.ndim < 2:
        raise ValueError(f"Muon takes matrices, parameters of two dimensions or more, not shape {shape}")
    batched = param.ndim == 2 or higher_dims == "batch" or (higher_dims == "auto" and param.ndim == 3)
    row_dim = param.ndim - 2 if batched else 0
    columns = range(row_dim + 1, param.ndim)
    flat_order = tuple(sorted(columns, key=lambda dim: (-param.stride()[dim], dim)))
    rows, cols = shape[row_dim], math.prod(shape[dim] for dim in columns)

    sizes = (rows,) if split_rows is None else tuple(split_rows)
    if sum(sizes) != rows or min(sizes, default=0) < (rows > 0):
        raise ValueError(f"split_rows={sizes} must be positive and add up to the {rows} rows of shape {shape}")
    leads: list[tuple[int, ...]] = [()]
    for dim in range(row_dim):
        leads = [(*lead, index) for lead in leads for index in range(shape[dim])]
    blocks = tuple(
        Block(lead, sum(sizes[:k]), size, cols) for lead in leads for k, size in enumerate(sizes) if size and cols
    )
    view = MatrixView(shape, row_dim, flat_order, blocks)
    if not view.collapses(param):
        raise ValueError(
            f"the columns of shape {shape} with strides {param.stride()} do not lie at one constant stride"
        )
    return view


def _collapsed_stride(tensor: Tensor, order: Sequence[int]) -> int | None:
    """The stride of the dimensions `order` read as one, or None where they have no single stride."""
    stride: int | None = None
    extent = 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            continue
        if stride is None:
            stride = tensor.stride(dim)
        elif tensor.stride(dim) != stride * extent:
            return None
        extent *= tensor.shape[dim]
    return 1 if stride is None else stride
