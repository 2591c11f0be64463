"""Replaced steps of optimizers that communicate: two processes over gloo."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fused_lw
from tests.optimizers import MODULES

WORLD = 2


def make_params(shapes, seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def worker(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    keller_jordan(rank)
    gtp(rank)
    dist.barrier()  # take the groups down together
    dist.destroy_process_group()


def keller_jordan(rank: int) -> None:
    """Every rank updates every second matrix, has the momenta of those only, and gets the others."""
    shapes, aux_shapes = [(16, 24), (24, 16), (16, 24), (8, 8), (8, 8)], [(5,), (6, 4)]

    def build():
        params, aux = make_params(shapes, 0), make_params(aux_shapes, 1)
        groups = [
            {"params": params, "use_muon": True, "weight_decay": 0.1},
            {"params": aux, "use_muon": False, "weight_decay": 0.1},
        ]
        return params + aux, MODULES["muon"].MuonWithAuxAdam(groups)

    def train(params, optimizer, steps, first):
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(100 + step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()

    (params, ours), (expected, theirs) = build(), build()
    train(params, ours, 2, 0)
    fused_lw.replace_step(ours)
    train(params, ours, 3, 2)
    train(expected, theirs, 5, 0)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    owned = ["momentum_buffer" in ours.state.get(param, {}) for param in params[: len(shapes)]]
    assert owned == [index % WORLD == rank for index in range(len(shapes))]


def gtp(rank: int) -> None:
    """A matrix of 14 rows and one of 24 rows of fused QKV, stored as two shards with alignment rows."""
    groups = types.SimpleNamespace(tp=None, expt_tp=None, gtp_remat=dist.group.WORLD, expt_gtp_remat=None)
    whole, whole_qkv, replicated = make_params([(16, 12), (24, 12), (8, 12)], 2)
    pads = {0: 2, 1: 0}

    def shards():
        local = [torch.nn.Parameter(p.detach().chunk(WORLD)[rank].clone()) for p in (whole, whole_qkv)]
        for index, param in enumerate(local):
            param.is_gtp_weight_remat, param.gtp_remat_size, param.pad_length = True, WORLD, pads[index]
        local[1].is_qkv = True
        return [*local, torch.nn.Parameter(replicated.detach().clone())]

    results = []
    for swap in (True, False):
        params = shards()
        optimizer = MODULES["megatron.core.optimizer.emerging_optimizers"].TensorParallelMuon(
            params,
            lr=0.05,
            weight_decay=0.1,
            pg_collection=groups,
            split_qkv=True,
            is_qkv_fn=lambda p: getattr(p, "is_qkv", False),
            qkv_split_shapes=[4, 2, 2],
        )
        if swap:
            fused_lw.replace_step(optimizer)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            full = [torch.randn(p.shape, generator=generator) for p in (whole, whole_qkv, replicated)]
            full[0][-pads[0] :] = 0  # alignment rows have no gradient
            for param, grad in zip(params, full, strict=True):
                param.grad = grad if len(grad) == len(param) else grad.chunk(WORLD)[rank].clone()
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_ranks_agree_with_the_originals(tmp_path):
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=WORLD)
