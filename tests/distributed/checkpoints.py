"""torch.distributed.checkpoint: saved by four ranks, loaded by any number, and by optimizers of a single process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fused_lw
from tests.distributed.models import ADAMW, LR, EqualMatrices, ThreeMatrices, Tiny, assert_same, batch
from tests.distributed.scenarios import make, make_sharded

PARTS = 8  # of the batch of every step, whatever the number of ranks
STEPS = 5  # before and after the checkpoint


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, rank: int = 0, world: int = 1) -> None:
    mine = range(rank, PARTS, world)
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        sum(model(batch(part, step, 0), step % 2 == 0) / len(mine) for part in mine).backward()
        optimizer.step()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder, group) -> None:
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder, process_group=group)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder, group=None) -> None:
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder, process_group=group, no_dist=group is None)
    # Not strict: a rank has no state of matrices that others own.
    options = StateDictOptions(strict=False)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"], options=options
    )


def spoiled(model: nn.Module) -> nn.Module:
    """Other weights than those of the checkpoint."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    return model


def alone(model: nn.Module) -> fused_lw.MuonWithAuxAdamW:
    return fused_lw.MuonWithAuxAdamW(fused_lw.split_params(model).groups(), muon=LR, adamw=ADAMW)


_uninterrupted: dict[Callable, nn.Module] = {}


def uninterrupted(make_model: Callable[[], nn.Module]) -> nn.Module:
    if make_model not in _uninterrupted:
        model = make_model()
        optimizer = alone(model)
        steps(model, optimizer, 0)
        steps(model, optimizer, STEPS)
        _uninterrupted[make_model] = model
    return _uninterrupted[make_model]


def save_on_four(group, folder):
    for make_model in (Tiny, ThreeMatrices):
        model = make_model()
        optimizer = make(model, group)
        steps(model, optimizer, 0, group.rank(), group.size())
        save(model, optimizer, folder / make_model.__name__, group)
        steps(model, optimizer, STEPS, group.rank(), group.size())
        assert_same(model, uninterrupted(make_model))
    model, optimizer = make_sharded(Tiny(), group)
    steps(model, optimizer, 0, group.rank(), group.size())
    save(model, optimizer, folder / "sharded", group)


def resume(group, folder):
    for make_model in (Tiny, ThreeMatrices):
        model = spoiled(make_model())
        optimizer = make(model, group, lr=1.0)
        load(model, optimizer, folder / make_model.__name__, group)
        assert optimizer.param_groups[0]["lr"] == LR["lr"]
        steps(model, optimizer, STEPS, group.rank(), group.size())
        assert_same(model, uninterrupted(make_model))


def resume_sharded(group, folder):
    model, optimizer = make_sharded(spoiled(Tiny()), group)
    load(model, optimizer, folder / "sharded", group)
    steps(model, optimizer, STEPS, group.rank(), group.size())
    assert_same(model, uninterrupted(Tiny))


def resume_alone(group, folder):
    """Without a process group, by optimizers that know nothing of ranks."""
    for saved in ("Tiny", "sharded"):
        model = spoiled(Tiny())
        optimizer = alone(model)
        load(model, optimizer, folder / saved)
        steps(model, optimizer, STEPS)
        assert_same(model, uninterrupted(Tiny))
    model = spoiled(ThreeMatrices())
    muon = fused_lw.Muon(model.named_parameters())
    load(model, muon, folder / "ThreeMatrices")
    steps(model, muon, STEPS)
    assert_same(model, uninterrupted(ThreeMatrices))


def a_local_state_dict_restores_this_rank(group, folder):
    model, again = EqualMatrices(torch.bfloat16), EqualMatrices(torch.bfloat16)
    optimizer = make(model, group, master_weights=True)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(group.rank())).bfloat16()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    torch.save((model.state_dict(), optimizer.state_dict()), folder / f"rank{group.rank()}")
    resumed = make(again, group, master_weights=True)
    weights, state = torch.load(folder / f"rank{group.rank()}")
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    for each, its in ((model, optimizer), (again, resumed)):
        its.zero_grad()
        each(x).backward()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def the_state_of_one_process_is_divided(group, folder):
    expected, model = Tiny(), Tiny()
    whole = alone(expected)
    steps(expected, whole, 0)
    model.load_state_dict(expected.state_dict())
    optimizer = make(model, group)
    optimizer.load_state_dict(whole.state_dict())
    owned = {name for part in optimizer._replicas[0].matrices.buffers.layout.shard(group.rank()) for name in part.names}
    names = {param: name for name, param in model.named_parameters()}
    others = {"embed.weight", "norm.weight", *(name for name in names.values() if name.endswith("bias"))}
    assert {names[param] for param in optimizer.state} == owned | others - {"never.bias"}
    steps(model, optimizer, STEPS, group.rank(), group.size())
    assert_same(model, uninterrupted(Tiny))


WORLD_OF_FOUR = [the_state_of_one_process_is_divided, a_local_state_dict_restores_this_rank, save_on_four]
