"""The packed copies: the Triton launchers against their torch oracles, and both against the unfused formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fused_lw.kernels import pack, pack_reference
from fused_lw.kernels.coefficients import schedule
from fused_lw.kernels.launch import count_launches
from fused_lw.kernels.newton_schulz import NSRule, Problem, prepare, scratch_nbytes
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided
from fused_lw.kernels.products import row_stride
from fused_lw.kernels.reference import frobenius_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MU = 0.9
DTYPE_IDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def strided(matrix: Tensor) -> Strided:
    return Strided(matrix, 0, matrix.stride(0), matrix.stride(1))


def poisoned_workspace(count: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    r, s = min(rows, cols), max(rows, cols)
    stride = row_stride(s, dtype)
    return torch.full((count, r, stride), float("nan"), dtype=dtype, device=DEVICE)[:, :, :s]


def make_group(
    shape: tuple[int, int],
    *,
    count: int = 2,
    grad: torch.dtype = torch.float32,
    momentum: torch.dtype = torch.float32,
    param: torch.dtype = torch.float32,
    workspace: torch.dtype = torch.float32,
    ema: bool = True,
    nesterov: bool = True,
    transposed: bool = False,
    seed: int = 0,
) -> PackedGroup:
    """`count` matrices of `shape` with random contents; `transposed` ones lie column by column in memory."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(dtype: torch.dtype) -> Tensor:
        made = torch.randn(shape[::-1] if transposed else shape, generator=generator).to(DEVICE, dtype)
        return made.T if transposed else made

    matrices = [
        PackedMatrix(
            *shape, strided(tensor(grad)), strided(tensor(momentum)), strided(tensor(param)),
            mu=MU, ema=ema, nesterov=nesterov, scale=1.5, group=0,
        )
        for _ in range(count)
    ]  # fmt: skip
    norms = torch.full((2, count), float("nan"), device=DEVICE)
    scale = norms[1] if workspace == torch.float16 else None
    return PackedGroup(matrices, poisoned_workspace(count, *shape, workspace), norms[0], scale)


def unfused_copy_in(matrix: PackedMatrix) -> tuple[Tensor, Tensor]:
    """Momentum and Newton-Schulz input by the formulas, each operation rounded to the momentum's dtype."""
    m = matrix.momentum.view(matrix.rows, matrix.cols)
    g = matrix.grad.view(matrix.rows, matrix.cols).float()
    dtype = m.dtype
    m = m.float()
    if matrix.ema:
        m = (m + (g - m) * torch.tensor(1 - MU)).to(dtype).float()
        u = (m - (m - g) * (1 - torch.tensor(MU))) if matrix.nesterov else m
    else:
        m = ((m * torch.tensor(MU)).to(dtype).float() + g).to(dtype).float()
        u = g + m * torch.tensor(MU) if matrix.nesterov else m
    return m.to(dtype), u.to(dtype)


# (gradient, momentum, workspace)
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float16),
    (torch.float16, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
]


def assert_within_rounding(got: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    """Equal up to one rounding of the coarsest dtype at the magnitude of the terms (sums may cancel)."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    magnitude = float(expected.float().abs().max())
    torch.testing.assert_close(got.float(), expected.float(), rtol=eps, atol=eps * magnitude)


@pytest.mark.parametrize("transposed", [False, True], ids=["rowmajor", "colmajor"])
@pytest.mark.parametrize("shape", [(70, 70), (7, 13), (130, 66), (1, 9)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("ema", [True, False], ids=["ema", "sum"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(DTYPE_IDS[t] for t in d))
def test_copy_in(dtypes, ema, nesterov, shape, transposed):
    grad, momentum, workspace = dtypes
    options = {"grad": grad, "momentum": momentum, "workspace": workspace, "ema": ema, "nesterov": nesterov}
    ours, oracle = (make_group(shape, transposed=transposed, **options) for _ in range(2))
    expected = [unfused_copy_in(matrix) for matrix in ours.matrices]
    gradients = [matrix.grad.tensor.clone() for matrix in ours.matrices]

    pack.copy_in(Pack([ours]))
    pack_reference.copy_in(Pack([oracle]))

    for group in (ours, oracle):
        for index, (m, u) in enumerate(expected):
            matrix = group.matrices[index]
            assert torch.equal(matrix.grad.tensor, gradients[index])
            assert_within_rounding(matrix.momentum.view(*shape), m, momentum)
            packed = group.packed(group.workspace)[index].float()
            if group.scale is not None:
                packed = packed / group.scale[index]
                assert torch.frexp(group.scale[index]).mantissa == 0.5, "a power of two"
            assert_within_rounding(packed, u, momentum, workspace)
            torch.testing.assert_close(group.sq_norm[index], packed.square().sum(), rtol=1e-3, atol=0)
        count, r, s = group.workspace.shape
        stride = group.workspace.stride(1)
        whole = group.workspace.as_strided((count, r, stride), group.workspace.stride())
        assert not whole[:, :, s:].any(), "the padding is zeroed"
    if DEVICE.type == "cpu":  # a GPU fuses multiply and add
        for matrix, (m, _) in zip(ours.matrices, expected, strict=True):
            assert torch.equal(matrix.momentum.view(*shape), m)


@pytest.mark.parametrize("transposed", [False, True], ids=["rowmajor", "colmajor"])
@pytest.mark.parametrize("shape", [(70, 70), (7, 13), (130, 66), (9, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("factor", [torch.float32, torch.float16, torch.bfloat16], ids=DTYPE_IDS.get)
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_IDS.get)
def test_copy_out(param, factor, shape, transposed):
    ours, oracle = (make_group(shape, param=param, transposed=transposed) for _ in range(2))
    factors = torch.randn(ours.workspace.shape, device=DEVICE).to(factor)
    hyper = torch.tensor([[0.5, 0.25, 3.0]], dtype=torch.float64, device=DEVICE)
    decayed = [(m.param.view(*shape).float() * (1 - 0.5 * 0.25)).to(param).float() for m in ours.matrices]
    expected = [p - 0.5 * 1.5 * ours.packed(factors)[i].float() for i, p in enumerate(decayed)]

    pack.copy_out(Pack([ours]), [factors], hyper)
    pack_reference.copy_out(Pack([oracle]), [factors], hyper)

    for group in (ours, oracle):
        for matrix, p in zip(group.matrices, expected, strict=True):
            assert_within_rounding(matrix.param.view(*shape), p, param)


@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16], ids=DTYPE_IDS.get)
def test_copy_out_updates_master_weights_and_rounds_them_into_the_parameter(param):
    groups = [make_group((66, 130), param=param) for _ in range(2)]
    factors = torch.randn(groups[0].workspace.shape, device=DEVICE)
    hyper = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64, device=DEVICE)
    for group, module in zip(groups, (pack, pack_reference), strict=True):
        masters = [matrix.param.tensor.float() + 1e-4 for matrix in group.matrices]
        expected = [master * (1 - 0.125) - 0.75 * factor for master, factor in zip(masters, factors, strict=True)]
        for matrix, master in zip(group.matrices, masters, strict=True):
            matrix.master = strided(master)
        module.copy_out(Pack([group]), [factors], hyper)
        for matrix, master, p in zip(group.matrices, masters, expected, strict=True):
            assert_within_rounding(master, p, torch.float32)
            assert torch.equal(matrix.param.tensor, master.to(param))


def test_stochastic_rounding_is_the_same_on_both_backends_and_unbiased():
    shape = (66, 134)
    ours, oracle = (make_group(shape, param=torch.bfloat16) for _ in range(2))
    # No update: what is rounded is p * decay, the same bits on both backends.
    factors = torch.zeros(ours.workspace.shape, device=DEVICE)
    hyper = torch.tensor([[0.5, 0.0625, 7.0]], dtype=torch.float64, device=DEVICE)
    exact = [matrix.param.tensor.float() * (1 - 0.5 * 0.0625) for matrix in ours.matrices]
    for group, module in ((ours, pack), (oracle, pack_reference)):
        for key, matrix in enumerate(group.matrices):
            matrix.stochastic, matrix.noise_key = True, 1234 + key
        module.copy_out(Pack([group]), [factors], hyper)
    for a, b, p in zip(ours.matrices, oracle.matrices, exact, strict=True):
        assert torch.equal(a.param.tensor, b.param.tensor)
        error = (a.param.tensor.float() - p) / p
        assert error.abs().max() < 2**-7, "one of the two neighbours"
        assert (a.param.tensor != p.bfloat16()).float().mean() > 0.2, "not to the nearest"
        # The mean error of n roundings, each within 2^-7, deviates from 0 by about 2^-8 / sqrt(n).
        assert error.mean().abs() < 4 * 2**-8 / error.numel() ** 0.5


def test_stochastic_rounding_noise_is_uniform_and_differs_by_key_step_and_element():
    x = torch.full((512, 512), 1 + 2**-9)  # a quarter of the way from 1 to the next bf16
    seeds = itertools.product((0, 1, 2**32 - 1), (0, 1))
    up = [pack_reference.round_stochastically(x, key, step) > 1 for key, step in seeds]
    for drawn in up:
        assert abs(float(drawn.float().mean()) - 0.25) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
        rows = drawn.float().mean(dim=1)
        assert rows.std() < 1.5 * (0.25 * 0.75 / 512) ** 0.5
    for one, other in itertools.combinations(up, 2):
        together = float((one & other).float().mean())
        assert abs(together - 0.0625) < 4 * (0.0625 / x.numel()) ** 0.5, "independent draws"
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, 3.3e38]])
    rounded = pack_reference.round_stochastically(special, 5, 5)
    assert rounded[0, 0].isnan()
    assert rounded[0, 1:4].tolist() == [float("inf"), -float("inf"), 0.0]
    assert rounded[0, 4].isfinite()


@pytest.mark.parametrize(
    ("grad", "momentum", "workspace", "nesterov", "per_element"),
    [
        (torch.float32, torch.float32, torch.bfloat16, True, 14),
        (torch.float32, torch.float32, torch.bfloat16, False, 14),
        (torch.float32, torch.float32, torch.float16, True, 22),
        (torch.float32, torch.float32, torch.float16, False, 18),
        (torch.bfloat16, torch.float32, torch.bfloat16, True, 12),
    ],
)
def test_bytes_that_copy_in_moves(monkeypatch, grad, momentum, workspace, nesterov, per_element):
    """Counted at the interpreter's loads and stores; on top come rules and tile sums, some 50 bytes a tile and pass."""
    if DEVICE.type != "cpu":
        pytest.skip("only the interpreter's loads and stores can be counted")
    group = make_group((128, 256), grad=grad, momentum=momentum, workspace=workspace, nesterov=nesterov)
    numel = 2 * 128 * 256
    with counted_bytes(monkeypatch) as moved:
        pack.copy_in(Pack([group]))
    assert per_element <= moved["elements"] / numel < per_element + 0.03
    assert moved["table"] / (numel / pack.BLOCK**2) < 512, "bytes of the table read per tile"
    counted = pack_reference.copy_in_nbytes(numel, grad, momentum, workspace, nesterov=nesterov)
    assert counted == per_element * numel


@pytest.mark.parametrize(
    ("param", "master", "per_element"),
    [(torch.float32, False, 10), (torch.bfloat16, False, 6), (torch.bfloat16, True, 12)],
    ids=["fp32", "bf16", "bf16-master"],
)
def test_bytes_that_copy_out_moves(monkeypatch, param, master, per_element):
    if DEVICE.type != "cpu":
        pytest.skip("only the interpreter's loads and stores can be counted")
    group = make_group((128, 256), param=param)
    for matrix in group.matrices:
        matrix.master = strided(matrix.param.tensor.float()) if master else None
    factors = torch.ones_like(group.workspace, dtype=torch.float16)
    numel = factors.numel()
    with counted_bytes(monkeypatch) as moved:
        pack.copy_out(Pack([group]), [factors], torch.ones(1, 3, dtype=torch.float64))
    assert per_element <= moved["elements"] / numel < per_element + 0.03
    assert pack_reference.copy_out_nbytes(numel, param, torch.float16, master=master) == per_element * numel


@contextmanager
def counted_bytes(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    moved = Counter[str]()

    def counting(name):
        original = getattr(InterpreterBuilder, name)

        def wrapped(self, pointers, *arguments):
            element = pointers.get_element_ty().primitive_bitwidth // 8
            masked = [a for a in arguments if getattr(a, "data", None) is not None and a.data.dtype == bool]
            touched = int(masked[0].data.sum()) if "masked" in name else pointers.data.size
            moved["table" if element == 8 else "elements"] += element * touched
            return original(self, pointers, *arguments)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("create_load", "create_store", "create_masked_load", "create_masked_store"):
            patch.setattr(InterpreterBuilder, name, counting(name))
        yield moved


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16], ids=DTYPE_IDS.get)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
def test_last_product_updates_the_parameters_as_copy_out_does(precision, param, stochastic):
    """The same bits, whether the orthogonal factor is stored in between or not; tall and wide in one batch."""
    rule = NSRule(schedule("jordan", 5), precision=precision)
    hyper = torch.tensor([[0.5, 0.25, 7.0]], dtype=torch.float64, device=DEVICE)
    results = []
    for fused in (True, False):
        groups = [make_group((72, 80), param=param, workspace=rule.workspace_dtype)]
        groups += [make_group((72, 72), param=param, workspace=rule.workspace_dtype, count=1, seed=1)]
        tall = make_group((80, 72), param=param, workspace=rule.workspace_dtype, count=1, seed=2)
        groups[0] = PackedGroup([*groups[0].matrices, *tall.matrices], *together(3, groups[0]))
        for key, matrix in enumerate(matrix for group in groups for matrix in group.matrices):
            matrix.stochastic, matrix.noise_key = stochastic and param == torch.bfloat16, key
        pack.copy_in(Pack(groups))
        problems = [Problem(group.workspace, group.sq_norm) for group in groups]
        shapes = [tuple(group.workspace.shape) for group in groups]
        scratch = torch.empty(scratch_nbytes(shapes, rule, backend="triton"), dtype=torch.uint8, device=DEVICE)
        updates = [pack.fused_update(group, hyper) for group in groups] if fused else None
        with count_launches() as launches:
            factors = prepare(problems, rule, backend="triton", scratch=scratch, updates=updates)()
            pack.copy_out(Pack(groups), factors, hyper)
        assert launches["update_kernel"] == fused
        assert launches["copy_out_kernel"] == (not fused)
        results.append([matrix.param.tensor for group in groups for matrix in group.matrices])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def together(count: int, like: PackedGroup) -> tuple[Tensor, Tensor]:
    _, r, s = like.workspace.shape
    return poisoned_workspace(count, r, s, like.workspace.dtype), torch.full((count,), float("nan"), device=DEVICE)


def test_what_the_last_product_cannot_update_goes_through_copy_out():
    hyper = torch.ones(1, 3, dtype=torch.float64, device=DEVICE)
    assert pack.fused_update(make_group((72, 80)), hyper) is not None
    assert pack.fused_update(make_group((72, 80), param=torch.float16), hyper) is None
    assert pack.fused_update(make_group((7, 13)), hyper) is None, "rows are not aligned"
    assert pack.fused_update(make_group((72, 80), transposed=True), hyper) is None
    master, mixed = make_group((72, 80), param=torch.bfloat16), make_group((72, 80))
    master.matrices[0].master = strided(torch.ones(72, 80, device=DEVICE))
    mixed.matrices[1].param = strided(torch.ones(72, 80, device=DEVICE, dtype=torch.bfloat16))
    assert pack.fused_update(master, hyper) is None
    assert pack.fused_update(mixed, hyper) is None


def test_one_launch_serves_all_shapes_and_each_gives_the_bits_it_gives_alone():
    shapes = [(64, 64), (7, 13), (130, 66), (66, 130), (1, 9), (9, 1)]
    together = [make_group(shape, count=1 + i % 3, seed=i) for i, shape in enumerate(shapes)]
    alone = [make_group(shape, count=1 + i % 3, seed=i) for i, shape in enumerate(shapes)]
    hyper = torch.ones(1, 3, dtype=torch.float64, device=DEVICE)
    with count_launches() as launches:
        pack.copy_in(Pack(together))
        pack.copy_out(Pack(together), [group.workspace for group in together], hyper)
    assert launches == {"copy_in_kernel": 1, "sum_tiles_kernel": 1, "copy_out_kernel": 1}
    for group in alone:
        pack.copy_in(Pack([group]))
        pack.copy_out(Pack([group]), [group.workspace], hyper)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.workspace, other.workspace)
        assert torch.equal(one.sq_norm, other.sq_norm)
        for a, b in zip(one.matrices, other.matrices, strict=True):
            assert torch.equal(a.param.tensor, b.param.tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_stays_in_its_matrix(bad):
    group, clean = make_group((66, 70), count=3), make_group((66, 70), count=3)
    group.matrices[1].grad.tensor[3, 5] = bad
    pack.copy_in(Pack([group]))
    pack.copy_in(Pack([clean]))
    assert not torch.isfinite(group.sq_norm[1])
    for index in (0, 2):
        assert torch.equal(group.workspace[index], clean.workspace[index])
        assert torch.equal(group.sq_norm[index], clean.sq_norm[index])


@pytest.mark.parametrize("module", [pack, pack_reference], ids=["triton", "torch"])
def test_fp16_scale_keeps_extremes_in_range(module):
    group = make_group((64, 128), count=4, workspace=torch.float16, nesterov=False)
    for matrix, size in zip(group.matrices, (0.0, 1e-12, 1e12, 1.0), strict=True):
        matrix.momentum.tensor.zero_()
        matrix.grad.tensor.mul_(size)
    group.matrices[3].grad.tensor.zero_()[0, 0] = 1.0  # the whole norm in one element
    module.copy_in(Pack([group]))
    assert torch.isfinite(group.workspace).all()
    assert not group.workspace[0].any()
    assert group.scale[0] == 1
    for index in (1, 2):
        assert 0.5 <= group.workspace[index].float().square().mean().sqrt() <= 2


def test_a_group_refuses_a_workspace_of_another_shape():
    group = make_group((8, 16))
    with pytest.raises(ValueError, match=r"2 matrices of 8 x 16 takes a workspace \(2, 8, 16\)"):
        PackedGroup(group.matrices, poisoned_workspace(2, 8, 24, torch.float32), group.sq_norm)
    with pytest.raises(ValueError, match="fp16 workspace needs a scale"):
        PackedGroup(group.matrices, poisoned_workspace(2, 8, 16, torch.float16), group.sq_norm)


def test_the_norm_of_a_large_matrix_is_that_of_float64():
    # torch's own, of all elements at once, is 4e-5 off here.
    X = torch.randn(768, 3072, generator=torch.Generator().manual_seed(0))
    for matrix in (X, X.T, torch.nn.functional.pad(X, (0, 5))[:, :-5], X.view(3, 256, 3072)):
        assert float(frobenius_norm(matrix)) == pytest.approx(float(X.double().norm()), rel=1e-6)
