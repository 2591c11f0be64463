"""The products in torch: the CPU's backend, and the oracle that the Triton kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_lw.kernels.coefficients import Triple
from fused_lw.kernels.products import General, InputNorm, OnChip, Product, Reduce

# From this many rows on, one matrix keeps the cores of a CPU busy: half of a symmetric product can be left out, and
# a loop over matrices is no slower than MKL's batched gemm (measured on 2 cores).
BLOCKED_MIN_ROWS = 384
BLOCK_ROWS = 192


def run(product: Product) -> None:
    """Compute one product into its `out`."""
    p = product
    if isinstance(p, General):
        general_product(p.L, p.X, out=p.out, alpha=p.alpha, beta=p.beta, norm=p.norm)
    elif isinstance(p, Reduce):
        sum_partials(p.partials, out=p.out, alpha=p.alpha, norm=p.norm)
    elif isinstance(p, OnChip):
        onchip_iteration(p.X, p.schedule, out=p.out, norm=p.norm)
    else:
        symmetric_product(
            p.P,
            p.Q,
            out=p.out,
            alpha=p.alpha,
            beta=p.beta,
            delta=p.delta,
            gamma=p.gamma,
            norm=p.norm,
            exact=p.exact,
        )


def symmetric_product(
    P: Tensor,  # [B, r, k]
    Q: Tensor,  # [B, r, k]
    *,
    out: Tensor,  # [B, r, r]
    alpha: float = 1.0,
    beta: float = 0.0,
    delta: float = 0.0,
    gamma: float = 0.0,
    norm: InputNorm | None = None,
    exact: bool = True,
) -> None:
    """out = sigma^2 alpha P Q^T + beta P + delta Q + gamma I. See `products.Symmetric`."""
    product = _accumulator(out)
    P, Q = P.to(product.dtype), Q.to(product.dtype)
    if P is Q:
        beta, delta = beta + delta, 0.0
    addend = product if beta == 0.0 else P
    if _blocked(product):
        for c, p, q, o in zip(addend, P, Q, product, strict=True):
            _lower_blocks(c, p, q, beta, alpha, o)
    else:
        torch.baddbmm(addend, P, Q.mT, beta=beta, alpha=alpha, out=product)
    if norm is not None:
        product.mul_(norm.sigma().square()[:, None, None])
    if delta != 0.0:
        product.add_(Q, alpha=delta)
    if gamma != 0.0:
        product.diagonal(dim1=-2, dim2=-1).add_(gamma)
    if exact and not _blocked(product):
        _symmetrize(product)
    if product is not out:
        out.copy_(product)


def general_product(
    L: Tensor,  # [B, r, r]
    X: Tensor,  # [B, r, s]
    *,
    out: Tensor,  # [B, r, s]
    alpha: float = 1.0,
    beta: float = 0.0,
    norm: InputNorm | None = None,
) -> None:
    """out = sigma (alpha L X + beta X). See `products.General`."""
    product = _accumulator(out)
    L, X = L.to(product.dtype), X.to(product.dtype)
    if _blocked(product):
        for left, x, o in zip(L, X, product, strict=True):
            torch.addmm(x, left, x, beta=beta, alpha=alpha, out=o)
    else:
        torch.baddbmm(X, L, X, beta=beta, alpha=alpha, out=product)
    if norm is not None:
        product.mul_(norm.sigma()[:, None, None])
    if product is not out:
        out.copy_(product)


def sum_partials(
    partials: Tensor,  # [splits, B, r, r] fp32, lower triangles are read
    *,
    out: Tensor,  # [B, r, r]
    alpha: float,
    norm: InputNorm | None,
) -> None:
    """out = sigma^2 alpha (partials[0] + partials[1] + ...). See `products.Reduce`."""
    total = alpha * partials.sum(0)
    total = total.tril() + total.tril(-1).mT
    out.copy_(total if norm is None else total * norm.sigma().square()[:, None, None])


def onchip_iteration(
    X: Tensor,  # [B, r, s]
    schedule: tuple[Triple, ...],
    *,
    out: Tensor,  # [B, r, s]
    norm: InputNorm,
) -> None:
    """All steps on float32 squares: R = X X^T, per step W = aI + bR + cR^2, Q <- QW, R <- RWW; out = QX."""
    sigma = norm.sigma()[:, None, None]
    X = X.float()
    R = sigma.square() * (X @ X.mT)
    identity = torch.eye(X.shape[-2], device=X.device)
    Q = identity.expand_as(R)
    for a, b, c in schedule:
        W = a * identity + b * R + c * (R @ R)
        Q = Q @ W
        R = R @ W @ W
        R = 0.5 * (R + R.mT)
    out.copy_(sigma * (Q @ X))


def _accumulator(out: Tensor) -> Tensor:
    """Where the sum goes: `out` itself, or, for a 16-bit `out`, a float32 tensor that is rounded into it once.

    That is what a tensor core does: 16-bit operands, fp32 sums, one rounding when the tile is stored.
    """
    if out.dtype in (torch.float16, torch.bfloat16):
        return torch.empty(out.shape, dtype=torch.float32, device=out.device)
    return out


def _blocked(product: Tensor) -> bool:
    return product.device.type == "cpu" and product.shape[-2] >= BLOCKED_MIN_ROWS


def _lower_blocks(C: Tensor, P: Tensor, Q: Tensor, beta: float, alpha: float, out: Tensor) -> None:
    """out[r, r] = beta C + alpha P Q^T, one block row up to the diagonal at a time, each mirrored."""
    for i in range(0, out.shape[0], BLOCK_ROWS):
        j = min(i + BLOCK_ROWS, out.shape[0])
        torch.addmm(C[i:j, :j], P[i:j], Q[:j].T, beta=beta, alpha=alpha, out=out[i:j, :j])
        out[:i, i:j].copy_(out[i:j, :i].T)
        _symmetrize(out[i:j, i:j])


def _symmetrize(square: Tensor) -> None:
    """Replace [..., r, r] by the mean of itself and its transpose, which is symmetric to the bit."""
    square.add_(square.mT.clone()).mul_(0.5)
