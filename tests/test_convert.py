"""convert_state: training goes on in another optimizer as if its momentum had always been kept there."""

from __future__ import annotations

import copy

import pytest
import torch

import fused_lw
from fused_lw import convert_state
from fused_lw.rules import rule_names
from tests import optimizers
from tests.optimizers import MODULES

SHAPES = [(16, 32), (32, 16), (8, 8)]
LR, MU, DECAY = 0.02, 0.9, 0.1


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    optimizers.install(monkeypatch)


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


# One rule in four libraries: quintic schedule, no Nesterov, sqrt(rows / cols).
def ours(params):
    options = {"lr": LR, "momentum": MU, "weight_decay": DECAY, "nesterov": False, "ns_coefficients": "quintic"}
    return fused_lw.Muon(params, **options, adjust_lr_fn="original")


def dion(params):
    options = {"lr": LR, "mu": MU, "weight_decay": DECAY, "use_polar_express": False}
    return MODULES["dion.muon"].Muon(params, **options)


def emerging(params):
    options = {"lr": LR, "momentum": MU, "weight_decay": DECAY, "scale_mode": "unit_rms_norm"}
    return MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon(params, **options)


def emerging_replaced(params):
    return fused_lw.replace_step(emerging(params))


def aux(params):
    groups = [{"params": params, "use_muon": True}, {"params": [torch.nn.Parameter(torch.ones(4))], "use_muon": False}]
    return fused_lw.MuonWithAuxAdamW(groups, muon={"momentum": MU})


def moonlight(params, adamw_params=None):
    return MODULES["toy_train"].Muon(muon_params=params, momentum=MU, adamw_params=adamw_params)


def train(optimizer, steps: int, first: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    ("before", "after"),
    [(dion, emerging), (emerging, dion), (dion, emerging_replaced), (emerging_replaced, dion)],
    ids=["sum to average", "average to sum", "sum to replaced", "replaced to sum"],
)
@pytest.mark.parametrize("given", ["optimizer", "state dict"])
def test_training_goes_on_in_another_optimizer(before, after, given):
    params, straight_params = make_params(), make_params()
    first, straight = before(params), before(straight_params)
    train(first, 4)
    train(straight, 8)
    kind = "dion" if before is dion else "emerging_optimizers"
    second = after(params)
    source = copy.deepcopy(first.state_dict()) if given == "state dict" else first
    second.load_state_dict(convert_state(source, second, came_from=kind if given == "state dict" else None))
    assert second.param_groups[0]["weight_decay"] == DECAY
    train(second, 4, first=4)
    for a, b in zip(params, straight_params, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    (key,) = {key for entries in second.state.values() for key in entries}
    assert key == ("momentum" if after is dion else "momentum_buffer")


def test_a_named_kind_converts_the_momenta_and_nothing_else():
    params = make_params()
    first = dion(params)
    train(first, 4)
    momentum = first.state[params[0]]["momentum"]
    converted = convert_state(first, "fused_lw")
    torch.testing.assert_close(converted["state"][0]["momentum_buffer"], momentum * (1 - MU))
    assert first.state[params[0]] == {"momentum": momentum}, "the source is left as it is"
    assert converted["param_groups"] == first.state_dict()["param_groups"]
    back = convert_state(converted, "dion", came_from="fused_lw")
    assert back["state"][0].keys() == {"momentum"}
    torch.testing.assert_close(back["state"][0]["momentum"], momentum)


@pytest.mark.parametrize("kind", ["fused_lw", *rule_names()])
@pytest.mark.parametrize("algorithm", ["auto", "standard", "gram"])
@pytest.mark.parametrize("make", [ours, aux])
def test_from_ours_to_every_kind_and_back(make, algorithm, kind):
    params = make_params()
    first = make(params)
    first.param_groups[0]["algorithm"] = algorithm
    train(first, 3)
    source = first.state_dict()["state"]
    there = convert_state(first, kind)
    key, factor = ("momentum_buffer", 1.0) if kind == "fused_lw" else _key_and_factor(kind)
    for number in range(len(SHAPES)):
        assert there["state"][number].keys() == {key, *(["use_muon"] if kind == "moonlight" else [])}
        torch.testing.assert_close(there["state"][number][key], source[number]["momentum_buffer"] * factor)
    back = convert_state(there, first, came_from=kind)
    assert back["state"].keys() == source.keys()
    for number, entries in source.items():
        torch.testing.assert_close(back["state"][number], entries)
    assert back["param_groups"] == first.state_dict()["param_groups"]


def _key_and_factor(kind: str) -> tuple[str, float]:
    return {"dion": ("momentum", 1 / (1 - MU)), "moonlight": ("momentum_buffer", 1 / (1 - MU))}.get(
        kind, ("momentum_buffer", 1.0)
    )


def test_moonlight_keeps_the_flags_of_its_parameters():
    params, others = make_params(), [torch.nn.Parameter(torch.ones(4))]
    source = aux(params)
    train(source, 2)
    target = moonlight(params, others)
    target.load_state_dict(convert_state(source, target))
    assert [target.state[param]["use_muon"] for param in params + others] == [True, True, True, False]
    for param in params:
        expected = source.state[param]["momentum_buffer"] / (1 - MU)
        torch.testing.assert_close(target.state[param]["momentum_buffer"], expected)
    # One that was never stepped is nothing but its flag, which means nothing elsewhere.
    assert convert_state(moonlight(params), "fused_lw")["state"] == {}
    assert convert_state(moonlight(params, others), "moonlight")["state"][3] == {"use_muon": False}


def test_groups_with_another_algorithm_are_passed_on():
    params = make_params()
    adamw = {"params": [torch.nn.Parameter(torch.ones(4))], "algorithm": "adamw"}
    optimizer = MODULES["dion.muon"].Muon([{"params": params}, adamw])
    train(optimizer, 2)
    converted = convert_state(optimizer, "torch")["state"]
    assert converted[0].keys() == {"momentum_buffer"}
    assert converted[len(SHAPES)].keys() == {"momentum", "variance"}
    assert torch.equal(converted[len(SHAPES)]["momentum"], optimizer.state[adamw["params"][0]]["momentum"])


def test_parameters_are_matched_by_name_where_both_have_names():
    names = ["a", "b", "c"]
    params = make_params()
    first = dion(list(zip(names, params, strict=True)))
    train(first, 2)
    second = ours(list(zip(names, params, strict=True))[::-1])
    second.load_state_dict(convert_state(first, second))
    for param in params:
        expected = first.state[param]["momentum"] * (1 - MU)
        torch.testing.assert_close(second.state[param]["momentum_buffer"], expected)
    with pytest.raises(ValueError, match="no parameter called 'd'"):
        convert_state(first, ours(list(zip(["a", "b", "d"], make_params(), strict=True))))


def test_what_cannot_be_converted_is_refused():
    params = make_params()
    first = dion(params)
    train(first, 1)
    with pytest.raises(ValueError, match="came_from="):
        convert_state(first.state_dict(), "torch")
    with pytest.raises(ValueError, match="unknown kind of optimizer 'adam'"):
        convert_state(first, "adam")
    with pytest.raises(ValueError, match=r"SGD is not known"):
        convert_state(first, torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match="of 3 parameters and Muon has 2"):
        convert_state(first, ours(params[:2]))
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(8, 8\).*\(16, 32\).*different orders"):
        convert_state(first, ours(params[::-1]))
    first.param_groups[0]["mu"] = 1.0
    with pytest.raises(ValueError, match=r"mu=1\.0"):
        convert_state(first, "torch")
