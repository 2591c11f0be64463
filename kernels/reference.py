"""The products in torch: the CPU's backend, and the oracle that the Triton kernels are tested against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_lw.kernels.device import cpu_has_bf16_units
from fused_lw.kernels.products import General, InputNorm, OnChip, Product, Reduce, Symmetric

# From this many rows on, one matrix keeps the cores of a CPU busy: half of a symmetric product can be left out, and
# a loop over matrices is no slower than MKL's batched gemm (measured on 2 cores).
BLOCKED_MIN_ROWS = {torch.float32: 448, torch.bfloat16: 640}
BLOCK_ROWS = 192

Call = Callable[[], object]


def run(product: Product) -> None:
    """Compute one product into its `out`."""
    for call in calls(product):
        call()


def calls(product: Product) -> list[Call]:
    """What computes a product, ready to be called any number of times.

    Of small matrices the product itself is a torch function with all arguments bound, views included: a layer of
    Python above it would take longer than that does.
    """
    if isinstance(product, OnChip):
        return [functools.partial(_onchip_iteration, product)]
    if isinstance(product, Reduce):
        return [functools.partial(_sum_partials, product)]
    if not _accumulates_in_float32(product):
        return [functools.partial(_run_in_float32, product)]
    return _symmetric(product) if isinstance(product, Symmetric) else _general(product)


def frobenius_norm(
    X: Tensor,  # [..., C]
    rows: Tensor | None = None,  # [as many as X has rows] fp32, overwritten
    out: Tensor | None = None,  # [] fp32
) -> Tensor:
    """‖X‖, [] fp32, from the norms of its rows: of a whole 4096 x 4096 at once torch's is 7e-4 off, on a CPU."""
    rows = torch.linalg.vector_norm(X.flatten(0, -2), dim=1, dtype=torch.float32, out=rows)
    norm: Tensor = torch.linalg.vector_norm(rows, out=out)
    return norm


def normalization(X: Tensor, norm: InputNorm, out: Tensor) -> Call:
    """What computes out = sigma X, which may be X, of a norm without scale."""
    assert norm.scale is None
    if X.dtype == torch.float32:
        return lambda: torch.div(X, norm.divisor().view(-1, 1, 1), out=out)
    pairs = list(zip(X.unbind(), out.unbind(), strict=True))

    def divide_each() -> None:
        # By a number each: of tensors of two dtypes torch's quotient is slow, and a divisor rounded to bf16 can leave
        # a norm above 1, where some schedules diverge.
        for (x, o), number in zip(pairs, norm.divisor().unbind(), strict=True):
            torch.div(x, number, out=o)

    return divide_each


def _accumulates_in_float32(product: Symmetric | General) -> bool:
    """True if torch's own product of these dtypes sums in float32 and rounds once, as a tensor core does."""
    left, right = (product.P, product.Q) if isinstance(product, Symmetric) else (product.L, product.X)
    if not left.dtype == right.dtype == product.out.dtype:
        return False
    if product.out.dtype == torch.float32:
        return True
    # What follows the product itself (norm, delta, gamma) would round once more.
    plain = product.norm is None and (isinstance(product, General) or product.delta == product.gamma == 0.0)
    return plain and product.out.dtype == torch.bfloat16 and product.out.device.type == "cpu" and cpu_has_bf16_units()


def _run_in_float32(product: Symmetric | General) -> None:
    """16-bit operands, fp32 sums, one rounding when the result is stored."""
    out = torch.empty(product.out.shape, dtype=torch.float32, device=product.out.device)
    wide: Product
    if isinstance(product, Symmetric):
        P = product.P.float()
        wide = replace(product, P=P, Q=P if product.Q is product.P else product.Q.float(), out=out)
    else:
        wide = replace(product, L=product.L.float(), X=product.X.float(), out=out)
    run(wide)
    product.out.copy_(out)


def _symmetric(p: Symmetric) -> list[Call]:
    out, alpha, beta, delta, gamma = p.out, p.alpha, p.beta, p.delta, p.gamma
    if p.P is p.Q:
        beta, delta = beta + delta, 0.0
    blocked = _blocked(out)
    symmetrize = p.exact and not blocked
    if symmetrize:
        # Half of everything, so that the sum with the transpose is the mean of the two; halving loses no bit.
        alpha, beta, delta, gamma = 0.5 * alpha, 0.5 * beta, 0.5 * delta, 0.5 * gamma
    addend = out if beta == 0.0 else p.P
    found: list[Call] = []
    if blocked:
        found.append(functools.partial(_lower_blocks, addend, p.P, p.Q, beta, alpha, out, p.exact))
    else:
        found.append(functools.partial(torch.baddbmm, addend, p.P, p.Q.mT, beta=beta, alpha=alpha, out=out))
    if p.norm is not None:
        found.append(functools.partial(_scale, out, p.norm, 2))
    if delta != 0.0:
        found.append(functools.partial(out.add_, p.Q, alpha=delta))
    if gamma != 0.0:
        found.append(functools.partial(out.diagonal(dim1=-2, dim2=-1).add_, gamma))
    if symmetrize:
        found.append(functools.partial(_add_transpose, out))
    return found


def _general(p: General) -> list[Call]:
    found: list[Call] = []
    if _blocked(p.out):
        for L, X, out in zip(p.L, p.X, p.out, strict=True):
            found.append(functools.partial(torch.addmm, X, L, X, beta=p.beta, alpha=p.alpha, out=out))
    else:
        found.append(functools.partial(torch.baddbmm, p.X, p.L, p.X, beta=p.beta, alpha=p.alpha, out=p.out))
    if p.norm is not None:
        found.append(functools.partial(_scale, p.out, p.norm, 1))
    return found


def _sum_partials(p: Reduce) -> None:
    total = p.alpha * p.partials.sum(0)
    total = total.tril() + total.tril(-1).mT
    p.out.copy_(total if p.norm is None else total * p.norm.sigma().square()[:, None, None])


def _onchip_iteration(p: OnChip) -> None:
    """All steps on float32 squares: R = X X^T, per step W = aI + bR + cR^2, Q <- QW, R <- RWW; out = QX."""
    sigma = p.norm.sigma()[:, None, None]
    X = p.X.float()
    R = sigma.square() * (X @ X.mT)
    identity = torch.eye(X.shape[-2], device=X.device)
    Q = identity.expand_as(R)
    for a, b, c in p.schedule:
        W = a * identity + b * R + c * (R @ R)
        Q = Q @ W
        R = R @ W @ W
        R = 0.5 * (R + R.mT)
    p.out.copy_(sigma * (Q @ X))


def _scale(out: Tensor, norm: InputNorm, power: int) -> None:
    sigma = norm.sigma()
    out.mul_((sigma if power == 1 else sigma.square()).view(-1, 1, 1))


def _blocked(out: Tensor) -> bool:
    return out.device.type == "cpu" and out.shape[-2] >= BLOCKED_MIN_ROWS[out.dtype]


def _lower_blocks(
    C: Tensor,  # [B, r, r]
    P: Tensor,  # [B, r, k]
    Q: Tensor,  # [B, r, k]
    beta: float,
    alpha: float,
    out: Tensor,  # [B, r, r]
    exact: bool,
) -> None:
    """out = beta C + alpha P Q^T, one block row of a matrix up to the diagonal at a time, each mirrored."""
    for c, p, q, o in zip(C, P, Q, out, strict=True):
        for i in range(0, o.shape[0], BLOCK_ROWS):
            j = min(i + BLOCK_ROWS, o.shape[0])
            torch.addmm(c[i:j, :j], p[i:j], q[:j].T, beta=beta, alpha=alpha, out=o[i:j, :j])
            o[:i, i:j].copy_(o[i:j, :i].T)
            if exact:
                _add_transpose(o[i:j, i:j].mul_(0.5))


def _add_transpose(square: Tensor) -> None:
    """[..., r, r] plus its transpose, which is symmetric to the bit."""
    square.add_(square.mT.clone())
