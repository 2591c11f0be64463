"""fused_lw.Muon against torch.optim.Muon, its contract, and what it does with bad input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import fused_lw
from fused_lw import update as update_module
from fused_lw.kernels.device import interpreting
from fused_lw.plain import PlainMuon, plain_newton_schulz

SHAPES = [(64, 64), (48, 96), (96, 48), (7, 13), (1, 9), (9, 1), (102, 768)]
JORDAN = (3.4445, -4.7750, 2.0315)


@pytest.fixture
def exact_torch(monkeypatch):
    """torch.optim.Muon's own code, with the iteration in float64 instead of bf16."""

    def newton_schulz(grad, ns_coefficients, ns_steps, eps):
        return plain_newton_schulz(grad.double(), ns_coefficients, ns_steps, eps).float()

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    return torch.optim.Muon


def make_params(shapes=SHAPES, dtype=torch.float32, seed=0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * size).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ten_steps_equal_torch(exact_torch, dtype, nesterov, adjust_lr_fn, weight_decay):
    options = {"lr": 0.05, "weight_decay": weight_decay, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    start = [param.detach().clone() for param in ours]
    ours_optimizer, torch_optimizer = fused_lw.Muon(ours, **options), exact_torch(theirs, **options)
    train(ours_optimizer, 10)
    train(torch_optimizer, 10)
    flipped = 0
    for a, b, p in zip(ours, theirs, start, strict=True):
        assert distance(p, b) > 1e-3, "the steps moved the parameter"
        assert torch.equal(ours_optimizer.state[a]["momentum_buffer"], torch_optimizer.state[b]["momentum_buffer"])
        if dtype == torch.float32:
            assert distance(a, b) < 1e-5
        else:
            # An update that lies between two bf16 numbers, nearer to the middle than float32 resolves, may round
            # either way. Such elements are rare; all others are equal to the bit.
            flipped += int((a != b).sum())
            assert ((a - b).abs() <= 2**-7 * torch.maximum(a.abs(), p.abs())).all(), "to a neighbouring number"
            assert distance(a, b) < 1e-4
    assert flipped <= sum(param.numel() for param in ours) // 5000


def test_momentum_and_gradients_are_torchs_to_the_bit(exact_torch):
    ours, theirs = make_params(), make_params()
    ours_optimizer, torch_optimizer = fused_lw.Muon(ours), exact_torch(theirs)
    train(ours_optimizer, 3)
    train(torch_optimizer, 3)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(ours_optimizer.state[a]["momentum_buffer"], torch_optimizer.state[b]["momentum_buffer"])
        assert torch.equal(a.grad, b.grad), "gradients are only read"


def test_bf16_momentum_without_nesterov_is_not_normalized_in_place():
    """torch.optim.Muon 2.13 divides the buffer itself by its norm when the parameter is bf16."""
    (param,) = make_params([(16, 32)], torch.bfloat16)
    optimizer = fused_lw.Muon([param], nesterov=False)
    set_grads([param], 0)
    optimizer.step()
    expected = torch.zeros_like(param.grad).lerp(param.grad, 0.05)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_triton_backend_agrees_with_torch_backend(dtype, nesterov):
    """The whole step through Triton's interpreter."""
    assert torch.cuda.is_available() or interpreting()
    shapes = [(32, 32), (24, 40), (40, 24), (7, 13), (1, 9), (9, 1), (3, 20, 30)]
    options = {"lr": 0.05, "weight_decay": 0.5, "nesterov": nesterov, "precision": "fp32"}
    results = {}
    for backend in ("torch", "triton"):
        params = make_params(shapes, dtype)
        train(fused_lw.Muon(params, backend=backend, **options), 3)
        results[backend] = params
    for a, b in zip(results["triton"], results["torch"], strict=True):
        if dtype == torch.float32:
            assert distance(a, b) < 1e-5
        else:
            # A bf16 momentum that rounds the other way (torch's CPU kernel fuses multiply and add, the interpreter
            # does not) moves the whole update by a little, and a few elements of the parameter across a border.
            assert (a != b).sum() <= a.numel() // 50 + 1
            assert distance(a, b) < 1e-3


@pytest.mark.parametrize("precision", ["mixed", "fp16", "bf16"])
def test_low_precision_agrees_between_backends(precision):
    """Each precision rounds in the same places on both backends; what is left is the order of sums."""
    shapes = [(32, 32), (24, 72), (40, 24)]
    results = {}
    for backend in ("torch", "triton"):
        params = make_params(shapes)
        train(fused_lw.Muon(params, lr=0.5, weight_decay=0.0, backend=backend, precision=precision), 2)
        results[backend] = params
    exact = make_params(shapes)
    train(fused_lw.Muon(exact, lr=0.5, weight_decay=0.0, backend="torch", precision="fp32"), 2)
    start = make_params(shapes)
    for a, b, c, p in zip(results["triton"], results["torch"], exact, start, strict=True):
        moved = float((c - p).detach().norm())
        assert float((a - b).detach().norm()) < (0.02 if precision == "bf16" else 0.002) * moved
        assert float((a - c).detach().norm()) < 0.03 * moved
        assert float((b - c).detach().norm()) < 0.03 * moved


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_batch_per_oriented_shape_whatever_the_group(monkeypatch, backend):
    batches = []
    prepare = update_module.prepare

    def counting(problems, rule, **kwargs):
        orthogonalize = prepare(problems, rule, **kwargs)

        def counted():
            batches.extend(tuple(problem.X.shape) for problem in problems)
            return orthogonalize()

        return counted

    monkeypatch.setattr(update_module, "prepare", counting)
    params = make_params([(8, 16), (16, 8), (8, 16), (16, 16), (5, 8, 16), (16, 4, 2, 2), (16, 16)])
    groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "momentum": 0.5, "nesterov": False}]
    optimizer = fused_lw.Muon(groups, backend=backend)
    set_grads(params, 0)
    optimizer.step()
    assert sorted(batches) == [(3, 16, 16), (8, 8, 16)]


def test_groups_keep_their_own_options():
    shapes = [(8, 16), (16, 8), (8, 16)]
    together = make_params(shapes)
    groups = [
        {"params": [together[0]], "lr": 0.1, "weight_decay": 0.0, "nesterov": False},
        {"params": [together[1]], "lr": 0.2, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"},
        {"params": [together[2]], "ns_steps": 3, "ns_coefficients": "quintic"},
    ]
    train(fused_lw.Muon(groups), 3)
    for index, group in enumerate(groups):
        apart = make_params(shapes)
        optimizer = fused_lw.Muon([{**group, "params": [apart[index]]}])
        for step in range(3):
            set_grads(apart, step)
            optimizer.step()
        assert torch.equal(together[index], apart[index])


def test_stacked_experts_convolutions_and_split_rows_are_the_matrices_they_hold():
    experts, conv, qkv = make_params([(3, 8, 16), (8, 4, 3, 3), (24, 8)])
    groups = [{"params": [experts, conv]}, {"params": [qkv], "split_rows": (8, 12, 4)}]
    for param in (experts, conv, qkv):
        set_grads([param], 0)
    blocks = qkv.detach().clone().split((8, 12, 4))
    pieces = [*experts.detach().clone(), conv.detach().clone().flatten(1), *blocks]
    gradients = [*experts.grad, conv.grad.flatten(1), *qkv.grad.split((8, 12, 4))]
    plain = [torch.nn.Parameter(piece) for piece in pieces]
    for param, grad in zip(plain, gradients, strict=True):
        param.grad = grad.clone()
    fused_lw.Muon(groups).step()
    fused_lw.Muon(plain).step()
    got = [*experts, conv.flatten(1), *qkv.split((8, 12, 4))]
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("channels_last_grad", [True, False])
def test_channels_last_convolution_equals_the_contiguous_one(backend, channels_last_grad):
    (plain,) = make_params([(8, 4, 3, 3)])
    last = torch.nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    set_grads([plain], 0)
    last.grad = plain.grad.clone(memory_format=torch.channels_last if channels_last_grad else torch.contiguous_format)
    for param in (plain, last):
        fused_lw.Muon([param], lr=0.1, backend=backend).step()
    torch.testing.assert_close(last, plain)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_scratch_bound_is_kept_and_changes_nothing():
    shapes = [(32, 64)] * 6 + [(64, 64)] * 3
    free, bounded = make_params(shapes), make_params(shapes)
    train(fused_lw.Muon(free), 2)
    bound = 100_000
    optimizer = fused_lw.Muon(bounded, max_scratch_bytes=bound)
    train(optimizer, 2)
    assert len(optimizer._updater._chunks) > 2, "the step was cut"
    assert all(scratch.numel() <= bound for scratch in optimizer._updater._scratch.values())
    for a, b in zip(free, bounded, strict=True):
        assert torch.equal(a, b)


# The contract of a torch optimizer


def test_grad_none_leaves_the_parameter_untouched():
    params = make_params([(8, 16), (8, 16)])
    optimizer = fused_lw.Muon(params, weight_decay=0.5)
    set_grads(params[:1], 0)
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_zero_gradient_gives_zero_update(backend):
    (param,) = make_params([(8, 16)])
    before = param.detach().clone()
    param.grad = torch.zeros_like(param)
    fused_lw.Muon([param], weight_decay=0.0, backend=backend).step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nan_stays_in_its_matrix(backend):
    params, clean = make_params([(8, 16)] * 3), make_params([(8, 16)] * 3)
    set_grads(params, 0)
    set_grads(clean, 0)
    params[1].grad[2, 3] = float("nan")
    for some in (params, clean):
        fused_lw.Muon(some, backend=backend).step()
    assert params[1].isnan().any()
    assert torch.equal(params[0], clean[0])
    assert torch.equal(params[2], clean[2])


def test_tiny_gradients_still_give_an_orthogonal_update():
    (param,) = make_params([(8, 16)])
    before = param.detach().clone()
    set_grads([param], 0, size=1e-12)
    fused_lw.Muon([param], lr=1.0, weight_decay=0.0, eps=1e-20).step()
    singular = torch.linalg.svdvals(before - param.detach())
    assert 0.5 < singular.min() < singular.max() < 1.5


def test_closure_hooks_scheduler_and_tensor_lr():
    (param,) = make_params([(8, 16)])
    optimizer = fused_lw.Muon([param], lr=torch.tensor(0.1), weight_decay=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    moves = []
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"].fill_(lr)
        before = param.detach().clone()
        assert optimizer.step(closure) > 0
        moves.append(float((param.detach() - before).norm()))
    assert seen == ["before", "after"] * 2
    assert moves[1] == pytest.approx(2 * moves[0], rel=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure)
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_step_on(how):
    params = make_params([(8, 16), (16, 8)])
    optimizer = fused_lw.Muon(params, backend="torch", lr=0.1, max_scratch_bytes=10**6)
    train(optimizer, 2)
    if how == "state_dict":
        copied_params = copy.deepcopy(params)
        copied = fused_lw.Muon(copied_params)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors otherwise
    else:
        copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        copied_params = copied.param_groups[0]["params"]
    train(optimizer, 2, first=2)
    train(copied, 2, first=2)
    for a, b in zip(params, copied_params, strict=True):
        assert torch.equal(a, b)


def test_checkpoints_go_both_ways_with_torch(exact_torch):
    def distances(first, second):
        a, b = make_params(), make_params()
        writer, straight = first(a, lr=0.05), first(b, lr=0.05)
        train(writer, 3)
        train(straight, 6)
        reader = second(a)
        reader.load_state_dict(writer.state_dict())
        train(reader, 3, first=3)
        assert reader.param_groups[0]["lr"] == 0.05
        return [distance(x, y) for x, y in zip(a, b, strict=True)]

    assert max(distances(exact_torch, fused_lw.Muon)) < 1e-5
    assert max(distances(fused_lw.Muon, exact_torch)) < 1e-5


def test_loading_keeps_fp32_momentum_of_a_bf16_parameter():
    (param,) = make_params([(8, 16)], torch.bfloat16)
    optimizer = fused_lw.Muon([param], momentum_dtype=torch.float32)
    train(optimizer, 2)
    saved = optimizer.state[param]["momentum_buffer"].clone()
    assert saved.dtype == torch.float32
    other = fused_lw.Muon([torch.nn.Parameter(param.detach().clone())])
    other.load_state_dict(optimizer.state_dict())
    (loaded,) = (state["momentum_buffer"] for state in other.state.values())
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, saved)


def test_add_param_group_and_named_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
    names = [name for name, _ in model.named_parameters()]
    optimizer = fused_lw.Muon(list(model.named_parameters())[:1])
    optimizer.add_param_group({"params": list(model.named_parameters())[1:], "lr": 0.5})
    assert [group["param_names"] for group in optimizer.param_groups] == [[name] for name in names]
    model(torch.randn(4, 8)).square().sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Bad input


@pytest.mark.parametrize("shape", [(), (5,)], ids=["0-D", "1-D"])
def test_a_parameter_that_is_no_matrix_is_refused_by_name(shape):
    good, bad = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"norm\.weight: Muon takes matrices"):
        fused_lw.Muon([("good", good), ("norm.weight", bad)])
    optimizer = fused_lw.Muon([good])
    with pytest.raises(ValueError, match="parameter 0 of group 1: Muon takes matrices"):
        optimizer.add_param_group({"params": bad})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps": -1.0}, "eps"),
        ({"ns_steps": 0}, "steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "coefficients"),
        ({"ns_coefficients": "no such schedule"}, "coefficients"),
        ({"adjust_lr_fn": "no such scale"}, "adjust_lr_fn"),
        ({"backend": "cuda"}, "backend"),
        ({"algorithm": "fast"}, "algorithm"),
        ({"precision": "fp8"}, "precision"),
        ({"higher_dims": "no"}, "higher_dims"),
        ({"split_rows": (3, 3)}, "split_rows"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype"),
        ({"max_scratch_bytes": 0}, "max_scratch_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_without_meaning_are_refused_by_name(options, named):
    param = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=named):
        fused_lw.Muon([param], **options)
    with pytest.raises(ValueError, match="cannot be set" if named in ("backend", "max_scratch_bytes") else named):
        fused_lw.Muon([{"params": [param], **options}])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": "fast"}, "lr"),
        ({"momentum": None}, "momentum"),
        ({"nesterov": "no"}, "nesterov"),
        ({"master_weights": "no"}, "master_weights"),
        ({"seed": None}, "seed"),
        ({"split_rows": 4}, "split_rows"),
        ({"ns_coefficients": 5}, "ns_coefficients"),
        ({"ns_steps": 2.5}, "steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_of_the_wrong_type_are_refused_by_name(options, named):
    with pytest.raises(TypeError, match=named):
        fused_lw.Muon([torch.nn.Parameter(torch.zeros(4, 4))], **options)


@pytest.mark.parametrize("option", [{"backend": "triton"}, {"capturable": True}, {"max_scratch_bytes": 5}], ids=str)
def test_options_of_the_whole_optimizer_are_refused_in_a_group(option):
    with pytest.raises(ValueError, match="cannot be set per parameter group"):
        fused_lw.Muon([{"params": [torch.nn.Parameter(torch.zeros(4, 4))], **option}])


def test_unknown_options_are_refused_by_name():
    param = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(TypeError, match="nesterow"):
        fused_lw.Muon([param], nesterow=False)
    with pytest.raises(ValueError, match=r"'nesterow'.*'nesterov'"):
        fused_lw.Muon([{"params": [param], "nesterow": False}])
    optimizer = fused_lw.Muon([{"params": [param], "name": "a key of the trainer's own"}])
    assert optimizer.param_groups[0]["name"] == "a key of the trainer's own"


@pytest.mark.parametrize("kind", ["sparse", "complex parameter", "expanded"])
def test_unusable_tensors_are_refused_before_any_state_changes(kind):
    first = torch.nn.Parameter(torch.ones(4, 4))
    if kind == "complex parameter":
        with pytest.raises(ValueError, match=r"second.*complex64"):
            fused_lw.Muon([("first", first), ("second", torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)))])
        return
    if kind == "expanded":
        with pytest.raises(ValueError, match=r"second.*overlaps itself"):
            fused_lw.Muon([("first", first), ("second", torch.ones(1, 4).expand(4, 4).requires_grad_())])
        return
    second = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = fused_lw.Muon([("first", first), ("second", second)])
    first.grad, second.grad = torch.ones(4, 4), torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match=r"second of shape .* sparse gradient"):
        optimizer.step()
    assert torch.equal(first, torch.ones(4, 4))
    assert not optimizer.state


def test_a_gradient_of_another_dtype_than_before_is_refused():
    first, second = make_params([(4, 4), (4, 4)])
    optimizer = fused_lw.Muon([("first", first), ("second", second)])
    set_grads([first, second], 0)
    optimizer.step()
    first_before, second.data = first.detach().clone(), second.data.bfloat16()
    second.grad = None
    second.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"second of shape .*bfloat16 gradient, which was torch\.float32 before"):
        optimizer.step()
    assert torch.equal(first, first_before)


def test_overlapping_parameters_are_refused_by_name():
    flat = torch.randn(96)
    first = torch.nn.Parameter(flat[:64].view(8, 8))
    shifted = torch.nn.Parameter(flat[32:96].view(8, 8))
    apart = torch.nn.Parameter(flat[64:].view(4, 8))
    for param in (first, shifted, apart):
        param.grad = torch.ones_like(param)
    before = flat.clone()
    with pytest.raises(ValueError, match="first and shifted overlap"):
        fused_lw.Muon([("first", first), ("shifted", shifted)]).step()
    assert torch.equal(flat, before)
    fused_lw.Muon([("first", first), ("apart", apart)]).step()
    assert not torch.equal(flat[:64], before[:64])


def test_interleaved_columns_of_one_buffer_are_separate_unless_they_overlap():
    buffer = torch.randn(8, 16)
    left, middle, right = (torch.nn.Parameter(buffer[:, a:b]) for a, b in ((0, 6), (4, 10), (6, 12)))
    for param in (left, middle, right):
        param.grad = torch.ones_like(param)
    fused_lw.Muon([left, right]).step()
    before = buffer.clone()
    for pair in ([("left", left), ("middle", middle)], [("middle", middle), ("right", right)]):
        with pytest.raises(ValueError, match="overlap: they share memory"):
            fused_lw.Muon(pair).step()
    assert torch.equal(buffer, before)


def test_a_parameter_that_overlaps_itself_is_refused():
    sliding = torch.nn.Parameter(torch.randn(20).as_strided((4, 8), (4, 1)))
    with pytest.raises(ValueError, match=r"sliding of shape .* overlaps itself"):
        fused_lw.Muon([("sliding", sliding)])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["one column repeated", "one row repeated", "one number"])
def test_expanded_gradients_are_read_as_what_they_show(kind, backend):
    base = torch.arange(1.0, 5.0)
    expanded = {
        "one column repeated": base[:, None].expand(4, 6),
        "one row repeated": torch.arange(1.0, 7.0).expand(4, 6),
        "one number": torch.tensor(1.0).expand(4, 6),
    }[kind]
    params = make_params([(4, 6)] * 2)
    params[1].data.copy_(params[0].data)
    params[0].grad, params[1].grad = expanded, expanded.clone(memory_format=torch.contiguous_format)
    fused_lw.Muon(params, backend=backend).step()
    torch.testing.assert_close(params[0], params[1])


def test_a_parameter_turned_in_place_is_described_again():
    ours, theirs = make_params([(8, 8)]), make_params([(8, 8)])
    optimizers = fused_lw.Muon(ours), PlainMuon(theirs)
    for (param,), optimizer in zip((ours, theirs), optimizers, strict=True):
        train(optimizer, 1)
        param.data = param.data.t()  # the same address
        param.grad = None
        optimizer.state[param]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"].clone()
        train(optimizer, 1, first=1)
    assert distance(ours[0], theirs[0]) < 1e-5


def test_a_momentum_of_another_shape_is_refused_by_name():
    first, second = make_params([(4, 8), (4, 8)])
    optimizer = fused_lw.Muon([("first", first), ("second", second)])
    train(optimizer, 1)
    optimizer.state[second]["momentum_buffer"] = torch.ones(8, 4)
    before = first.detach().clone()
    with pytest.raises(ValueError, match=r"second of shape \(4, 8\) on cpu has a momentum_buffer of shape \(8, 4\)"):
        optimizer.step()
    assert torch.equal(first, before)


def test_parameters_that_take_the_place_of_freed_ones_may_have_another_dtype():
    optimizer = fused_lw.Muon(make_params([(4, 4)]))
    for step in range(20):
        dtype = torch.float32 if step % 2 else torch.bfloat16
        optimizer.param_groups[0]["params"] = make_params([(4, 4)], dtype)
        optimizer.state.clear()
        train(optimizer, 1)


def test_loading_after_a_change_of_dtype_goes_on():
    (param,) = make_params([(4, 4)])
    optimizer = fused_lw.Muon([param])
    train(optimizer, 1)
    saved = optimizer.state_dict()
    param.data = param.data.bfloat16()
    param.grad = None
    optimizer.load_state_dict(saved)
    train(optimizer, 1)


def test_a_checkpoint_of_torch_leaves_the_extras_of_each_group_as_they_are(exact_torch):
    def groups(params, **extras):
        return [{"params": params[:1], "lr": 0.1, **extras}, {"params": params[1:]}]

    theirs, ours = make_params([(12, 8), (8, 8)]), make_params([(12, 8), (8, 8)])
    writer = exact_torch(groups(theirs))
    train(writer, 1)
    reader = fused_lw.Muon(groups(ours, split_rows=(4, 4, 4), higher_dims="flatten"))
    reader.load_state_dict(writer.state_dict())
    assert [group["split_rows"] for group in reader.param_groups] == [(4, 4, 4), None]
    assert reader.param_groups[0]["higher_dims"] == "flatten"
    assert reader.param_groups[0]["lr"] == 0.1


def test_a_dtensor_is_sent_to_the_layer_wise_optimizer():
    (param,) = make_params([(4, 4)])
    param.device_mesh = "a mesh"  # what tells a DTensor
    set_grads([param], 0)
    optimizer = fused_lw.Muon([("weight", param)])
    with pytest.raises(ValueError, match=r"weight of shape .* is a DTensor.*LayerWiseMuon"):
        optimizer.step()
    assert not optimizer.state


def test_a_read_only_parameter_is_refused_by_name():
    with torch.inference_mode():
        frozen = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"frozen of shape \(4, 4\) was made in inference mode"):
        fused_lw.Muon([("frozen", frozen)])


def test_a_matrix_larger_than_the_scratch_bound_is_refused_by_name():
    small, large = make_params([(4, 4), (64, 64)])
    optimizer = fused_lw.Muon([("small", small), ("large", large)], max_scratch_bytes=20_000)
    set_grads([small, large], 0)
    before = small.detach().clone()
    with pytest.raises(ValueError, match=r"large of shape \(64, 64\).* needs \d+ bytes .*max_scratch_bytes=20000"):
        optimizer.step()
    assert torch.equal(small, before)
    assert not optimizer.state


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty_matrices_are_stepped_over(shape):
    empty, full = make_params([shape, (4, 8)])
    optimizer = fused_lw.Muon([empty, full])
    train(optimizer, 2)
    assert optimizer.state[empty]["momentum_buffer"].shape == shape


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "mixed"])
def test_float64_parameters_are_stepped_in_every_precision(precision):
    results = []
    for dtype in (torch.float32, torch.float64):
        params = make_params([(16, 24), (24, 16)], dtype)
        train(fused_lw.Muon(params, precision=precision, backend="torch"), 2)
        results.append(params)
    for single, double in zip(*results, strict=True):
        assert double.dtype == torch.float64
        assert distance(single, double) < 1e-3
