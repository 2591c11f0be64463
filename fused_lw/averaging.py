"""What is averaged in one all-reduce a step: the gradients of what AdamW steps, and who has which gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_lw.kernels.reference import frobenius_norm


class Averager:
    """One flat all-reduce of gradients and flags. `.grad` of the parameters is read, and only borrowed while they step.

    Args:
        params: by name, on one device.
        group: the ranks to average over.
        reduce: average the gradients; otherwise somebody else has, and only flags are exchanged.
        divisor: turns a sum of gradients into their mean.
        device: for flags where there are no parameters.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        reduce: bool,
        divisor: int,
        device: torch.device,
    ) -> None:
        self.params = list(params.values())
        self.names = list(params)
        self.group = group
        self._reduce = reduce
        self._divisor = divisor
        self._device = device
        self._means: list[Tensor | None] = []

    def broadcast(self) -> None:
        """Everyone takes the parameters of the group's first rank."""
        for param in self.params:
            dist.broadcast(param.detach(), src=dist.get_global_rank(self.group, 0), group=self.group)

    def run(self, flags: Sequence[bool]) -> list[bool]:
        """Average the gradients; each flag becomes whether it is set on any rank. Waits for the device."""
        averaged = self.params if self._reduce else []
        dtype = torch.float64 if any(param.dtype == torch.float64 for param in averaged) else torch.float32
        sizes = [param.numel() for param in averaged]
        present = [param.grad is not None for param in averaged]
        flat = torch.zeros(sum(sizes) + len(sizes) + len(flags), dtype=dtype, device=self._device)
        *means, tail = torch.split(flat, [*sizes, len(sizes) + len(flags)])
        for param, mean in zip(averaged, means, strict=True):
            if param.grad is not None:
                mean.view(param.shape).copy_(param.grad)
        tail.copy_(torch.tensor([*present, *flags]))
        dist.all_reduce(flat, group=self.group)
        anywhere = [count > 0 for count in tail.tolist()]
        flat[: sum(sizes)].div_(self._divisor)
        if self._reduce:
            self._means = [
                mean.view(param.shape) if some else None
                for param, mean, some in zip(averaged, means, anywhere, strict=False)
            ]
        else:
            self._means = [param.grad for param in self.params]
        return anywhere[len(sizes) :]

    def sq_norms(self) -> tuple[Tensor, Tensor]:
        """Sums of squares of the mean gradients: of shards, to be added over the ranks, and of whole ones."""
        sums = [torch.zeros((), dtype=torch.float32, device=self._device) for _ in range(2)]
        for mean in self._means:
            if isinstance(mean, DTensor):
                sums[0] += sq_norm(mean.to_local())
            elif mean is not None:
                sums[1] += sq_norm(mean)
        return sums[0], sums[1]

    @contextmanager
    def averaged(self, factor: Tensor | None) -> Iterator[None]:
        """Give the parameters the mean gradients, times `factor`, for the time of their step."""
        local = [param.grad for param in self.params]
        for param, mean in zip(self.params, self._means, strict=True):
            scaled = mean if mean is None or factor is None else mean * factor
            param.grad = None if scaled is None else scaled.to(param.dtype)
        try:
            yield
        finally:
            for param, grad in zip(self.params, local, strict=True):
                param.grad = grad
            self._means = []


def sq_norm(grad: Tensor) -> Tensor:
    """The sum of squares, [] fp32."""
    return frobenius_norm(grad if grad.ndim > 1 else grad.view(1, -1)).square()
