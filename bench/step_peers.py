"""Whole optimizers to compare the step with: ours, torch's, and Muon over torch as people write it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_lw.bench.gate import Accuracy
from fused_lw.bench.peers import batched
from fused_lw.muon import SCALES, Muon
from fused_lw.plain import PlainMuon
from fused_lw.update import default_precision


class BatchedMuon(PlainMuon):
    """torch.optim.Muon's step with `foreach` operations for everything elementwise and one batch per oriented shape."""

    orthogonalize: Callable[[Tensor], Tensor] = staticmethod(batched)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the benchmark passes no closure
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for param, grad in zip(params, grads, strict=True):
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(grad)
            momenta = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
            self._apply(group, params, updates)

    def _apply(self, group: dict[str, Any], params: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        lr = float(group["lr"])
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, param in enumerate(params):
            shapes[min(param.shape), max(param.shape)].append(i)
        torch._foreach_mul_(list(params), 1 - lr * group["weight_decay"])
        for members in shapes.values():
            tall = [params[i].shape[0] > params[i].shape[1] for i in members]
            X = torch.stack([updates[i].mT if t else updates[i] for i, t in zip(members, tall, strict=True)])
            orthogonal = self.orthogonalize(X.to(self.dtype))
            for i, t, factor in zip(members, tall, orthogonal, strict=True):
                scale = SCALES[group["adjust_lr_fn"]](*params[i].shape)
                params[i].add_(factor.mT if t else factor, alpha=-lr * scale)


class BatchedMuonBf16(BatchedMuon):
    """The same in bf16, as torch.optim.Muon computes."""

    dtype = torch.bfloat16


class CompiledMuon(BatchedMuon):
    """The same with the iteration compiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.orthogonalize = torch.compile(batched, dynamic=False)


class CompiledMuonBf16(CompiledMuon):
    """The same in bf16."""

    dtype = torch.bfloat16


class PlainMuon64(PlainMuon):
    """What all are checked against."""

    dtype = torch.float64


@dataclass(frozen=True, slots=True)
class StepProvider:
    """An optimizer: `make(params, lr=...)`, the accuracy class it claims, what it computes in, and if it is ours."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    accuracy: Accuracy
    dtype: str
    ours: bool = False


def step_providers(device: torch.device) -> list[StepProvider]:
    """Ours in each accuracy class, and the peers."""
    own = default_precision(device)
    if device.type == "cpu":
        ours = [
            StepProvider("fused_lw", Muon, "float32", own, ours=True),
            StepProvider("fused_lw bf16", partial(Muon, precision="bf16"), "half", "bf16", ours=True),
        ]
    else:
        ours = [StepProvider("fused_lw", Muon, "half", own, ours=True)]
    return [
        *ours,
        StepProvider("float32 loop", PlainMuon, "float32", "fp32"),
        StepProvider("torch batched", BatchedMuon, "float32", "fp32"),
        StepProvider("torch compiled", CompiledMuon, "float32", "fp32"),
        StepProvider("torch.optim.Muon", torch.optim.Muon, "half", "bf16"),
        StepProvider("torch batched bf16", BatchedMuonBf16, "half", "bf16"),
        StepProvider("torch compiled bf16", CompiledMuonBf16, "half", "bf16"),
    ]
