"""Bad input: every rank of the group raises, with the same reason, and nobody waits."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fused_lw import LayerWiseMuon
from fused_lw.layout import plan
from fused_lw.routing import from_module
from tests.distributed.models import EqualMatrices, Tiny, batch, small_layout
from tests.distributed.scenarios import make


def refused(expected: str, function, *args, **kwargs) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        function(*args, **kwargs)
    assert re.search(expected, str(raised.value)), f"expected {expected}, got {raised.value}"


def ranks_that_differ(group, folder):
    last = group.rank() == group.size() - 1
    where = rf"ranks {dist.get_global_rank(group, 0)} and {dist.get_global_rank(group, group.size() - 1)} differ in "
    refused(where + r"'lr' of group 0: 0\.01 and 0\.03", make, Tiny(), group, lr=0.03 if last else 0.01)
    refused(where + "'betas' of group 1", make, Tiny(), group, adamw={"betas": (0.9, 0.95 if last else 0.9)})
    refused(where + "overlap: True and False", make, Tiny(), group, overlap=not last)
    model = Tiny()
    if last:
        model.up = nn.Linear(12, 24)
    refused(r"up.weight: .*20, 12.*24, 12", make, model, group, layout="auto")
    layouts = [
        plan(from_module(Tiny()), dp_size=group.size(), bucket_size=size, policy=policy)
        for size, policy in ((300, "balanced"), (300, "numel"), (600, "balanced"))
    ]
    refused(where + "the policy of the layout", make, Tiny(), group, layout=layouts[last])
    refused(where + "the buckets of the layout", make, Tiny(), group, layout=layouts[2 * last])


def what_one_rank_refuses(group, folder):
    """The others learn whose parameter it is, and why."""
    last = group.rank() == group.size() - 1
    model = Tiny()
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if param.ndim > 1]
    refused("up.bias: Muon takes matrices", LayerWiseMuon, named if last else matrices, process_group=group)
    refused("down.weight .* twice", LayerWiseMuon, [*matrices, matrices[4]], process_group=group)
    refused("up.bias .* in no group", LayerWiseMuon, matrices, process_group=group, model=model)
    refused("has no name", LayerWiseMuon, [param for _, param in matrices], process_group=group)
    refused("nesterow", make, model, group, **({"nesterow": True} if last else {}))
    refused("max_scratch_bytes=100", make, model, group, max_scratch_bytes=100)
    refused("up.weight .*allreduce=False", make_with_tag, group)


def make_with_tag(group):
    model = Tiny()
    model.up.weight.allreduce = False
    make(model, group)


def layouts_of_other_models(group, folder):
    size = group.size()
    refused(
        f"for {size + 1} ranks, the process group has {size}",
        make,
        Tiny(),
        group,
        layout=small_layout(Tiny(), size + 1),
    )
    refused("does not place experts", make, Tiny(), group, layout=small_layout(EqualMatrices(), size))
    smaller = Tiny()
    smaller.up = nn.Linear(12, 8)
    refused("another up.weight", make, Tiny(), group, layout=small_layout(smaller, size))
    larger = Tiny()
    larger.more = nn.Linear(4, 4)
    refused("places more.weight", make, Tiny(), group, layout=small_layout(larger, size))


def replaced_parameters(group, folder):
    for how in ("module", "memory", "aux"):
        model = Tiny()
        optimizer = make(model, group)
        model(batch(group.rank(), 0, 0), True).backward()
        if group.rank() == group.size() - 1:
            if how == "module":
                model.down.weight = nn.Parameter(model.down.weight.detach().clone())
            elif how == "memory":
                model.down.weight.data = model.down.weight.data.clone()
            else:
                model.norm.weight = nn.Parameter(torch.ones(20))
        refused("norm.weight was replaced" if how == "aux" else "down.weight was replaced", optimizer.step)


def what_cannot_be(group, folder):
    model = Tiny()
    optimizer = make(model, group)
    refused("fixed", optimizer.add_param_group, {"params": [("more", nn.Parameter(torch.ones(3, 3)))]})
    refused("cannot be copied", copy.deepcopy, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(group.rank(), 0, 0), True)).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    refused("capturable", make, Tiny(), group, capturable=True)
    refused("reduce", make, Tiny(), group, reduce="no")
    refused("reduce='ddp'", LayerWiseMuon, DistributedDataParallel(Tiny(), process_group=group), process_group=group)
    refused("layout", make, Tiny(), group, layout="no")


WORLD_OF_TWO = [ranks_that_differ, what_one_rank_refuses, layouts_of_other_models, replaced_parameters, what_cannot_be]
