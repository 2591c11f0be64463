"""A plain PyTorch loop under DistributedDataParallel: Muon for matrices, AdamW for the rest. Run by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    x = torch.randn(32, 16)
    y = torch.sin(x @ torch.randn(16, 8))
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3)
    losses = []
    for _ in range(8):
        loss = nn.functional.mse_loss(ddp(x[rank::world]), y[rank::world])
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world)
    spread = [p.detach().clone() for p in model.parameters()]
    for p in spread:
        dist.broadcast(p, src=0)
    assert all(torch.equal(p, q) for p, q in zip(spread, model.parameters(), strict=True)), "the ranks agree"
    return losses


def main():
    dist.init_process_group("gloo")
    return {"losses": train()}
