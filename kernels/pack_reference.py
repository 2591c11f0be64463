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

from fused_lw.kernels.reference import frobenius_norm


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
    master: Strided | None = None  # fp32 weights that are updated instead and rounded into the parameter
    stochastic: bool = False  # round a bf16 parameter stochastically
    noise_key: int = 0  # 32 bits that the noise of this matrix starts from


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

    def packed(self, batch: Tensor) -> list[Tensor]:
        """The matrices of `batch` ([B, r, s]), each turned back to its parameter's R x C."""
        pairs = zip(self.matrices, batch.unbind(), strict=True)
        return [packed.mT if matrix.rows > matrix.cols else packed for matrix, packed in pairs]


@dataclass(slots=True)
class Pack:
    """The groups that are packed and unpacked together, and what a backend has prepared for them."""

    groups: list[PackedGroup]
    room: Tensor | None = None  # uint8; copy_in may keep an update there that is yet to be turned or cast
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
        rows = torch.empty(group.workspace.shape[1], device=group.workspace.device)
        norms = group.sq_norm.unbind()  # squared at the end
        for index, (matrix, X, norm) in enumerate(zip(group.matrices, group.workspace.unbind(), norms, strict=True)):
            momentum = matrix.momentum.view(matrix.rows, matrix.cols)
            assert matrix.grad is not None
            grad = matrix.grad.view(matrix.rows, matrix.cols).to(momentum.dtype)
            tall = matrix.rows > matrix.cols
            if matrix.ema:
                momentum.lerp_(grad, 1 - matrix.mu)
            else:
                momentum.mul_(matrix.mu).add_(grad)
            if not matrix.nesterov:
                update = momentum
            elif not matrix.ema:
                update = grad.add(momentum, alpha=matrix.mu)
            else:
                direct = X.dtype == momentum.dtype and group.scale is None and not tall
                update = torch.lerp(grad, momentum, matrix.mu, out=X if direct else _place(pack.room, momentum))
            # One norm a matrix: over a whole batch the order of the sum could depend on the batch.
            if group.scale is not None:
                update = update.float()
                frobenius_norm(update, out=norm)
                group.scale[index] = fp16_scale(norm.square(), update.numel())
                update = update * group.scale[index]
            if update is not X:
                # torch turns a matrix in a copy, by blocks, much faster than in the output of an operation.
                X.copy_(update.mT if tall else update)
            if group.scale is None:
                frobenius_norm(X, rows, norm)
        group.sq_norm.square_()


def _place(room: Tensor | None, like: Tensor) -> Tensor | None:
    """A contiguous tensor of that shape and dtype in `room`; None where there is too little."""
    if room is None or room.numel() < like.nbytes:
        return None
    return room[: like.nbytes].view(like.dtype).view(like.shape)


def fp16_scale(sq_norm: Tensor, numel: int) -> Tensor:
    """The power of two that brings the root mean square of `numel` elements near 1, so that few are subnormal.

    Kept small enough that even a matrix whose norm sits in one element does not overflow fp16. 1 for a zero or
    non-finite norm.
    """
    norm = sq_norm.sqrt()
    exponent = torch.floor(-torch.log2(norm) + min(0.5 * math.log2(max(numel, 1)), 15.0))
    return torch.where((norm > 0) & norm.isfinite(), torch.exp2(exponent), 1.0)


def fused_update(group: PackedGroup, hyper: Tensor) -> None:
    """torch has no last product that could update parameters: everything goes through `copy_out`."""
    del group, hyper


def copy_out(pack: Pack, factors: Sequence[Tensor | None], hyper: Tensor) -> None:
    """Apply the orthogonal factors: p <- (1 - lr * weight_decay) p, then p <- p - lr * scale * O.

    Both results are rounded to the parameter's dtype, as torch.optim.Muon's two operations are. With master
    weights the same is done to those, and the parameter becomes their rounded copy; with stochastic rounding the
    whole update is computed in fp32 and rounded once.

    Args:
        pack: as packed by `copy_in`.
        factors: [B, r, s] per group, oriented as the workspace is; None for a group that is updated already.
        hyper: [groups of the optimizer, 3] float64: lr, weight_decay, count of steps (for the noise).
    """
    # Read on a CPU; left as 0-d tensors on a GPU, where reading them would wait for it.
    rates: Any = hyper.tolist() if hyper.device.type == "cpu" else hyper
    for group, factor in zip(pack.groups, factors, strict=True):
        if factor is None:
            continue
        for matrix, o in zip(group.matrices, group.packed(factor), strict=True):
            lr, weight_decay, step = rates[matrix.group]
            decay, rate = 1 - lr * weight_decay, lr * matrix.scale
            param = matrix.param.view(matrix.rows, matrix.cols)
            if matrix.master is not None:
                master = matrix.master.view(matrix.rows, matrix.cols)
                param.copy_(_apply(master, o, decay, rate))
            elif matrix.stochastic:
                updated = _apply(param.float(), o, decay, rate)
                param.copy_(round_stochastically(updated, matrix.noise_key, step))
            else:
                _apply(param, o, decay, rate)


def _apply(
    p: Tensor,  # [R, C], updated in place
    o: Tensor,  # [R, C]
    decay: float | Tensor,
    rate: float | Tensor,
) -> Tensor:
    if isinstance(rate, Tensor):
        return p.mul_(decay).sub_(o * rate)
    if decay != 1:
        p.mul_(decay)
    return p.add_(o, alpha=-rate)


def round_stochastically(x: Tensor, noise_key: int, step: float | Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of what is cut off, down otherwise.

    The noise is a function of (noise_key, step, index of the element) alone, so that a run can be repeated.
    Infinities and NaN stay.
    """
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    step = torch.as_tensor(step, device=x.device).long()
    key = _mix((step * 0x9E3779B9 + noise_key) & 0xFFFFFFFF)
    noise = _mix(key ^ _mix(index & 0xFFFFFFFF)) & 0xFFFF
    bits = (x.contiguous().view(torch.int32).long() + noise) & 0xFFFF0000
    # The low half of an int64 that may be above the largest int32
    rounded = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def _mix(h: Tensor) -> Tensor:  # int64, 32 bits of it used
    """A bijection of 32-bit integers whose outputs look random (MurmurHash3's finalizer, Austin Appleby)."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def copy_in_nbytes(
    numel: int, grad: torch.dtype, momentum: torch.dtype, workspace: torch.dtype, *, nesterov: bool = True
) -> int:
    """Bytes that copy-in has to move for `numel` elements: the gradient and the momentum are read once, the momentum
    and the workspace written once. An fp16 workspace needs its scale first, and so a second pass over the momentum
    and, for Nesterov's look-ahead, over the gradient.
    """
    per_element = grad.itemsize + 2 * momentum.itemsize + workspace.itemsize
    if workspace == torch.float16:
        per_element += momentum.itemsize + grad.itemsize * nesterov
    return numel * per_element


def copy_out_nbytes(numel: int, param: torch.dtype, factor: torch.dtype, *, master: bool = False) -> int:
    """Bytes that copy-out has to move: the factor is read, the parameter read and written. With fp32 master weights
    those are read and written, and the parameter only written.
    """
    weights = 2 * torch.float32.itemsize + param.itemsize if master else 2 * param.itemsize
    return numel * (factor.itemsize + weights)


def _zero_padding(workspace: Tensor) -> None:
    batch, r, s = workspace.shape
    padding = workspace.stride(1) - s
    if padding and r:
        workspace.as_strided((batch, r, padding), workspace.stride(), workspace.storage_offset() + s).zero_()
