"""Muon written plainly, matrix by matrix: what the demo, the benchmarks and the tests compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from fused_lw.muon import SCALES


class PlainMuon(torch.optim.Muon):
    """`torch.optim.Muon` with the iteration in float32 (or float64) instead of bf16, and nothing batched."""

    dtype = torch.float32

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, param.grad, group)
        return loss

    def _step_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        lr = float(group["lr"])
        update = plain_newton_schulz(update.to(self.dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-lr * SCALES[group["adjust_lr_fn"]](*param.shape))


def plain_newton_schulz(
    X: Tensor,  # [M, N]
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
) -> Tensor:
    """The quintic Newton-Schulz iteration of one matrix in its own dtype, without any saving of work."""
    a, b, c = coefficients
    tall = X.shape[0] > X.shape[1]
    if tall:
        X = X.mT
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.mT if tall else X
