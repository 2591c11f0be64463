"""Test matrices with the spectra that momentum has, and the Newton-Schulz polynomial in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SPECTRA = ("gaussian", "decay_1e-3", "decay_1e-5", "rank_deficient", "spiked")


def matrix(spectrum: str, r: int, s: int, seed: int = 0) -> Tensor:
    """An [r, s] float32 matrix, r <= s."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(r, s, generator=generator)
    if spectrum == "gaussian":
        return gaussian
    U, _, Vh = torch.linalg.svd(gaussian, full_matrices=False)
    if spectrum == "decay_1e-3":
        sigma = torch.logspace(0, -3, r)
    elif spectrum == "decay_1e-5":
        sigma = torch.logspace(0, -5, r)
    elif spectrum == "rank_deficient":
        sigma = (torch.arange(r) < r // 2).float()
    else:
        sigma = torch.full((r,), 1e-2)
        sigma[:2] = torch.tensor([1.0, 0.3])[:r]
    return (U * sigma) @ Vh


def exact(X: Tensor, schedule: Sequence[tuple[float, float, float]], norm_factor: float = 1.0) -> Tensor:
    """The polynomial of [..., M, N] in float64."""
    if X.shape[-2] > X.shape[-1]:
        return exact(X.mT, schedule, norm_factor).mT
    X = X.double()
    X = X / (norm_factor * torch.linalg.matrix_norm(X, keepdim=True))
    for a, b, c in schedule:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def relative_error(X: Tensor, reference: Tensor) -> float:
    return float((X.double() - reference).norm() / reference.norm())
