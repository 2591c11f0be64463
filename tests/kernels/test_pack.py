"""The packed copies: the Triton launchers against their torch oracles, and both against the unfused formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_lw.kernels import pack, pack_reference
from fused_lw.kernels.launch import count_launches
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided
from fused_lw.kernels.products import row_stride

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
            packed = group.packed(group.workspace, index).float()
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
    hyper = torch.tensor([[0.5, 0.25]], dtype=torch.float64, device=DEVICE)
    decayed = [(m.param.view(*shape).float() * (1 - 0.5 * 0.25)).to(param).float() for m in ours.matrices]
    expected = [p - 0.5 * 1.5 * ours.packed(factors, i).float() for i, p in enumerate(decayed)]

    pack.copy_out(Pack([ours]), [factors], hyper)
    pack_reference.copy_out(Pack([oracle]), [factors], hyper)

    for group in (ours, oracle):
        for matrix, p in zip(group.matrices, expected, strict=True):
            assert_within_rounding(matrix.param.view(*shape), p, param)


def test_one_launch_serves_all_shapes_and_each_gives_the_bits_it_gives_alone():
    shapes = [(64, 64), (7, 13), (130, 66), (66, 130), (1, 9), (9, 1)]
    together = [make_group(shape, count=1 + i % 3, seed=i) for i, shape in enumerate(shapes)]
    alone = [make_group(shape, count=1 + i % 3, seed=i) for i, shape in enumerate(shapes)]
    with count_launches() as launches:
        pack.copy_in(Pack(together))
        pack.copy_out(
            Pack(together), [g.workspace for g in together], torch.ones(1, 2, dtype=torch.float64, device=DEVICE)
        )
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
