"""Nothing is timed that computes something else: errors against float64, and the accuracy classes.

A provider is compared only with those of its own class: an iteration in bf16 is a thousand times less accurate than
one in float32, and where there are bf16 units it is another amount of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Accuracy = Literal["float32", "half"]

# Largest relative distance (Frobenius) to the same polynomial in float64, over Gaussian matrices: a square one has
# singular values near 0, which five steps multiply by 485 together with their rounding errors.
BOUNDS: dict[Accuracy, float] = {"float32": 1e-3, "half": 0.15}
EPS = 1e-7
# Matrices of a batch that are compared: the first, the last and the middle one.
CHECKED = 3

Schedule = tuple[tuple[float, float, float], ...]


def checked_indices(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})[:CHECKED]


def exact(
    X: Tensor,  # [r, s]
    schedule: Schedule,
) -> Tensor:
    """The iteration in float64."""
    X = X.double()
    X = X / X.norm().clamp_min(EPS)
    for a, b, c in schedule:
        A = X @ X.mT
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def worst_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative error of a matrix; infinite for a result of another shape or one that is not finite."""
    worst = 0.0
    for result, right in zip(results, expected, strict=True):
        if result.shape != right.shape or not bool(result.isfinite().all()):
            return float("inf")
        worst = max(worst, float((result.double() - right).norm() / right.norm()))
    return worst


def judge(error: float, claimed: Accuracy, bound: float | None = None) -> str | None:
    """Why a provider of that error gets no time, or None if it gets one. `bound` replaces that of the class."""
    bound = BOUNDS[claimed] if bound is None else bound
    if error <= bound:
        return None
    return f"its error against float64 is {error:.1e}, above the {bound:g} of the {claimed} class"
