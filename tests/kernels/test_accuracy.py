"""Errors of the stored precisions, by rounding on the CPU what a GPU would store, against torch's own bf16 iteration.

The reference is the same polynomial in float64, so what is measured is rounding, not how orthogonal the result is.
"""

import functools

import pytest
import torch
from torch import Tensor

from fused_lw.kernels import coefficient_names, newton_schulz, norm_factor, schedule
from tests.kernels.matrices import SPECTRA, exact, matrix, relative_error

SHAPE = (128, 384)
# Without a safety factor polar_express_raw leaves its interval as soon as rounding pushes a singular value above 1.
WELL_KNOWN = [
    name
    for name in coefficient_names()
    if name in ("jordan", "quintic") or (name.startswith("polar_express_") and name != "polar_express_raw")
]


def steps_of(name: str) -> int:
    return 10 if name == "deepseek_v4" else 5


def torch_bf16(X: Tensor, name: str) -> Tensor:
    """torch.optim.Muon's iteration: bf16 operands and results, fp32 sums."""

    def bf16(t: Tensor) -> Tensor:
        return t.bfloat16().float()

    X = bf16(X)
    X = bf16(X / (bf16(X.norm()) * norm_factor(name)))
    for a, b, c in schedule(name, steps_of(name)):
        A = bf16(X @ X.T)
        B = bf16(b * A + c * A @ A)
        X = bf16(a * X + B @ X)
    return X


@functools.cache
def reference(spectrum: str, name: str) -> tuple[Tensor, Tensor, float]:
    X = matrix(spectrum, *SHAPE)
    expected = exact(X, schedule(name, steps_of(name)), norm_factor(name))
    return X, expected, relative_error(torch_bf16(X, name), expected)


def bound(precision: str, spectrum: str, name: str) -> float:
    """Largest error allowed, in units of the error of torch's bf16 iteration on the same input."""
    if name not in WELL_KNOWN:
        return 1.25
    if precision == "fp16":
        return 0.4
    return 0.6 if precision == "mixed" and spectrum == "gaussian" else 1.05


@pytest.mark.parametrize("algorithm", ["standard", "gram", "auto"])
@pytest.mark.parametrize("precision", ["fp16", "mixed", "bf16"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_error_against_torch_bf16(spectrum, precision, algorithm):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, precision)
    too_large = {}
    for name in coefficient_names():
        X, expected, torch_error = reference(spectrum, name)
        result = newton_schulz(
            X, coefficients=name, steps=steps_of(name), algorithm=algorithm, dtype=dtype, backend="torch"
        )
        ratio = relative_error(result, expected) / torch_error
        if not ratio <= bound(precision, spectrum, name):
            too_large[name] = round(ratio, 2)
    assert not too_large


@pytest.mark.parametrize("shape", [(96, 96), (64, 128), (64, 512)], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gram_in_float32_is_about_as_accurate_as_standard(spectrum, shape):
    X = matrix(spectrum, *shape)
    for name in WELL_KNOWN:
        expected = exact(X, schedule(name, 5), norm_factor(name))
        gram, standard = (
            relative_error(newton_schulz(X, coefficients=name, algorithm=a, dtype=torch.float32), expected)
            for a in ("gram", "standard")
        )
        # Three steps without restart cost some digits where few singular values stand out; 1e-3 of bf16's error.
        assert gram < max(4e-5, 6 * standard), name


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [SHAPE, (649, 700)], ids=str)
def test_bf16_units_of_a_cpu_are_as_accurate_as_torch(spectrum, shape, bf16_units):
    bf16_units(True)
    X = matrix(spectrum, *shape)
    for name in WELL_KNOWN if shape == SHAPE else ["jordan"]:
        expected = exact(X, schedule(name, 5), norm_factor(name))
        error = relative_error(newton_schulz(X, coefficients=name, dtype=torch.bfloat16, backend="torch"), expected)
        assert error < 1.1 * relative_error(torch_bf16(X, name), expected), name
