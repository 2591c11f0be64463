"""Packed copy-in and copy-out in torch: the torch backend, and the oracle of the Triton launchers in `pack.py`.

Letters: B matrices, R rows and C columns as the parameter has them, r <= s the same two oriented for
Newton-Schulz (r = min(R, C)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """An R x C matrix inside a tensor: no view is made until one is needed."""

    tensor: Tensor
    offset: int  # elements from the tensor's first one
    row_stride: int  # elements
    col_stride: int

    def view(self, rows: int, cols: int) -> Tensor:
        return self.tensor.as_strided(
            (rows, cols), (self.row_stride, self.col_stride), self.tensor.storage_offset() + self.offset
        )

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.offset * self.tensor.element_size()


@dataclass(slots=True)
class PackedMatrix:
    """One matrix of a step: where its gradient, momentum and parameter lie, and the numbers of its update."""

    rows: int
    cols: int
    grad: Strided | None  # fp32, bf16 or fp16; only read, and set anew for every copy-in
    momentum: Strided  # fp32, bf16 or fp16; updated in place
    param: Strided  # fp32, bf16 or fp16; updated in place
    mu: float  # momentum coefficient
    ema: bool  # m <- mu m + (1 - mu) g; otherwise m <- mu m + g
    nesterov: bool
    scale: float  # of the update, from the matrix's shape
    group: int  # row of the table of learning rates and weight decays


@dataclass(slots=True)
class PackedGroup:
    """The same-shape matrices of a step, and the batch that they are packed into."""

    matrices: list[PackedMatrix]
    workspace: Tensor  # [B, r, s], rows padded to 16 bytes
    sq_norm: Tensor  # [B] fp32, written by copy_in: the sum of squares of each matrix
    scale: Tensor | None = None  # [B] fp32, written by copy_in: needed (and only there) by an fp16 workspace

    def __post_init__(self) -> None:
        first = self.matrices[0]
        expected = (len(self.matrices), min(first.rows, first.cols), max(first.rows, first.cols))
        if (self.scale is not None) != (self.workspace.dtype == torch.float16):
            raise ValueError("an fp16 workspace needs a scale per matrix, and no other one does")
        if tuple(self.workspace.shape) != expected or self.sq_norm.shape != expected[:1]:
            raise ValueError(
                f"a group of {len(self.matrices)} matrices of {first.rows} x {first.cols} takes a workspace "
                f"{expected} and as many norms, got {tuple(self.workspace.shape)} and {tuple(self.sq_norm.shape)}"
            )

    def packed(self, batch: Tensor, index: int) -> Tensor:
        """Matrix `index` of `batch` ([B, r, s]) turned back to the parameter's R x C."""
        matrix = self.matrices[index]
        return batch[index].mT if matrix.rows > matrix.cols else batch[index]


@dataclass(slots=True)
class Pack:
    """The groups that are packed and unpacked together, and what a backend has prepared for them."""

    groups: list[PackedGroup]
    prepared: dict[str, Any] = field(default_factory=dict)


def copy_in(pack: Pack) -> None:
    """Update every momentum in place and pack the matrices that Newton-Schulz takes.

    With `ema` m <- mu m + (1 - mu) g, otherwise m <- mu m + g. Packed is m, or with `nesterov` the same rule
    applied once more (g + mu (m - g), respectively g + mu m), computed and rounded in the momentum's dtype, then
    cast to the workspace's, oriented so that rows <= columns, with the padding of the rows zeroed.
    `sq_norm` becomes the sum of squares of what was packed, before `scale` if there is one: in an fp16 workspace
    a matrix is stored times a power of two that brings its root mean square near 1 (`fp16_scale`).
    """
    for group in pack.groups:
        _zero_padding(group.workspace)
        for index, matrix in enumerate(group.matrices):
            momentum = matrix.momentum.view(matrix.rows, matrix.cols)
            assert matrix.grad is not None
            grad = matrix.grad.view(matrix.rows, matrix.cols).to(momentum.dtype)
            out = group.packed(group.workspace, index)
            if matrix.ema:
                momentum.lerp_(grad, 1 - matrix.mu)
            else:
                momentum.mul_(matrix.mu).add_(grad)
            if not matrix.nesterov:
                update = momentum
            elif not matrix.ema:
                update = grad.add(momentum, alpha=matrix.mu)
            elif out.dtype == momentum.dtype and group.scale is None:
                update = torch.lerp(grad, momentum, matrix.mu, out=out)
            else:
                update = grad.lerp(momentum, matrix.mu)
            # One reduction a matrix: over a whole batch the order of the sum could depend on the batch.
            if group.scale is None:
                if update is not out:
                    out.copy_(update)
                torch.linalg.vector_norm(out, dtype=torch.float32, out=group.sq_norm[index])
                group.sq_norm[index].square_()
            else:
                torch.linalg.vector_norm(update, dtype=torch.float32, out=group.sq_norm[index])
                group.sq_norm[index].square_()
                group.scale[index] = fp16_scale(group.sq_norm[index], update.numel())
                out.copy_(update.float() * group.scale[index])


def fp16_scale(sq_norm: Tensor, numel: int) -> Tensor:
    """The power of two that brings the root mean square of `numel` elements near 1, so that few are subnormal.

    Kept small enough that even a matrix whose norm sits in one element does not overflow fp16. 1 for a zero or
    non-finite norm.
    """
    norm = sq_norm.sqrt()
    exponent = torch.floor(-torch.log2(norm) + min(0.5 * math.log2(max(numel, 1)), 15.0))
    return torch.where((norm > 0) & norm.isfinite(), torch.exp2(exponent), 1.0)


def copy_out(pack: Pack, factors: Sequence[Tensor], hyper: Tensor) -> None:
    """Apply the orthogonal factors: p <- (1 - lr * weight_decay) p, then p <- p - lr * scale * O.

    Both results are rounded to the parameter's dtype, as torch.optim.Muon's two operations are.

    Args:
        pack: as packed by `copy_in`.
        factors: [B, r, s] per group, oriented as the workspace is.
        hyper: [groups of the optimizer, 2] float64: lr and weight_decay.
    """
    rates = hyper.tolist()
    for group, factor in zip(pack.groups, factors, strict=True):
        for index, matrix in enumerate(group.matrices):
            lr, weight_decay = rates[matrix.group]
            param = matrix.param.view(matrix.rows, matrix.cols)
            if weight_decay:
                param.mul_(1 - lr * weight_decay)
            param.add_(group.packed(factor, index), alpha=-lr * matrix.scale)


def _zero_padding(workspace: Tensor) -> None:
    batch, r, s = workspace.shape
    padding = workspace.stride(1) - s
    if padding and r:
        workspace.as_strided((batch, r, padding), workspace.stride(), workspace.storage_offset() + s).zero_()
