"""Each kernel alone against its torch oracle, on odd sizes, with poisoned outputs and guards around them."""

import dataclasses
import math

import pytest
import torch

from fused_lw.kernels import reference, row_stride, schedule
from fused_lw.kernels.configs import choose
from fused_lw.kernels.device import architecture
from fused_lw.kernels.iteration import gram, splits_of, standard
from fused_lw.kernels.products import Arena, General, InputNorm, OnChip, Reduce, Symmetric
from fused_lw.kernels.triton_backend import describe, run_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Relative to the largest element: one rounding of the result, or sums of fp32 in another order.
TOLERANCE = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def padded(batch: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN, with a row of guard before and behind, and NaN in the padding of the rows."""
    stride = row_stride(columns, dtype)
    memory = torch.full((batch * rows + 2, stride), math.nan, dtype=dtype, device=DEVICE)
    return memory[1:-1].view(batch, rows, stride)[..., :columns]


def filled(batch: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return padded(batch, rows, columns, dtype).copy_(torch.randn(batch, rows, columns, device=DEVICE))


def symmetric(batch: int, r: int, dtype: torch.dtype) -> torch.Tensor:
    A = torch.randn(batch, r, r, device=DEVICE)
    return padded(batch, r, r, dtype).copy_((A + A.mT) / r)


def norm_of(X: torch.Tensor, eps_rule: str = "clamp") -> InputNorm:
    """Of matrices that were stored halved."""
    scale = torch.full((X.shape[0],), 0.5, device=DEVICE)
    return InputNorm(4.0 * X.float().square().sum((1, 2)), scale, 1e-7, eps_rule, 1.02)


def check(product, tma: bool) -> None:
    def config_for(arch, kind, operands):
        return dataclasses.replace(choose(arch, kind, operands), tma=tma and kind != "reduce")

    if tma and architecture(DEVICE) not in ("interpreter", "sm_90", "sm_100", "sm_103"):
        pytest.skip("no tensor descriptors here")
    expected = dataclasses.replace(product, out=torch.empty_like(product.out))
    reference.run(expected)
    launches = describe([[(product,)]], config_for)
    run_launches(launches)
    out, oracle = product.out.float(), expected.out.float()
    assert ((out - oracle).abs() <= TOLERANCE[product.out.dtype] * oracle.abs().max()).all()
    batch, rows, _ = out.shape
    whole = torch.as_strided(
        product.out,
        ((batch * rows + 2) * product.out.stride(1),),
        (1,),
        product.out.storage_offset() - product.out.stride(1),
    )
    assert whole[: product.out.stride(1)].isnan().all() and whole[-product.out.stride(1) :].isnan().all()
    if isinstance(product, Symmetric | Reduce):
        assert torch.equal(product.out, product.out.mT)
    first = product.out.clone()
    product.out.fill_(math.nan)
    run_launches(launches)
    assert torch.equal(product.out, first)


DTYPES = [(FP32, FP32), (BF16, FP16), (FP16, BF16)]


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(("operands", "out"), DTYPES, ids=str)
@pytest.mark.parametrize("r", [1, 33, 70])
def test_gram_matrix_of_an_unnormalized_input(r, operands, out, tma):
    X = filled(2, r, r + 7, operands)
    check(Symmetric(X, X, padded(2, r, r, out), alpha=32.0, norm=norm_of(X), exact=True), tma)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(("operands", "out"), DTYPES, ids=str)
@pytest.mark.parametrize("r", [1, 33, 70])
def test_symmetric_product_with_its_operands_and_the_identity(r, operands, out, tma):
    P = symmetric(2, r, operands)
    # A polynomial of P: the two commute.
    Q = padded(2, r, r, operands).copy_(0.5 * P.float() @ P.float() - P.float())
    product = Symmetric(P, Q, padded(2, r, r, out), alpha=2.0, beta=-3.0, delta=1.5, gamma=0.25, exact=True)
    check(product, tma)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(("operands", "out"), DTYPES, ids=str)
@pytest.mark.parametrize(("r", "s"), [(1, 9), (33, 70), (40, 40)])
def test_general_product(r, s, operands, out, tma):
    X = filled(2, r, s, operands)
    check(General(filled(2, r, r, operands), X, padded(2, r, s, out), alpha=0.5, beta=3.0, norm=norm_of(X, "add")), tma)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(("operands", "out"), [(BF16, FP16), (FP16, FP16), (BF16, BF16)], ids=str)
@pytest.mark.parametrize(("r", "s"), [(1, 1), (33, 70), (64, 200)])
def test_onchip_iteration(r, s, operands, out, tma):
    X = filled(2, r, s, operands)
    check(OnChip(X, padded(2, r, s, out), schedule("quintic", 5), norm_of(X)), tma)


@pytest.mark.parametrize("out", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("r", [1, 33, 70])
def test_sum_of_partial_products(r, out):
    X = filled(2, r, r, FP16)
    partials = torch.full((3, 2, r, row_stride(r, FP32)), math.nan, device=DEVICE)[..., :r]
    partials.copy_(torch.randn(3, 2, r, r, device=DEVICE))
    partials.masked_fill_(torch.ones(r, r, dtype=torch.bool, device=DEVICE).triu(1), math.nan)
    check(Reduce(partials, padded(2, r, r, out), alpha=8.0, norm=norm_of(X)), tma=False)


def test_a_bf16_matrix_is_divided_by_its_norm_in_float32():
    # By a norm rounded to bf16 it could stay above 1, where schedules without a safety factor diverge.
    X = filled(3, 20, 33, BF16)
    norm = InputNorm(X.float().square().sum((1, 2)), None, 1e-7, "clamp", 1.0)
    out = torch.empty_like(X)
    reference.normalization(X, norm, out)()
    assert torch.equal(out, (X.float() / norm.sq_norm.sqrt()[:, None, None]).bfloat16())


@pytest.mark.parametrize("algorithm", [standard, gram])
def test_a_split_sum_gives_what_a_whole_one_gives(algorithm):
    results = []
    for splits in (1, 3):
        torch.manual_seed(1)
        X = filled(2, 66, 300, BF16)
        norm = InputNorm(X.float().square().sum((1, 2)), None, 1e-7, "clamp", 1.0)
        arena = Arena(torch.full((10**6,), 0xFF, dtype=torch.uint8, device=DEVICE))
        Y = padded(2, 66, 300, FP16)
        program, result = algorithm(X, Y, norm, schedule("jordan", 2), FP16, arena, splits)
        assert any(isinstance(p, Reduce) for stage in program for p in stage) == (splits > 1)
        run_launches(describe([program]))
        results.append(result.float())
    assert (results[0] - results[1]).abs().max() <= 2**-9 * results[0].abs().max()


def test_only_long_matrices_with_few_tiles_are_split():
    assert [splits_of(r, s) for r, s in [(512, 16384), (128, 7168), (1024, 16384), (2048, 65536), (512, 4096)]] == [
        8,
        3,
        3,
        1,
        1,
    ]
