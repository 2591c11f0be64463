"""replace_step: optimizers of other libraries go on as if nothing had happened, or are refused and left alone."""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import fused_lw
from fused_lw import rules
from fused_lw.plain import plain_newton_schulz
from tests import optimizers
from tests.optimizers import MODULES, Iteration

SHAPES = [(48, 96), (96, 48), (64, 64), (48, 96), (7, 13)]
AUX_SHAPES = [(16,), (24, 8)]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    optimizers.install(monkeypatch)

    def newton_schulz(grad, ns_coefficients, ns_steps, eps):
        return plain_newton_schulz(grad.to(Iteration.dtype), ns_coefficients, ns_steps, eps)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)


def make_params(shapes=SHAPES, seed=0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def two_groups(params: list[torch.nn.Parameter], **second) -> list[dict]:
    return [{"params": params[:3], "lr": 0.02}, {"params": params[3 : len(SHAPES)], "lr": 0.01, **second}]


def torch_muon(params, aux, **options):
    return torch.optim.Muon(two_groups(params, adjust_lr_fn="match_rms_adamw", nesterov=False), **options)


def keller_jordan(name):
    def build(params, aux):
        cls = getattr(MODULES["muon"], name)
        if "Aux" not in name:
            return cls(two_groups(params), weight_decay=0.2)
        muon = [{**group, "use_muon": True, "weight_decay": 0.2} for group in two_groups(params)]
        return cls([{"params": aux, "use_muon": False, "weight_decay": 0.1}, *muon])

    return build


def moonlight(params, aux):
    optimizer = MODULES["toy_train"].Muon(lr=0.02, wd=0.2, muon_params=params, adamw_params=aux)
    optimizer.add_param_group({"params": (more := make_params([(48, 96)], seed=7)), "lr": 0.01, "nesterov": False})
    optimizer.state[more[0]]["use_muon"] = True
    return optimizer


def dion(flatten=False, **options):
    def build(params, aux):
        groups = two_groups(params, adjust_lr="rms_norm", weight_decay=0.2, nesterov=True)
        groups.append({"params": aux[:1], "algorithm": "lion", "lr": 1e-3})
        groups.append({"params": aux[1:], "algorithm": "adamw", "lr": 1e-3})
        (qkv, heads, experts) = make_params([(40, 24), (40, 24), (3, 16, 24)], seed=8)
        groups.append({"params": [qkv], "split_sizes": [16, 16, 8], "lr": 0.02})
        groups.append({"params": [heads], "num_heads": 4, "lr": 0.02, "adjust_lr": None})
        groups.append({"params": [experts], "flatten": flatten, "lr": 0.02})
        return MODULES["dion.muon"].Muon(groups, **options)

    return build


def emerging(**options):
    def build(params, aux):
        cls = MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon
        return cls(two_groups(params, weight_decay=0.2), **options)

    return build


def megatron(params, aux):
    cls = MODULES["megatron.core.optimizer.emerging_optimizers"].TensorParallelMuon
    qkv = make_params([(32, 24)], seed=9)
    groups = [*two_groups(params, weight_decay=0.2), {"params": qkv}]
    return cls(
        groups, split_qkv=True, is_qkv_fn=lambda p: p is qkv[0], qkv_split_shapes=[4, 2, 2], scale_mode="spectral"
    )


CASES = {
    "torch": torch_muon,
    "keller_jordan-Muon": keller_jordan("Muon"),
    "keller_jordan-SingleDeviceMuon": keller_jordan("SingleDeviceMuon"),
    "keller_jordan-MuonWithAuxAdam": keller_jordan("MuonWithAuxAdam"),
    "keller_jordan-SingleDeviceMuonWithAuxAdam": keller_jordan("SingleDeviceMuonWithAuxAdam"),
    "moonlight": moonlight,
    "dion-polar_express": dion(weight_decay=0.1),
    "dion-quintic": dion(use_polar_express=False, flatten=True),
    "emerging-quintic": emerging(),
    "emerging-polar_express": emerging(
        coefficient_type="polar_express", num_ns_steps=7, nesterov=True, scale_mode="unit_rms_norm"
    ),
    "emerging-simple": emerging(coefficient_type="simple", scale_mode="shape_scaling", extra_scale_factor=0.2),
    "megatron": megatron,
}


def build(case: str) -> torch.optim.Optimizer:
    return CASES[case](make_params(), make_params(AUX_SHAPES, seed=1))


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(optimizer, steps: int, first: int = 0, scheduler=None) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params_of(optimizer):
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def run(case: str, *, swap: bool, **overrides) -> torch.optim.Optimizer:
    """5 steps of the original, then 20 more, swapped or not, under a scheduler that was made before."""
    optimizer = build(case)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    train(optimizer, 5, scheduler=scheduler)
    if swap:
        assert fused_lw.replace_step(optimizer, **overrides) is optimizer
    train(optimizer, 20, first=5, scheduler=scheduler)
    return optimizer


def distances(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> list[float]:
    pairs = zip(params_of(a), params_of(b), strict=True)
    return [float((p - q).detach().double().norm() / q.detach().double().norm()) for p, q in pairs]


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_after_the_swap_equal_twenty_of_the_original(case):
    ours, original = run(case, swap=True), run(case, swap=False)
    assert max(distances(original, build(case))) > 0.01, "the parameters moved"
    assert max(distances(ours, original)) < 2e-5
    for p, q in zip(params_of(ours), params_of(original), strict=True):
        assert ours.state[p].keys() == original.state[q].keys()
        for key, value in original.state[q].items():
            torch.testing.assert_close(ours.state[p][key], value, rtol=1e-5, atol=1e-5)
    for group, theirs in zip(ours.param_groups, original.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_size_of_eps_are_divided_as_the_original_divides(case):
    moves = []
    for swap in (True, False):
        optimizer = build(case)
        for group in optimizer.param_groups:
            group["wd" if "wd" in group else "weight_decay"] = 0.0
        if swap:
            fused_lw.replace_step(optimizer)
        before = [param.detach().clone() for param in params_of(optimizer)]
        for param in params_of(optimizer):
            param.grad = torch.full_like(param, 2e-8).cumsum(-1).sin() / 50  # norms about 1e-8, of rank one
        optimizer.step()
        moves.append([p.detach() - b for p, b in zip(params_of(optimizer), before, strict=True)])
    for ours, theirs in zip(*moves, strict=True):
        assert float((ours - theirs).norm()) <= 1e-3 * float(theirs.norm())


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize(
    "case",
    ["torch", "keller_jordan-SingleDeviceMuon", "moonlight", "dion-polar_express", "emerging-quintic", "megatron"],
)
def test_half_precision_is_as_near_to_float32_as_the_original_in_bf16(monkeypatch, case, precision):
    exact = run(case, swap=False)
    ours = run(case, swap=True, precision=precision, algorithm="standard")
    monkeypatch.setattr(Iteration, "dtype", torch.bfloat16)
    original = run(case, swap=False)
    for mine, theirs in zip(distances(ours, exact), distances(original, exact), strict=True):
        assert mine <= theirs


def test_only_the_step_of_this_object_changes():
    optimizer, other = build("torch"), build("torch")
    state, groups = optimizer.state, optimizer.param_groups
    train(optimizer, 1)
    momenta = [optimizer.state[param]["momentum_buffer"] for param in params_of(optimizer)]
    fused_lw.replace_step(optimizer)
    train(optimizer, 1)
    assert isinstance(optimizer, torch.optim.Muon)
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert all(optimizer.state[p]["momentum_buffer"] is m for p, m in zip(params_of(optimizer), momenta, strict=True))
    assert type(other) is torch.optim.Muon
    assert fused_lw.restore_step(optimizer) is optimizer
    assert type(optimizer) is torch.optim.Muon
    with pytest.raises(ValueError, match="was not replaced"):
        fused_lw.restore_step(optimizer)


def test_restored_steps_are_the_originals_to_the_bit():
    ours, original = build("torch"), build("torch")
    scheduler = LambdaLR(ours, lambda step: 0.9**step)
    train(ours, 2)
    fused_lw.restore_step(fused_lw.replace_step(ours))
    for some, schedule in ((ours, scheduler), (original, LambdaLR(original, lambda step: 0.9**step))):
        if some is original:
            train(some, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(some, 2, first=2, scheduler=schedule)
    assert distances(ours, original) == [0.0] * len(SHAPES)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_do_not_warn(when):
    optimizer = build("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if when == "before":
            scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        fused_lw.replace_step(optimizer)
        if when == "after":
            scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        train(optimizer, 3, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 / 8)


def test_a_parameter_without_gradient_is_skipped_where_the_original_decays_it():
    optimizer = fused_lw.replace_step(build("keller_jordan-SingleDeviceMuon"))
    params = params_of(optimizer)
    before = [param.detach().clone() for param in params]
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [True, False, True, True, True]
    assert torch.equal(params[1].grad, torch.ones_like(params[1])), "gradients are only read"


def test_overrides_reach_the_engine(monkeypatch):
    seen = []
    optimizer = fused_lw.replace_step(build("torch"), precision="bf16", algorithm="gram", max_scratch_bytes=10)
    monkeypatch.setattr(
        "fused_lw.rules.step_groups", lambda groups, rules, state, updater: seen.append((rules, updater))
    )
    train(optimizer, 1)
    ((rules, updater),) = seen
    assert {(rule.precision, rule.ns.algorithm) for rule in rules} == {("bf16", "gram")}
    assert updater.max_scratch_bytes == 10


def test_a_copy_of_known_code_under_another_name():
    class MyMuon(MODULES["muon"].SingleDeviceMuon):
        pass

    params = make_params()
    with pytest.raises(ValueError, match=r"MyMuon is not known: if it is a copy .* kellerjordan"):
        fused_lw.replace_step(MyMuon(two_groups(params)))
    ours = fused_lw.replace_step(MyMuon(two_groups(params)), like="kellerjordan")
    original = MODULES["muon"].SingleDeviceMuon(two_groups(make_params()))
    train(ours, 3)
    train(original, 3)
    assert max(distances(ours, original)) < 2e-5


def test_a_rule_for_a_class_of_ones_own(monkeypatch):
    monkeypatch.setattr(rules, "_BY_NAME", dict(rules._BY_NAME))
    monkeypatch.setattr(rules, "_BY_CLASS", dict(rules._BY_CLASS))

    class SignedDecay(torch.optim.SGD):
        """SGD with orthogonalized momentum: what a user might have."""

    SignedDecay.__module__, SignedDecay.__qualname__ = "my_project.optim", "MyMuon"

    @fused_lw.register_rule("my_project.optim.MyMuon")
    class MyRule(fused_lw.StepRule):
        name = "my_project"
        ema = False

        def group_rule(self, optimizer, group):
            return fused_lw.MatrixRule(
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                scale=lambda rows, cols: 1.0,
                ns=fused_lw.ns_rule("quintic", steps=5, eps=1e-7),
                ema=False,
            )

    ours = fused_lw.replace_step(SignedDecay(make_params(), lr=0.02, momentum=0.9, weight_decay=0.1))
    dion = MODULES["dion.muon"].Muon(
        make_params(), lr=0.02, mu=0.9, weight_decay=0.1, adjust_lr=None, use_polar_express=False
    )
    train(ours, 3)
    train(dion, 3)
    assert max(distances(ours, dion)) < 2e-5
    assert "momentum_buffer" in ours.state[params_of(ours)[0]]


def older_emerging(params, **groups):
    """Its first versions keep everything but the closure's variables in the groups."""
    scale_mode, extra_scale_factor, num_ns_steps, coefficient_type = "spectral", 0.5, 5, "simple"

    def scaled_orthogonalize_fn(grad):
        factor = optimizers.newton_schulz(grad, num_ns_steps, coefficient_type)
        return factor * optimizers.SCALES[scale_mode](*grad.shape) * extra_scale_factor

    optimizer = torch.optim.Optimizer.__new__(MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon)
    options = {"lr": 0.02, "momentum_beta": 0.9, "weight_decay": 0.1, "use_nesterov": True}
    torch.optim.Optimizer.__init__(optimizer, params, {**options, **groups})
    optimizer.fp32_matmul_prec = "medium"
    optimizer.scaled_orthogonalize_fn = scaled_orthogonalize_fn
    return optimizer


def test_a_version_that_keeps_its_options_elsewhere_is_read_there():
    ours = fused_lw.replace_step(older_emerging(make_params(), use_decoupled_weight_decay=True))
    newer = MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon(
        make_params(), 0.02, 0.9, 0.1, nesterov=True, coefficient_type="simple", extra_scale_factor=0.5
    )
    train(ours, 3)
    train(newer, 3)
    assert max(distances(ours, newer)) < 2e-5
    with pytest.raises(ValueError, match="does not say how it decays weights"):
        fused_lw.replace_step(older_emerging(make_params()))
    with pytest.raises(ValueError, match="'l2'"):
        fused_lw.replace_step(older_emerging(make_params(), use_decoupled_weight_decay=False))
    with pytest.raises(ValueError, match="'independent'"):
        fused_lw.replace_step(older_emerging(make_params(), use_decoupled_wd=True, use_independent_wd=True))
    closed = older_emerging(make_params(), use_decoupled_weight_decay=True)
    closed.scaled_orthogonalize_fn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"does not say its coefficient_type.*register_rule"):
        fused_lw.replace_step(closed)


# Bad input: refused with the reason, and left alone


def custom_iteration(X, epsilon):
    return X


def refused_cases():
    emerging_class = "emerging_optimizers.orthogonalized_optimizers.muon"

    def emerging_muon(params, **options):
        return MODULES[emerging_class].Muon(params, **options)

    def dion_muon(params, **options):
        return MODULES["dion.muon"].Muon(params, **options)

    def megatron_muon(params, **options):
        return MODULES["megatron.core.optimizer.emerging_optimizers"].TensorParallelMuon(params, **options)

    def tensor_parallel():
        group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        params = make_params()
        params[0].partition_dim = 0
        return megatron_muon(params, pg_collection=types.SimpleNamespace(tp=group, expt_tp=group, gtp_remat=None))

    def fp16(make):
        return lambda: make([torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float16))])

    def later(make, **attributes):
        def build():
            optimizer = make(make_params())
            for name, value in attributes.items():
                setattr(optimizer, name, value)
            return optimizer

        return build

    class Hyperball:
        pass

    def older_keller_jordan():
        optimizer = MODULES["muon"].Muon(make_params())
        optimizer.defaults["ns_steps"] = 5
        return optimizer

    def dtensor():
        params = make_params()
        params[1].device_mesh = "what a DTensor has"
        return torch.optim.Muon([{"params": params[:1]}, {"params": params[1:]}])

    return {
        "DTensor": (dtensor, r"parameter 0 of group 1 .* is a DTensor.*LayerWiseMuon"),
        "fused_lw's own": (lambda: fused_lw.Muon(make_params()), r"fused_lw\.muon\.Muon steps by fused_lw already"),
        "unknown class": (
            lambda: torch.optim.SGD(make_params(), lr=0.1),
            r"torch\.optim\.sgd\.SGD is not known.*like=.*register_rule",
        ),
        "KellerJordan of another version": (older_keller_jordan, r"option 'ns_steps'.*register_rule"),
        "KellerJordan convolution": (
            lambda: MODULES["muon"].Muon([torch.nn.Parameter(torch.ones(8, 4, 3, 3))]),
            r"\(8, 4, 3, 3\).*sides of the kernel.*fused_lw\.Muon",
        ),
        "Dion over a mesh": (
            lambda: dion_muon(make_params(), distributed_mesh=object()),
            r"distributed_mesh.*LayerWiseMuon",
        ),
        "Dion with an iteration of its own": (
            lambda: dion_muon(make_params(), newton_schulz_func=custom_iteration),
            r"newton_schulz_func='custom_iteration'.*register_rule",
        ),
        "Dion with cautious decay": (lambda: dion_muon(make_params(), cautious_wd=True), "cautious_wd.*switch it off"),
        "Emerging with a hook": (
            lambda: emerging_muon(make_params(), weight_update_hook=Hyperball()),
            "weight_update_hook Hyperball.*without the hook",
        ),
        "Emerging with independent decay": (
            lambda: emerging_muon(make_params(), weight_decay_method="independent"),
            "'independent'.*weight_decay_method='decoupled'",
        ),
        "Emerging with a replaced method": (
            later(emerging_muon, orthogonalize=lambda p, grad: grad),
            "orthogonalize was replaced",
        ),
        "Emerging in fp16": (fp16(emerging_muon), r"torch\.float16.*float32 matrices.*master weights"),
        "Megatron in fp16": (fp16(megatron_muon), r"torch\.float16.*float32 matrices.*master weights"),
        "Megatron with tensor parallelism": (tensor_parallel, r"partition_dim=0.*2 ranks.*blockwise"),
        "a step replaced by others": (
            later(torch.optim.Muon, step=lambda closure=None: None),
            "method step .* was replaced",
        ),
        "complex": (
            lambda: torch.optim.Muon([torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))]),
            "complex64",
        ),
    }


@pytest.mark.parametrize("kind", refused_cases())
def test_what_has_no_counterpart_is_refused_and_left_alone(kind):
    make, message = refused_cases()[kind]
    optimizer = make()
    cls, attributes = type(optimizer), dict(vars(optimizer))
    groups = copy.copy(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=message):
        fused_lw.replace_step(optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer) == attributes
    assert optimizer.param_groups[0].items() == groups.items()
    assert not optimizer.state


def test_moonlight_parameter_without_its_flag_is_refused():
    optimizer = MODULES["toy_train"].Muon(muon_params=make_params(), adamw_params=[])
    fused_lw.replace_step(optimizer)
    with pytest.raises(ValueError, match="no flag 'use_muon'"):
        optimizer.add_param_group({"params": make_params()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", ["keller_jordan", "moonlight", "megatron"])
def test_messages_count_the_groups_of_the_optimizer(kind):
    params, last = make_params(), make_params([(8, 8), (4, 4)])
    if kind == "keller_jordan":  # a group before these is Adam's
        aux = {"params": make_params(AUX_SHAPES), "use_muon": False}
        groups = [aux, {"params": params, "use_muon": True}, {"params": last, "use_muon": True}]
        optimizer, where = MODULES["muon"].SingleDeviceMuonWithAuxAdam(groups), "parameter 1 of group 2"
    elif kind == "moonlight":  # parameters before it in its group are Adam's
        optimizer = MODULES["toy_train"].Muon(muon_params=last, adamw_params=[])
        optimizer.param_groups[0]["params"] = (aux := make_params(AUX_SHAPES)) + last
        optimizer.state.update({param: {"use_muon": False} for param in aux})
        where = f"parameter {len(aux) + 1} of group 0"
    else:  # a parameter before it is staged
        qkv = make_params([(12, 8)])
        optimizer = MODULES["megatron.core.optimizer.emerging_optimizers"].TensorParallelMuon(
            [{"params": params}, {"params": qkv + last}],
            split_qkv=True,
            is_qkv_fn=lambda param: param is qkv[0],
            qkv_split_shapes=[2, 1, 1],
        )
        where = "parameter 2 of group 1"
    fused_lw.replace_step(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    last[1].grad = last[1].grad.to_sparse()
    with pytest.raises(ValueError, match=f"^{where} of shape"):
        optimizer.step()


def test_arguments_are_refused_by_name():
    optimizer = build("torch")
    for name in ("backend", "algorithm", "precision"):
        with pytest.raises(ValueError, match=name):
            fused_lw.replace_step(optimizer, **{name: "no such"})
    with pytest.raises(ValueError, match="unknown rule 'no such'"):
        fused_lw.replace_step(optimizer, like="no such")
    with pytest.raises(TypeError, match="Linear"):
        fused_lw.replace_step(torch.nn.Linear(2, 2))
    fused_lw.replace_step(optimizer)
    with pytest.raises(ValueError, match="replaced already"):
        fused_lw.replace_step(optimizer)
    with pytest.raises(TypeError, match="subclass of StepRule"):
        fused_lw.register_rule("some.Class")(object)


def test_a_wrapper_is_told_from_what_it_wraps():
    class Wrapper(torch.optim.SGD):
        pass

    wrapper = Wrapper(make_params(), lr=0.1)
    wrapper.optimizer = build("torch")
    with pytest.raises(ValueError, match=r"wraps another optimizer.*'optimizer'"):
        fused_lw.replace_step(wrapper)
