"""What a Newton-Schulz iteration is made of, as data: two products, and the whole of it for small matrices.

Letters: B matrices, r rows, s columns (r <= s), k the length of the sum. A program is a list of stages; the
products of one stage do not depend on each other, so that a backend may run them in one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fused_lw.kernels.coefficients import Triple


@dataclass(frozen=True, slots=True, eq=False)
class InputNorm:
    """1/‖X‖ of an input that is stored unnormalized: sigma = 1 / (scale * max(factor * sqrt(sq_norm), eps))."""

    sq_norm: Tensor  # [B] fp32, sum of squares of the true matrix
    scale: Tensor | None  # [B] fp32, power of two that the stored matrix was multiplied by; None means 1
    eps: float
    eps_rule: Literal["clamp", "add"]
    factor: float

    def divisor(self) -> Tensor:
        """[B] fp32, 1 / sigma but for the scale; infinite for a zero matrix without eps, so that zeros stay zeros."""
        norm = self.sq_norm.sqrt()
        if self.factor != 1.0:
            norm.mul_(self.factor)
        norm = norm.clamp_min_(self.eps) if self.eps_rule == "clamp" else norm.add_(self.eps)
        # An eps that float32 does not have is none.
        return norm if self.eps >= torch.finfo(torch.float32).tiny else norm.masked_fill_(norm == 0, math.inf)

    def sigma(self) -> Tensor:
        """[B] fp32"""
        sigma = self.divisor().reciprocal_()
        return sigma if self.scale is None else sigma.div_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Symmetric:
    """out = sigma^2 * alpha * P Q^T + beta * P + delta * Q + gamma * I, known to be symmetric.

    Either P is Q, or P and Q are symmetric and commute; with beta or delta they are square. The Triton kernels compute
    the lower triangle and mirror it. torch computes small squares whole, so theirs is symmetric only up to rounding
    unless `exact` asks for more. An fp32 result of 16-bit operands is a part of a sum (`Reduce`): Triton leaves its
    upper tiles as they were.
    """

    P: Tensor  # [B, r, k]
    Q: Tensor  # [B, r, k]
    out: Tensor  # [B, r, r], none of the operands
    alpha: float = 1.0
    beta: float = 0.0
    delta: float = 0.0
    gamma: float = 0.0
    norm: InputNorm | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What the last product of an iteration does with its result instead of storing it: update the parameters.

    The tensors are those of the copy-out kernel (`pack_kernels.py`), one row a matrix of the product's batch.
    """

    rows: Tensor  # int64 [B, pack_kernels.FIELDS]
    rules: Tensor  # fp64 [B, 3]
    hyper: Tensor  # fp64 [groups, 3]
    param: torch.dtype
    stochastic: bool  # rounding of bf16 parameters


@dataclass(frozen=True, slots=True, eq=False)
class General:
    """out = sigma * (alpha * L X + beta * X), or with `update` the parameters updated by it and `out` left alone."""

    L: Tensor  # [B, r, r], of X's dtype
    X: Tensor  # [B, r, s]
    out: Tensor  # [B, r, s], neither L nor X
    alpha: float = 1.0
    beta: float = 0.0
    norm: InputNorm | None = None
    update: Update | None = None  # Triton only


@dataclass(frozen=True, slots=True, eq=False)
class Reduce:
    """out = sigma^2 * alpha * the sum of partial products, in their order: the end of a product split in its depth."""

    partials: Tensor  # [splits, B, r, r] fp32, splits >= 2; lower triangles are read
    out: Tensor  # [B, r, r]
    alpha: float
    norm: InputNorm | None


@dataclass(frozen=True, slots=True, eq=False)
class OnChip:
    """The whole iteration, X replaced by its result: what one launch does for matrices of few rows."""

    X: Tensor  # [B, r, s] 16-bit, unnormalized
    out: Tensor  # [B, r, s] 16-bit, rows as far apart as X's; may be X's storage
    schedule: tuple[Triple, ...]
    norm: InputNorm


Product = Symmetric | General | Reduce | OnChip
Stage = tuple[Product, ...]


def row_stride(s: int, dtype: torch.dtype) -> int:
    """Elements from one row to the next in the workspace: s rounded up to a multiple of 16 bytes.

    TMA and 16-byte loads need it; with it an odd shape runs the same kernels as an even one.
    """
    per_16_bytes = 16 // dtype.itemsize
    return -(-s // per_16_bytes) * per_16_bytes


class Arena:
    """Hands out temporaries as views of one scratch buffer; without a buffer it hands out meta tensors.

    The meta form sizes the buffer and counts work by building the very program that will run.
    """

    ALIGNMENT = 256

    def __init__(self, scratch: Tensor | None) -> None:
        self._scratch = scratch
        self.nbytes = 0

    def take(self, batch: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A view [batch, rows, columns] whose rows lie `row_stride` apart; its contents are whatever was there."""
        stride = row_stride(columns, dtype)
        start = self.nbytes
        size = batch * rows * stride * dtype.itemsize
        self.nbytes = start + -(-size // self.ALIGNMENT) * self.ALIGNMENT
        if self._scratch is None:
            return torch.empty(batch, rows, stride, dtype=dtype, device="meta")[..., :columns]
        assert self.nbytes <= self._scratch.numel(), "orthogonalize checks the size of scratch"
        return self._scratch[start : start + size].view(dtype).view(batch, rows, stride)[..., :columns]
