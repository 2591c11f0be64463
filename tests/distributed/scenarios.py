"""Training by a group of ranks; each function compares with a single process and raises on a difference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fused_lw
from fused_lw import LayerWiseMuon
from tests.distributed.models import (
    ADAMW,
    LR,
    EqualMatrices,
    ThreeMatrices,
    TiedByMuon,
    Tiny,
    alone,
    assert_same,
    batch,
    everywhere,
    small_layout,
    train,
)


def make(model: nn.Module, group: dist.ProcessGroup, **options) -> LayerWiseMuon:
    options = {"layout": small_layout(model, group.size()), "adamw": ADAMW, **LR, **options}
    return LayerWiseMuon(model, process_group=group, **options)


def make_ddp(model: nn.Module, group: dist.ProcessGroup) -> tuple[nn.Module, LayerWiseMuon]:
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    return wrapped, make(model, group, reduce="ddp")


def make_sharded(model: nn.Module, group: dist.ProcessGroup) -> tuple[nn.Module, LayerWiseMuon]:
    mesh = DeviceMesh.from_group(group, "cpu")
    if isinstance(model, Tiny):
        fully_shard(model.up, mesh=mesh, reshard_after_forward=False)
    model = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, LayerWiseMuon(model, process_group=group, adamw=ADAMW, **LR)


def accumulating(model: FSDPModule) -> Callable[[], AbstractContextManager[None]]:
    """FSDP2's no_sync."""

    @contextmanager
    def no_sync():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return no_sync


# Equal to a single process


def plain_modules(group, folder):
    for accumulate in (1, 4):
        model = Tiny()
        optimizer = make(model, group)
        train(model, optimizer, group.rank(), range(20), accumulate, no_sync=optimizer.no_sync)
        assert_same(model, alone(Tiny, group, 20, accumulate=accumulate))
        start = Tiny()
        assert torch.equal(model.never.weight, start.never.weight), "nobody's gradient: left alone"
        assert (model.up.weight - start.up.weight).norm() > 0.1 * start.up.weight.norm(), "the steps move weights"


def few_matrices(group, folder):
    model = ThreeMatrices()
    train(model, make(model, group), group.rank(), range(20))
    assert_same(model, alone(ThreeMatrices, group, 20))


def ddp(group, folder):
    for accumulate in (1, 4):
        model, optimizer = make_ddp(Tiny(), group)
        train(model, optimizer, group.rank(), range(20), accumulate, no_sync=model.no_sync)
        assert_same(model.module, alone(Tiny, group, 20, accumulate=accumulate))


def fsdp2(group, folder):
    for accumulate in (1, 4):
        model, optimizer = make_sharded(Tiny(), group)
        train(model, optimizer, group.rank(), range(20), accumulate, everywhere, no_sync=accumulating(model))
        assert_same(model, alone(Tiny, group, 20, accumulate=accumulate, sometimes=everywhere))
        momentum = optimizer.state[model.up.weight]["momentum_buffer"]
        assert momentum.to_local().shape == model.up.weight.to_local().shape


def fsdp2_few_matrices(group, folder):
    model, optimizer = make_sharded(ThreeMatrices(), group)
    train(model, optimizer, group.rank(), range(20), sometimes=everywhere)
    assert_same(model, alone(ThreeMatrices, group, 20, sometimes=everywhere))


def without_overlap_and_channels_last(group, folder):
    model = Tiny()
    model.conv.to(memory_format=torch.channels_last)
    strides = model.conv.weight.stride()
    train(model, make(model, group, overlap=False, layout="auto"), group.rank(), range(5))
    assert_same(model, alone(Tiny, group, 5))
    assert model.conv.weight.stride() == strides


def hybrid_sharding(group, folder):
    """Shards over four ranks, replicas of them on two."""
    mesh = init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(Tiny(), mesh=mesh)
    optimizer = LayerWiseMuon(model, process_group=group, adamw=ADAMW, **LR)
    train(model, optimizer, group.rank(), range(5), sometimes=everywhere, max_norm=0.5)
    assert_same(model, alone(Tiny, group, 5, sometimes=everywhere, max_norm=0.5))


def clipping(group, folder):
    for kind in (make, make_ddp, make_sharded):
        model = Tiny()
        made = kind(model, group)
        model, optimizer = (model, made) if kind is make else made
        train(model, optimizer, group.rank(), range(5), sometimes=everywhere, max_norm=0.5)
        inner = model.module if kind is make_ddp else model
        assert_same(inner, alone(Tiny, group, 5, sometimes=everywhere, max_norm=0.5))


def clipping_returns_the_norm_and_changes_no_gradient(group, folder):
    model, expected = EqualMatrices(), EqualMatrices()
    optimizer = make(model, group)
    x = torch.randn(group.size(), 4, 16, generator=torch.Generator().manual_seed(0))
    model(x[group.rank()]).backward()
    before = [param.grad.clone() for param in model.parameters()]
    norm = optimizer.clip_grad_norm(1e-3)
    optimizer.step()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
    optimizer.clip_grad_norm(1.0)
    with pytest.raises(RuntimeError, match=r"layers.15.weight got a gradient after clip_grad_norm"):
        model(x[0]).backward()
    sum(expected(part) / group.size() for part in x).backward()
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in expected.parameters()]))


def tied_embedding_by_muon(group, folder):
    model = TiedByMuon()
    optimizer = make(model, group)
    placed = optimizer._replicas[0].matrices.buffers.layout
    assert placed.buckets[placed.placements["embed.weight"].bucket].numel == model.embed.weight.numel()
    train(model, optimizer, group.rank(), range(5))
    assert_same(model, alone(TiedByMuon, group, 5))


def half_precision(group, folder):
    """bf16 parameters: fp32 gradients set by hand, fp32 master weights by their owners only."""
    model, expected = EqualMatrices(torch.bfloat16), EqualMatrices(torch.bfloat16).float()
    optimizer = make(model, group, master_weights=True)
    alone_optimizer = fused_lw.Muon(list(expected.named_parameters()), **LR)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        optimizer.zero_grad()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            grads = torch.randn(group.size(), *param.shape, generator=generator)
            assert param.grad.dtype == torch.float32
            param.grad, other.grad = grads[group.rank()].clone(), grads.mean(0)
        optimizer.step()
        alone_optimizer.step()
    owned = 0
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert (param.float() - other).abs().max() <= other.abs().max() * 2**-8, "rounded once, not every step"
        if param in optimizer.state:
            master = optimizer.state[param]["master_param"]
            assert (master - other).norm() < 1e-6 * other.norm()
            assert torch.equal(param, master.bfloat16())
            owned += 1
    assert owned == len(model.layers) // group.size()


def half_precision_sharded(group, folder):
    """bf16 DTensors: fp32 momenta and master weights, sharded like them."""
    model, expected = EqualMatrices(torch.bfloat16), EqualMatrices(torch.bfloat16).float()
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fully_shard(model, mesh=mesh)
    optimizer = LayerWiseMuon(model, process_group=group, master_weights=True, momentum_dtype=torch.float32, **LR)
    alone_optimizer = fused_lw.Muon(list(expected.named_parameters()), **LR)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            param.grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
            other.grad = grad.float()
        optimizer.step()
        alone_optimizer.step()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        master = optimizer.state[param]["master_param"]
        assert master.to_local().shape == param.to_local().shape
        assert (master.full_tensor() - other).norm() < 1e-6 * other.norm()
        assert torch.equal(param.to_local(), master.to_local().bfloat16())


def stochastic_rounding_differs_between_ranks(group, folder):
    """Equal matrices with equal gradients, each on a rank of its own."""
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = [(f"matrix{index}", nn.Parameter(weights.clone())) for index in range(group.size())]
    optimizer = LayerWiseMuon(params, process_group=group, rounding="stochastic", lr=0.01)
    for _, param in params:
        param.grad = torch.eye(8)
    optimizer.step()
    after = [param.detach() for _, param in params]
    assert all((a - weights).any() for a in after)
    assert not any(torch.equal(after[0], other) for other in after[1:])


def state_is_that_of_owned_matrices(group, folder):
    model = EqualMatrices(torch.bfloat16)
    optimizer = make(model, group, master_weights=True)
    model(torch.randn(4, 16).bfloat16()).backward()
    optimizer.step()
    held = sum(t.untyped_storage().nbytes() for entry in optimizer.state.values() for t in entry.values())
    whole = sum(2 * 4 * param.numel() for param in model.parameters())  # momentum and master weights in fp32
    layout = optimizer._replicas[0].matrices.buffers.layout
    assert abs(held - whole / group.size()) <= 0.05 * whole / group.size() + 8 * layout.padding * layout.numel
    sharded, optimizer = make_sharded(EqualMatrices(), group)
    held = sum(t.to_local().untyped_storage().nbytes() for entry in optimizer.state.values() for t in entry.values())
    assert held == sum(4 * param.numel() for param in sharded.parameters()) / group.size()


# What is done to gradients between steps


def gradients_set_to_none_and_steps_skipped(group, folder):
    model, expected = Tiny(), Tiny()
    optimizer = make(model, group)
    alone_optimizer = fused_lw.MuonWithAuxAdamW(fused_lw.split_params(expected).groups(), muon=LR, adamw=ADAMW)
    for step in range(6):
        train_one_skipping(model, optimizer, [group.rank()], step, 1)
        train_one_skipping(expected, alone_optimizer, range(group.size()), step, group.size())
    assert_same(model, expected)
    optimizer.zero_grad()
    for name, param in model.named_parameters():
        if name in optimizer._replicas[0].matrices.names:
            assert not param.grad.any()
            assert param.grad.untyped_storage().data_ptr() == model.up.weight.grad.untyped_storage().data_ptr()


def train_one_skipping(model, optimizer, ranks, step: int, divisor: int) -> None:
    (model if step % 2 else optimizer).zero_grad()
    for rank in ranks:
        (model(batch(rank, step, 0), step % 3 == 0) / divisor).backward()
    if step != 2:  # as a trainer does that found an infinite loss
        optimizer.step()


def gradients_exchanged_after_the_backward(group, folder):
    """By one rank only, when the reductions of the backward have started."""
    model, expected = EqualMatrices(), EqualMatrices()
    optimizer = make(model, group)
    alone_optimizer = fused_lw.Muon(list(expected.named_parameters()), **LR)
    x = torch.randn(group.size(), 8, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        model(x[group.rank()]).backward()
        grads = []
        for rank, part in enumerate(x):
            alone_optimizer.zero_grad()
            expected(part).backward()
            grads.append([param.grad for param in expected.parameters()])
            if rank == 0:
                grads[0][15], grads[0][3] = torch.eye(16), torch.zeros(16, 16)
        if group.rank() == 0:
            model.layers[15].weight.grad, model.layers[3].weight.grad = torch.eye(16), None
        for param, of_ranks in zip(expected.parameters(), zip(*grads, strict=True), strict=True):
            param.grad = sum(of_ranks) / group.size()
        optimizer.step()
        alone_optimizer.step()
    assert_same(model, expected)


def optimizers_made_anew_take_over(group, folder):
    """While the old one still lives, and after it is gone."""
    model, expected = EqualMatrices(), EqualMatrices()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    alone_optimizer = fused_lw.Muon(list(expected.named_parameters()), **LR)
    expected(x).backward()
    old = make(model, group)
    optimizer = make(model, group)
    model(x).backward()
    optimizer.step()
    alone_optimizer.step()
    assert_same(model, expected)
    try:
        old.step()
    except ValueError as error:
        assert "was replaced" in str(error)
    else:
        raise AssertionError("not refused")
    del old, optimizer
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def closures_and_schedulers(group, folder):
    model, expected = ThreeMatrices(), ThreeMatrices()
    alone_optimizer = fused_lw.Muon(list(expected.named_parameters()), **LR)
    optimizer = make(model, group)
    for each, its, ranks in (
        (model, optimizer, [group.rank()]),
        (expected, alone_optimizer, range(group.size())),
    ):
        scheduler = torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.5)
        for step in range(3):

            def closure(each=each, its=its, ranks=ranks, step=step):
                its.zero_grad()
                loss = sum(each(batch(rank, step, 0), False) for rank in ranks) / len(ranks)
                loss.backward()
                return loss

            assert its.step(closure) > 0
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == LR["lr"] / 8
    assert_same(model, expected)


def backward_passes_outside_no_sync(group, folder):
    """As several losses of one step are: gradients that come after their bucket was reduced still count."""
    model = ThreeMatrices()
    train(model, make(model, group), group.rank(), range(5), accumulate=4)
    assert_same(model, alone(ThreeMatrices, group, 5, accumulate=4))


EVERY_WORLD = [plain_modules, few_matrices, ddp, fsdp2, fsdp2_few_matrices]
WORLD_OF_FOUR = [
    without_overlap_and_channels_last,
    clipping,
    clipping_returns_the_norm_and_changes_no_gradient,
    tied_embedding_by_muon,
    half_precision,
    half_precision_sharded,
    stochastic_rounding_differs_between_ranks,
    state_is_that_of_owned_matrices,
    gradients_set_to_none_and_steps_skipped,
    gradients_exchanged_after_the_backward,
    optimizers_made_anew_take_over,
    closures_and_schedulers,
    backward_passes_outside_no_sync,
]
WORLD_OF_EIGHT = [hybrid_sharding]
