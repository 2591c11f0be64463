"""The Newton-Schulz iteration, written once: it turns a batch of matrices into a program of products.

Standard, per step: A = X X^T, B = bA + cA^2, X <- aX + BX.
Gram: a segment of steps runs on R = X X^T alone, W = aI + bR + cR^2, Q <- QW, R <- (RW)W, and ends with X <- QX.
The next segment restarts from that X, which stops the growth of what rounding put into R. What is stored is W - aI,
and Q - aI after a segment's first step: while R is small the rounding of aI would be larger than all the rest.

Every square matrix here is a polynomial of X X^T, so the squares are symmetric and commute. Gram wants them exactly
symmetric: what rounding makes asymmetric grows 30 times more than the rest (float32, 128 x 512).
"""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from fused_lw.kernels.coefficients import Triple
from fused_lw.kernels.products import Arena, General, InputNorm, OnChip, Reduce, Stage, Symmetric

Algorithm = Literal["standard", "gram", "onchip"]

# Rows up to which one program holds a matrix's squares in registers, and steps up to which they need no restart.
ONCHIP_MAX_ROWS = 64
ONCHIP_MAX_STEPS = 5


# Steps of the first and of every later segment of the Gram iteration. In fp16 a third step without restart loses the
# small singular values, and a first segment of one step has the factor that a bf16 X, and so a bf16 factor, harms
# least. float32 squares keep them for three steps (of every schedule, to the accuracy of the standard iteration).
SEGMENTS = {torch.float16: (1, 2), torch.float32: (3, 2)}


def segments(schedule: tuple[Triple, ...], square_dtype: torch.dtype) -> list[tuple[Triple, ...]]:
    """Cut a schedule where the Gram iteration restarts."""
    first, later = SEGMENTS[square_dtype]
    cuts = [0, *range(first, len(schedule), later), len(schedule)]
    return [schedule[i:j] for i, j in itertools.pairwise(cuts)]


def passes(algorithm: Algorithm, schedule: tuple[Triple, ...], square_dtype: torch.dtype) -> int:
    """How often the standard or the Gram iteration multiplies X, and so goes from X to Y or back."""
    return len(schedule) if algorithm == "standard" else len(segments(schedule, square_dtype))


def square_scale(r: int, dtype: torch.dtype) -> float:
    """Power of two that the first X X^T is stored times, to keep its entries fp16 normal numbers.

    Of a normalized matrix with r similar singular values the diagonal is about 1/r and the rest far below:
    from r = 2,000 on most of it would be subnormal. Entries never exceed 1, so r up to 2^14 is safe.
    """
    return 2.0 ** min(round(math.log2(r)), 14) if dtype == torch.float16 else 1.0


def splits_of(r: int, s: int) -> int:
    """Into how many partial sums a GPU should cut X X^T along s, so that few tiles keep all its processors busy.

    By the shape alone: with the batch in it, a matrix's bits would depend on its neighbours. 128 x 128 tiles; a part
    is at least 2,048 long, or the partial sums cost more than they gain.
    """
    tiles = -(-r // 128) * (-(-r // 128) + 1) // 2
    return max(1, min(s // 2048, 132 // tiles, 8)) if s >= 16 * r else 1


def _gram_matrix(
    X: Tensor,  # [B, r, s]
    out: Tensor,  # [B, r, r]
    alpha: float,
    norm: InputNorm | None,
    partials: Tensor | None,  # [splits, B, r, r] fp32
    exact: bool = False,
) -> list[Stage]:
    """Stages of out = sigma^2 alpha X X^T, in one product or as the sum of several over parts of s."""
    if partials is None:
        return [(Symmetric(X, X, out, alpha=alpha, norm=norm, exact=exact),)]
    # Parts start at multiples of 64, so that they are aligned and their main loops have no remainder.
    length = -(-X.shape[2] // (64 * len(partials))) * 64
    parts = [X[..., i * length : (i + 1) * length] for i in range(len(partials))]
    return [
        tuple(Symmetric(part, part, partial, exact=exact) for part, partial in zip(parts, partials, strict=True)),
        (Reduce(partials, out, alpha, norm),),
    ]


def _partials(batch: int, r: int, splits: int, arena: Arena) -> Tensor | None:
    if splits == 1:
        return None
    flat = arena.take(splits * batch, r, r, torch.float32)
    return torch.unflatten(flat, 0, (splits, batch))


def standard(
    X: Tensor,  # [B, r, s]; destroyed
    Y: Tensor,  # [B, r, s] what X alternates with, of the dtype that every later X has
    norm: InputNorm | None,  # None: X is normalized already
    schedule: tuple[Triple, ...],
    square_dtype: torch.dtype,
    arena: Arena,
    splits: int = 1,  # parts that X X^T is summed in
) -> tuple[list[Stage], Tensor]:
    """Program of the standard iteration and the tensor that it leaves the result in (X's storage or Y)."""
    batch, r, _ = X.shape
    A = arena.take(batch, r, r, square_dtype)
    B = arena.take(batch, r, r, square_dtype)
    partials = _partials(batch, r, splits, arena)
    stages: list[Stage] = []
    for n, (a, b, c) in enumerate(schedule):
        first = norm if n == 0 else None
        g = square_scale(r, square_dtype) if n == 0 else 1.0
        if c == 0.0:
            # No square is needed, so X X^T itself is what multiplies X, and takes its dtype.
            L, alpha = A.view(X.dtype), b
            stages += _gram_matrix(X, L, 1.0, first, partials)
        else:
            L, alpha = B.view(X.dtype), 1.0
            stages += _gram_matrix(X, A, g, first, partials)
            stages.append((Symmetric(A, A, L, alpha=c / g**2, beta=b / g),))
        stages.append((General(L, X, Y, alpha=alpha, beta=a, norm=first),))
        X, Y = Y, X.view(Y.dtype)
    return stages, X


def gram(
    X: Tensor,  # [B, r, s]; destroyed
    Y: Tensor,  # [B, r, s] what X alternates with, of the dtype that every later X has
    norm: InputNorm | None,  # None: X is normalized already
    schedule: tuple[Triple, ...],
    square_dtype: torch.dtype,
    arena: Arena,
    splits: int = 1,  # parts that X X^T is summed in
) -> tuple[list[Stage], Tensor]:
    """Program of the Gram iteration and the tensor that it leaves the result in (X's storage or Y)."""
    batch, r, _ = X.shape
    R, T, *free = (arena.take(batch, r, r, square_dtype) for _ in range(5))
    partials = _partials(batch, r, splits, arena)
    stages: list[Stage] = []
    for k, segment in enumerate(segments(schedule, square_dtype)):
        first = norm if k == 0 else None
        g = square_scale(r, square_dtype) if k == 0 else 1.0
        stages += _gram_matrix(X, R, g, first, partials, exact=True)
        Q: Tensor | None = None
        shift = 0.0  # the factor of the segment so far is Q + shift * I
        for n, (a, b, c) in enumerate(segment):
            last = n == len(segment) - 1
            # The segment's last factor multiplies X, so it takes X's dtype; the others stay in the squares'.
            to_q = X.dtype if last else square_dtype
            W = free.pop().view(to_q if Q is None else square_dtype)
            stages.append((Symmetric(R, R, W, alpha=c / g**2, beta=b / g, exact=True),))
            products = [] if last else [Symmetric(R, W, T, beta=a, exact=True)]
            if Q is None:
                Q, shift = W, a
            else:
                QW = free.pop().view(to_q)
                products.append(Symmetric(Q, W, QW, beta=a, delta=shift, gamma=shift * a, exact=True))
                free.append(Q)
                Q, shift = QW, 0.0
            if products:
                stages.append(tuple(products))
            if not last:
                stages.append((Symmetric(T, W, R, beta=a, exact=True),))
            if W is not Q:
                free.append(W)
        assert Q is not None, "a segment has at least one step"
        stages.append((General(Q, X, Y, beta=shift, norm=first),))
        free.append(Q)
        X, Y = Y, X.view(Y.dtype)
    return stages, X


def onchip(
    X: Tensor,  # [B, r, s] 16-bit, unnormalized; destroyed
    norm: InputNorm,
    schedule: tuple[Triple, ...],
    x_dtype: torch.dtype,
) -> tuple[list[Stage], Tensor]:
    """Program of the whole iteration in one launch, in place."""
    out = X.view(x_dtype)
    return [(OnChip(X, out, schedule, norm),)], out
