"""MuonWithAuxAdamW and split_params: a whole model in one optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from rich.console import Console
from torch import nn

import fused_lw
from fused_lw.routing import model_from
from tests import optimizers
from tests.optimizers import MODULES


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.up = nn.Linear(8, 24)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 8, 16))
        self.head = nn.Linear(8, 20, bias=False)
        self.gate = nn.Linear(8, 4, bias=False)
        self.gate.weight.use_muon = False


def set_grads(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def test_parameters_are_divided_with_reasons():
    split = fused_lw.split_params(TinyModel())
    assert [name for name, _ in split.matrices] == ["experts", "up.weight", "conv.weight", "down.weight"]
    reasons = {row.name: row.reason for row in split.routed}
    assert reasons == {
        "experts": "stacked matrices, weight of a TinyModel",
        "embed.weight": "weight of an Embedding",
        "up.weight": "2 dimensions, weight of a Linear",
        "up.bias": "1 dimension",
        "conv.weight": "a convolution, flattened, weight of a Conv2d",
        "conv.bias": "1 dimension",
        "norm.weight": "1 dimension",
        "norm.bias": "1 dimension",
        "down.weight": "2 dimensions, weight of a Linear",
        "head.weight": "called 'head.weight'",
        "gate.weight": "tagged use_muon=False",
    }
    with (console := Console(width=120)).capture() as printed:
        console.print(split.table())
    text = printed.get()
    assert all(name in text for name in reasons)
    assert "tagged use_muon=False" in text


def test_a_model_is_made_by_its_factory_without_storage():
    model = model_from(f"{__name__}:TinyModel")
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert len(fused_lw.split_params(model).matrices) == 4
    for where, message in (
        ("TinyModel", r"expected package\.module:factory"),
        ("no.such:thing", "cannot be imported"),
        (f"{__name__}:nothing", "cannot be imported"),
        ("builtins:list", "made a list"),
    ):
        with pytest.raises(ValueError, match=message):
            model_from(where)


def test_one_object_steps_as_muon_and_adamw_do_apart():
    together, apart = TinyModel(), TinyModel()
    muon_options = {"lr": 0.05, "weight_decay": 0.2}
    adamw_options = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.3, "amsgrad": True}
    optimizer = fused_lw.MuonWithAuxAdamW(
        fused_lw.split_params(together).groups(), muon=muon_options, adamw=adamw_options
    )
    split = fused_lw.split_params(apart)
    pair = (fused_lw.Muon(split.matrices, **muon_options), torch.optim.AdamW(split.others, **adamw_options))
    for step in range(4):
        set_grads(together.parameters(), step)
        set_grads(apart.parameters(), step)
        optimizer.step()
        for one in pair:
            one.step()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b)


def test_groups_have_the_options_of_their_own_optimizer_only():
    split = fused_lw.split_params(TinyModel())
    optimizer = fused_lw.MuonWithAuxAdamW(split.groups(), adamw={"fused": True})
    muon, adamw = optimizer.param_groups
    plain = fused_lw.Muon(split.matrices).param_groups[0]
    torchs = torch.optim.AdamW(split.others, fused=True).param_groups[0]
    assert muon.keys() == plain.keys() | {"use_muon"}
    assert adamw.keys() == torchs.keys() | {"use_muon"}
    assert adamw["fused"]


def test_checkpoint_of_keller_jordans_is_loaded(monkeypatch):
    optimizers.install(monkeypatch)
    theirs_model, ours_model = TinyModel(), TinyModel()
    for model in (theirs_model, ours_model):
        del model.conv  # whose scale KellerJordan's takes from the kernel
    options = [{"lr": 0.02, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}]

    def groups(model):
        split = fused_lw.split_params(model).groups()
        return [
            {**group, **extra, "params": [p for _, p in group["params"]]}
            for group, extra in zip(split, options, strict=True)
        ]

    theirs = MODULES["muon"].SingleDeviceMuonWithAuxAdam(groups(theirs_model))
    ours = fused_lw.MuonWithAuxAdamW(groups(ours_model), muon={"eps": 0.0}, adamw={"betas": (0.9, 0.95)})
    for step in range(3):
        set_grads(theirs_model.parameters(), step)
        theirs.step()
    ours_model.load_state_dict(theirs_model.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch shares the tensors otherwise
    assert ours.param_groups[0]["ns_steps"] == 5, "options that the checkpoint lacks are kept"
    for step in range(3, 6):
        for model, optimizer in ((theirs_model, theirs), (ours_model, ours)):
            set_grads(model.parameters(), step)
            optimizer.step()
    for a, b in zip(ours_model.parameters(), theirs_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([torch.nn.Parameter(torch.ones(2, 2))], r"group 0 needs 'use_muon'.*split_params"),
        ([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": 1}], "'use_muon'.* not 1"),
        ([{"params": [torch.nn.Parameter(torch.ones(2))], "use_muon": True}], "Muon takes matrices"),
        ([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": True, "lr": -1}], "lr must be at least 0"),
    ],
    ids=["no groups", "flag that is none", "vector for Muon", "bad option"],
)
def test_bad_groups_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        fused_lw.MuonWithAuxAdamW(groups)


def test_unknown_options_are_refused():
    groups = fused_lw.split_params(TinyModel()).groups()
    with pytest.raises(TypeError, match="nesterow"):
        fused_lw.MuonWithAuxAdamW(groups, muon={"nesterow": True})
    with pytest.raises(TypeError, match="momentum"):
        fused_lw.MuonWithAuxAdamW(groups, adamw={"momentum": 0.9})
    same = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        fused_lw.MuonWithAuxAdamW([{"params": [same], "use_muon": True}, {"params": [same], "use_muon": False}])


def groups_with_a_bad_parameter_last(bad):
    vector, matrix = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, 3))
    return [
        {"params": [vector], "use_muon": False},
        {"params": [matrix], "use_muon": True},
        {"params": [torch.nn.Parameter(torch.ones(2, 2)), bad], "use_muon": True},
    ]


def test_messages_count_the_groups_of_the_whole_optimizer():
    with pytest.raises(ValueError, match="parameter 1 of group 2"):
        fused_lw.MuonWithAuxAdamW(groups_with_a_bad_parameter_last(torch.nn.Parameter(torch.ones(3))))
    bad = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = fused_lw.MuonWithAuxAdamW(groups_with_a_bad_parameter_last(bad))
    before = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    set_grads([p for group in optimizer.param_groups for p in group["params"]], 0)
    bad.grad = bad.grad.to_sparse()
    with pytest.raises(ValueError, match="parameter 1 of group 2"):
        optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, before, after))
    bad.grad = bad.grad.to_dense()
    optimizer.step()
    assert not any(map(torch.equal, before, after))


def test_a_loaded_state_replaces_the_old_one():
    model = TinyModel()
    optimizer = fused_lw.MuonWithAuxAdamW(fused_lw.split_params(model).groups())
    set_grads(model.parameters(), 0)
    optimizer.step()
    size = len(pickle.dumps(optimizer))
    old = weakref.ref(optimizer.state[model.up.weight]["momentum_buffer"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(pickle.dumps(optimizer)) < 1.1 * size
    assert all(not member.state for member in optimizer._members.values())
    set_grads(model.parameters(), 1)
    optimizer.step()
    gc.collect()
    assert old() is None


def test_a_checkpoint_of_torch_leaves_the_extras_of_each_group_as_they_are():
    def params():
        return [torch.nn.Parameter(torch.ones(12, 8)), torch.nn.Parameter(torch.ones(8, 8))]

    first, second = params()
    theirs = torch.optim.Muon([{"params": [first], "lr": 0.1}, {"params": [second]}])
    first, second = params()
    muon_group = {"params": [first], "use_muon": True, "split_rows": (4, 4, 4)}
    ours = fused_lw.MuonWithAuxAdamW([muon_group, {"params": [second], "use_muon": True}])
    ours.load_state_dict(theirs.state_dict())
    assert [group["split_rows"] for group in ours.param_groups] == [(4, 4, 4), None]
    assert ours.param_groups[0]["lr"] == 0.1
