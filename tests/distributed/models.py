"""A tiny model with everything that is awkward, its data by rank, and training in one process and in many."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fused_lw
from fused_lw.layout import Layout, plan
from fused_lw.routing import from_module

# At lr=0.02 one process alone, summing its micro-batches in another order, comes to differ by 6e-7 in 20 steps.
LR = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95)}
ACCUMULATE = 4


class Tiny(nn.Module):
    """Tied embedding, norm, biases, stacked experts, a convolution, and matrices that few or none of the losses use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 12)
        self.up = nn.Linear(12, 20)
        self.norm = nn.LayerNorm(20)
        self.conv = nn.Conv2d(2, 4, 2)
        self.down = nn.Linear(20, 12, bias=False)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 7) / 4)
        self.back = nn.Linear(7, 12, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor, sometimes: bool) -> Tensor:  # [T] int64 -> loss
        x = self.embed(tokens)
        y = self.norm(torch.tanh(self.up(x)))
        y = y + self.conv(y.view(-1, 2, 2, 5)).repeat(1, 1, 5, 1)[:, :, :5].flatten(1)[:, :20]
        x = x + self.down(torch.relu(y))
        if sometimes:
            x = x + self.sometimes(x)
        x = x + self.back(torch.tanh(x @ self.experts).mean(0))
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])


class TiedByMuon(Tiny):
    """Its tied embedding is Muon's, alone in its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.shared_embedding = self.embed.weight.use_muon = True


class EqualMatrices(nn.Module):
    """As many equal matrices as any of the worlds can divide evenly."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(16))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:  # [T, 16] -> loss
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class ThreeMatrices(nn.Module):
    """Fewer matrices than ranks, and nothing for AdamW.

    Their gradients have no small singular values, of which Newton-Schulz would enlarge the rounding a hundred times.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(m, n, bias=False) for m, n in ((24, 8), (8, 24), (24, 8)))

    def forward(self, tokens: Tensor, sometimes: bool) -> Tensor:
        x = torch.randn(128, 32, generator=torch.Generator().manual_seed(hash(tuple(tokens.tolist())) % 2**32))
        x, y = x.split([24, 8], dim=1)
        x = torch.tanh(self.a(x)) if sometimes else x[:, :8]
        return (self.c(torch.tanh(self.b(x))) - y).square().mean()


def batch(rank: int, step: int, micro: int) -> Tensor:
    return torch.randint(0, 16, (33,), generator=torch.Generator().manual_seed(rank + 100 * step + 10_000 * micro))


def somewhere(rank: int, step: int, micro: int) -> bool:
    """Used by some ranks, in some micro-batches of some steps."""
    return step % 3 != 2 and (rank + micro) % 2 == 0


def everywhere(rank: int, step: int, micro: int) -> bool:
    """Used by all ranks or by none, as FSDP2 needs."""
    return step % 3 != 2


def small_layout(model: nn.Module, world: int) -> Layout:
    return plan(from_module(model), dp_size=world, bucket_size=300)


_alone: dict[tuple, nn.Module] = {}


def alone(make_model, group: dist.ProcessGroup, steps: int, **options) -> nn.Module:
    """The model after `reference`, trained by the group's first rank for all of them, once for equal arguments."""
    key = (make_model, group.size(), steps, *options.items())
    if key not in _alone:
        model = make_model()
        if group.rank() == 0:
            reference(model, group.size(), steps, **options)
        for param in model.parameters():
            dist.broadcast(param.detach(), src=dist.get_global_rank(group, 0), group=group)
        _alone[key] = model
    return _alone[key]


def reference(
    model: nn.Module,
    world: int,
    steps: int,
    accumulate: int = 1,
    sometimes=somewhere,
    max_norm: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """Train in this process on the batches of all ranks."""
    groups = fused_lw.split_params(model).groups()
    optimizer = optimizer or fused_lw.MuonWithAuxAdamW(groups, muon=LR, adamw=ADAMW)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for micro in range(accumulate):
                loss = model(batch(rank, step, micro), sometimes(rank, step, micro))
                (loss / (world * accumulate)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return optimizer


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range,
    accumulate: int = 1,
    sometimes=somewhere,
    max_norm: float | None = None,
    no_sync=None,
) -> None:
    """Train on this rank's batches."""
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last or no_sync is None else no_sync():
                (model(batch(rank, step, micro), sometimes(rank, step, micro)) / accumulate).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm(max_norm)
        optimizer.step()


distances: list[tuple[float, str]] = []  # of all that was compared


def assert_same(model: nn.Module, expected: nn.Module, bound: float = 1e-6) -> None:
    """Parameters agree within `bound`, relative in the Frobenius norm."""
    theirs = dict(expected.named_parameters())
    for name, param in model.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        a, b = full.detach().double(), theirs[name].detach().double()
        distance = float((a - b).norm() / b.norm())
        assert distance < bound, f"{name}: {distance:.2e}"
        distances.append((distance, name))
