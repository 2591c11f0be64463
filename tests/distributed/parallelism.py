"""Data parallelism inside other kinds: experts on few ranks, and rows sharded over a group (GTP)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fused_lw
from fused_lw import LayerWiseMuon
from fused_lw.layout import ns_cost
from tests.distributed.models import LR
from tests.distributed.refusals import refused


def subgroup(group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup:
    """Called by its members only."""
    ranks = [dist.get_global_rank(group, member) for member in members]
    return dist.new_group(ranks, use_local_synchronization=True)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(group, folder):
    """Four ranks hold two experts each, so that two ranks hold the same; the router is on all of them."""
    rank = group.rank()
    kind = rank % 2  # which experts
    expert_group = subgroup(group, [kind, kind + 2])
    names = {"router": (4, 12), "expert.up": (2, 12, 20), "expert.down": (2, 20, 12), "expert.bias": (2, 12)}

    def parameters(kind: int) -> dict[str, nn.Parameter]:
        made = {}
        for index, (name, shape) in enumerate(names.items()):
            made[name] = nn.Parameter(randn(*shape, seed=index + 100 * kind * name.startswith("expert")))
            made[name].allreduce = not name.startswith("expert")
        return made

    def grads(kind: int, rank: int, step: int) -> dict[str, torch.Tensor]:
        return {
            name: randn(*shape, seed=index + 10 * rank + 1000 * step)
            for index, (name, shape) in enumerate(names.items())
        }

    def groups(params: dict[str, nn.Parameter]) -> list[dict]:
        matrices = [(name, param) for name, param in params.items() if name != "expert.bias"]
        return [
            {"params": matrices, "use_muon": True},
            {"params": [("expert.bias", params["expert.bias"])], "use_muon": False},
        ]

    params, expected = parameters(kind), parameters(kind)
    optimizer = LayerWiseMuon(groups(params), process_group=group, expert_process_group=expert_group, **LR)
    alone = fused_lw.MuonWithAuxAdamW(groups(expected), muon=LR)
    for step in range(5):
        optimizer.zero_grad()
        for name, grad in grads(kind, rank, step).items():
            params[name].grad = grad
            holders = [other for other in range(4) if not name.startswith("expert") or other % 2 == kind]
            # The mean of four losses: an expert has no gradient of those that other experts served.
            expected[name].grad = sum(grads(kind, other, step)[name] for other in holders) / 4
        norm = optimizer.clip_grad_norm(3.0)
        # Every expert counts once in the norm, and so does what all ranks hold.
        squares = torch.zeros(2)
        for name, param in expected.items():
            squares[int(name == "router")] += param.grad.square().sum()
        dist.all_reduce(squares, group=group)
        total = (squares[0] / 2 + squares[1] / 4).sqrt()
        torch.testing.assert_close(norm, total)
        for param in expected.values():
            param.grad.mul_(3.0 / total)
        optimizer.step()
        alone.step()
    for name, param in params.items():
        assert (param - expected[name]).norm() < 1e-6 * expected[name].norm(), name
    refused("tagged allreduce=False", LayerWiseMuon, groups(parameters(kind)), process_group=group, **LR)


# Full shape, rows a rank holds, rows of padding at the end
SHARDED = {"qkv": ((30, 16), 16, 2), "up": ((22, 16), 12, 2), "down": ((16, 24), 8, 0), "gate": ((3, 16), 4, 5)}
WHOLE = {"router": (4, 16)}


def gathered_rows(group, folder):
    """Two data-parallel ranks times two that hold half of the rows each."""
    rank = group.rank()
    half = rank % 2
    data_group = subgroup(group, [half, half + 2])
    gtp_group = subgroup(group, [rank - half, rank - half + 1])

    def whole(step: int, data_rank: int) -> dict[str, torch.Tensor]:
        shapes = {**{name: shape for name, (shape, _, _) in SHARDED.items()}, **WHOLE}
        return {name: randn(*s, seed=i + 10 * data_rank + 100 * step) for i, (name, s) in enumerate(shapes.items())}

    def mine(name: str, full: torch.Tensor) -> torch.Tensor:
        if name in WHOLE:
            return full.clone()
        _, rows, padding = SHARDED[name]
        return torch.cat([full, torch.full((padding, full.shape[1]), 7.0)])[half * rows : (half + 1) * rows].clone()

    def groups(params: dict[str, nn.Parameter]) -> list[dict]:
        others = [(name, param) for name, param in params.items() if name != "qkv"]
        return [{"params": others}, {"params": [("qkv", params["qkv"])], "split_rows": (16, 7, 7), "lr": 0.05}]

    start = whole(99, 0)
    expected = {name: nn.Parameter(full.clone()) for name, full in start.items()}
    params = {name: nn.Parameter(mine(name, full)) for name, full in start.items()}
    for name in SHARDED:
        params[name].is_gtp_weight_remat, params[name].gtp_remat_size = True, 2
        params[name].pad_length = SHARDED[name][2]
    refused("gtp_process_group has 1", LayerWiseMuon, groups(params), process_group=data_group, **LR)
    optimizer = LayerWiseMuon(groups(params), process_group=data_group, gtp_process_group=gtp_group, **LR)
    alone = fused_lw.Muon(groups(expected), **LR)
    for step in range(5):
        optimizer.zero_grad()
        for name, param in params.items():
            grads = [whole(step, data_rank)[name] for data_rank in range(2)]
            if name == "up" and step == 3:
                continue  # without gradient
            param.grad = mine(name, grads[rank // 2])
            expected[name].grad = sum(grads) / 2
        optimizer.step()
        alone.step()
        alone.zero_grad()
    for name, param in params.items():
        full = mine(name, expected[name].detach())
        assert (param - full).norm() < 1e-6 * full.norm(), name

    # Each matrix has one owner in the group, and no other owner could take less.
    exchange = optimizer._replicas[0].matrices._exchange
    if exchange is not None and len(exchange.matrices) > 1:
        costs = [ns_cost(spec, "flops") for spec in exchange.layout.params]
        assert max(exchange.layout.shard_costs) < sum(costs)


WORLD_OF_FOUR = [experts, gathered_rows]
