"""What every torch optimizer has to honour, for Muon, MuonWithAuxAdamW and an optimizer whose step was replaced.

tests/test_muon.py holds what concerns Muon alone; the tests here that it has too leave Muon out.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fused_lw
from tests import optimizers
from tests.optimizers import MODULES

LR, DECAY = 0.05, 0.2


def make_model(seed: int = 0, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [(8, 16), (16, 16), (16, 8)]
    return nn.Sequential(*[nn.Linear(*size, bias=False, dtype=dtype) for size in sizes])


def make_muon(params, **options):
    return fused_lw.Muon(params, **{"lr": LR, "weight_decay": DECAY, **options})


def make_aux(params, **options):
    """The last matrix goes to AdamW."""
    named = list(params)
    groups = [{"params": named[:-1], "use_muon": True}, {"params": named[-1:], "use_muon": False}]
    lr = options.pop("lr", LR)
    own_lr = lr.clone() if isinstance(lr, Tensor) else lr
    return fused_lw.MuonWithAuxAdamW(
        groups, muon={"lr": lr, "weight_decay": DECAY, **options}, adamw={"lr": own_lr, "weight_decay": DECAY}
    )


def make_replaced(params, **options):
    return fused_lw.replace_step(torch.optim.Muon(params, **{"lr": LR, "weight_decay": DECAY, **options}))


MAKERS = {"Muon": make_muon, "MuonWithAuxAdamW": make_aux, "replaced": make_replaced}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
others = pytest.mark.parametrize("make", [make_aux, make_replaced], ids=["MuonWithAuxAdamW", "replaced"])


def set_grads(params, seed: int = 0, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * size).to(param.dtype)


def params_of(optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(params_of(optimizer), step)
        optimizer.step()


def equal(a, b) -> list[bool]:
    return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]


def clones(params) -> list[Tensor]:
    return [param.detach().clone() for param in params]


@others
def test_closure_is_called_once_with_gradients_enabled(make):
    model = make_model()
    optimizer = make(model.parameters())
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert [first, second] == calls
    assert second < first
    assert not any(param.grad_fn for param in model.parameters())


@every
def test_hooks_run_once_around_step_and_state_dicts(make):
    optimizer = make(make_model().parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("after state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: seen.append("before any step"))
    try:
        train(optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        everywhere.remove()
    assert sorted(seen[:2]) == ["before any step", "before step"]
    assert seen[2:] == ["after step", "before state_dict", "after state_dict", "before load", "after load"]


@every
def test_zero_grad(make):
    model = make_model()
    optimizer = make(model.parameters())
    set_grads(model.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@others
def test_schedulers_and_a_tensor_lr_changed_in_place(make):
    moves = []
    for lr in (0.1, torch.tensor(0.1)):
        optimizer = make(make_model().parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(optimizer, 1)
        scheduler.step()
        for group in optimizer.param_groups:
            assert float(group["lr"]) == pytest.approx(0.05)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.2)
            else:
                group["lr"] = 0.2
        before = clones(params_of(optimizer))
        train(optimizer, 1, first=1)
        moves.append([p - q for p, q in zip(params_of(optimizer), before, strict=True)])
    for a, b in zip(*moves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert float(moves[0][0].detach().norm()) > 0.2


@others
def test_add_param_group_and_names(make):
    model = make_model()
    optimizer = make(list(model.named_parameters()))
    extra = nn.Parameter(torch.ones(4, 8))
    group = {"params": [("extra", extra)], "lr": 0.5}
    optimizer.add_param_group({**group, "use_muon": True} if make is make_aux else group)
    assert [name for group in optimizer.param_groups for name in group["param_names"]] == [
        "0.weight",
        "1.weight",
        "2.weight",
        "extra",
    ]
    before = clones(params_of(optimizer))
    train(optimizer, 1)
    assert not any(equal(params_of(optimizer), before))
    with pytest.raises(ValueError, match=r"vector: Muon takes matrices"):
        bad = {"params": [("vector", nn.Parameter(torch.ones(4)))]}
        optimizer.add_param_group({**bad, "use_muon": True} if make is make_aux else bad)
    assert len(params_of(optimizer)) == 4


@others
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_step_on(make, how):
    optimizer = make(make_model().parameters())
    train(optimizer, 2)
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is type(optimizer)
    assert not set(map(id, params_of(copied))) & set(map(id, params_of(optimizer)))
    train(optimizer, 2, first=2)
    train(copied, 2, first=2)
    assert all(equal(params_of(copied), params_of(optimizer)))


def copied_cases():
    params = list(make_model().parameters())
    dion = MODULES["dion.muon"].Muon([{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}], lr=LR)
    emerging = MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon(make_model().parameters(), lr=LR)
    params = list(make_model().parameters())
    groups = [{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False}]
    aux = MODULES["muon"].SingleDeviceMuonWithAuxAdam(groups)
    return {"dion": dion, "emerging_optimizers": emerging, "kellerjordan": aux}


@pytest.mark.parametrize("name", ["dion", "emerging_optimizers", "kellerjordan"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_step_on_where_the_originals_do_not(monkeypatch, name, how):
    """Dion's and Emerging-Optimizers' keep options outside `param_groups`, which copies of an optimizer lose."""
    optimizers.install(monkeypatch)
    optimizer = fused_lw.replace_step(copied_cases()[name])
    train(optimizer, 2)
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    train(optimizer, 2, first=2)
    train(copied, 2, first=2)
    assert all(equal(params_of(copied), params_of(optimizer)))


@every
def test_load_state_dict_restores_every_option_and_keeps_extra_keys(make):
    saved = make(list(make_model().named_parameters()), momentum=0.7, nesterov=False, ns_steps=3, eps=1e-5)
    for group in saved.param_groups:
        group["my_key"] = "kept"
    torch.optim.lr_scheduler.StepLR(saved, 1)
    train(saved, 1)
    loaded = make(list(make_model(1).named_parameters()))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for group, expected in zip(loaded.param_groups, saved.param_groups, strict=True):
        assert {key: group[key] for key in expected if key != "params"} == {
            key: value for key, value in expected.items() if key != "params"
        }
        assert group["initial_lr"] == LR
        assert group["my_key"] == "kept"
    assert loaded.param_groups[0]["ns_steps"] == 3


@others
def test_loading_does_not_round_fp32_momentum_to_bf16(make):
    optimizer = make(make_model(dtype=torch.bfloat16).parameters())
    train(optimizer, 1)
    first = params_of(optimizer)[0]
    optimizer.state[first]["momentum_buffer"] = momentum = torch.full(first.shape, 1 + 2**-12)
    state = copy.deepcopy(optimizer.state_dict())
    loaded = make(make_model(dtype=torch.bfloat16).parameters())
    loaded.load_state_dict(state)
    assert torch.equal(loaded.state[params_of(loaded)[0]]["momentum_buffer"], momentum)
    train(loaded, 1)
    assert loaded.state[params_of(loaded)[0]]["momentum_buffer"].dtype == torch.float32


@others
def test_checkpoints_go_both_ways_with_torch(make):
    def all_muon(params, **options):
        if make is make_replaced:
            return make(params, **options)
        return fused_lw.MuonWithAuxAdamW([{"params": list(params), "use_muon": True}], muon=options)

    options = {"lr": LR, "weight_decay": DECAY, "nesterov": False}
    for writer, reader in ((all_muon, torch.optim.Muon), (torch.optim.Muon, all_muon)):
        first, second = writer(make_model().parameters(), **options), reader(make_model().parameters())
        train(first, 2)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for param, expected in zip(params_of(second), clones(params_of(first)), strict=True):
            param.data.copy_(expected)
        assert second.param_groups[0]["nesterov"] is False
        train(first, 2, first=2)
        train(second, 2, first=2)
        for a, b in zip(params_of(first), params_of(second), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # torch's iteration is bf16
            assert torch.equal(first.state[a]["momentum_buffer"], second.state[b]["momentum_buffer"])


@every
def test_grad_scaler_unscales_and_skips(make):
    scaled_model, plain_model = make_model(), make_model()
    scaled, plain = make(scaled_model.parameters()), make(plain_model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    for step in range(3):
        for model, optimizer in ((scaled_model, scaled), (plain_model, plain)):
            optimizer.zero_grad()
            loss = model(data).square().mean()
            if optimizer is plain:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(scaled)
                scaler.update()
        for a, b in zip(scaled_model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        if step == 1:
            before = clones(scaled_model.parameters())
            scaled.zero_grad()
            scaler.scale(scaled_model(data).square().mean() * float("inf")).backward()
            scaler.step(scaled)
            scaler.update()
            assert all(equal(scaled_model.parameters(), before))


@others
def test_gradients_are_only_read_and_a_missing_one_leaves_its_parameter(make):
    model = make_model()
    optimizer = make(model.parameters())
    params = list(model.parameters())
    set_grads(params)
    for missing in (params[1], params[2]):
        missing.grad = None
    gradient, before = params[0].grad.clone(), clones(params)
    optimizer.step()
    assert equal(params, before) == [False, True, True]
    assert torch.equal(params[0].grad, gradient)
    assert params[1] not in optimizer.state


@others
def test_zero_gradients_update_nothing_and_nan_stays_where_it_is(make):
    optimizer, clean = make(make_model().parameters()), make(make_model().parameters())
    for some in (optimizer, clean):
        for group in some.param_groups:
            group["weight_decay"] = 0.0
    params, before = params_of(optimizer), clones(params_of(optimizer))
    set_grads(params, size=0.0)
    optimizer.step()
    assert all(equal(params, before))
    set_grads(params_of(clean), size=0.0)
    clean.step()
    set_grads(params)
    set_grads(params_of(clean))
    params[0].grad[1, 2] = float("nan")
    optimizer.step()
    clean.step()
    assert params[0].isnan().any()
    assert equal(params, params_of(clean)) == [False, True, True]


@others
def test_tiny_gradients_give_an_orthogonal_update(make):
    optimizer = make(make_model().parameters(), lr=1.0, eps=1e-20)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    square = params_of(optimizer)[1]
    before = square.detach().clone()
    set_grads(params_of(optimizer), size=1e-12)
    optimizer.step()
    singular = torch.linalg.svdvals(before - square.detach())
    assert singular.max() < 1.5
    assert singular.median() > 0.5


def test_bf16_momentum_of_a_replaced_torch_muon_is_not_normalized():
    """torch.optim.Muon 2.13 without Nesterov divides a bf16 buffer itself by its norm."""
    optimizer = make_replaced(make_model(dtype=torch.bfloat16).parameters(), nesterov=False)
    train(optimizer, 1)
    for param in params_of(optimizer):
        expected = torch.zeros_like(param.grad).lerp(param.grad, 0.05)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


@every
def test_accumulated_gradients_are_orthogonalized_once(make):
    accumulated, whole = make_model(), make_model()
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    for model, chunks in ((accumulated, 4), (whole, 1)):
        optimizer = make(model.parameters())
        for part in data.chunk(chunks):
            (model(part).square().mean() / chunks).backward()
        optimizer.step()
    for a, b in zip(accumulated.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_distributed_checkpoint_state(make, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    fresh = make_model()
    optimizer = make(fresh.parameters())
    before = clones(fresh.parameters())
    empty = get_optimizer_state_dict(fresh, optimizer, options=options)
    assert all(equal(fresh.parameters(), before)), "asking for the state must not move a parameter"
    assert [group["lr"] for group in optimizer.param_groups] == [LR] * len(optimizer.param_groups)

    trained = make_model()
    writer = make(trained.parameters())
    train(writer, 3)
    saved = get_optimizer_state_dict(trained, writer, options=options)
    assert saved.keys() == empty.keys()
    if flat:
        assert {key for key in saved if key.startswith("state.0.weight")} == {"state.0.weight.momentum_buffer"}
    set_optimizer_state_dict(fresh, optimizer, copy.deepcopy(saved), options=options)  # the tensors are shared
    fresh.load_state_dict(trained.state_dict())
    train(writer, 2, first=3)
    train(optimizer, 2, first=3)
    assert all(equal(fresh.parameters(), trained.parameters()))


@every
def test_inside_a_compiled_training_step(make):
    compiled_model, plain_model = make_model(), make_model()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))

    def training_step(model, optimizer):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(training_step, backend="eager")
    optimizer, plain = make(compiled_model.parameters()), make(plain_model.parameters())
    losses = [compiled(compiled_model, optimizer) for _ in range(3)]
    expected = [training_step(plain_model, plain) for _ in range(3)]
    torch.testing.assert_close(losses, expected)
    for a, b in zip(compiled_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
