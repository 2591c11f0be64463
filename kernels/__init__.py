"""Triton kernels for batched Newton-Schulz and packed copies: tensors in, tensors out, no optimizer state."""

if __name__ != "fused_lw.kernels":
    raise ImportError(
        f"import fused_lw.kernels, not {__name__!r}: the folder kernels/ is installed under fused_lw "
        "(a top-level 'kernels' would shadow another package and load every module twice)"
    )

from fused_lw.kernels.coefficients import names as coefficient_names
from fused_lw.kernels.coefficients import norm_factor, schedule
from fused_lw.kernels.device import explain_backend, interpreting, resolve_backend, triton_available
from fused_lw.kernels.launch import count_launches, launch
from fused_lw.kernels.newton_schulz import NSRule, Problem, newton_schulz, orthogonalize, scratch_nbytes
from fused_lw.kernels.products import row_stride
from fused_lw.kernels.work import Work, work

__all__ = [
    "NSRule",
    "Problem",
    "Work",
    "coefficient_names",
    "count_launches",
    "explain_backend",
    "interpreting",
    "launch",
    "newton_schulz",
    "norm_factor",
    "orthogonalize",
    "resolve_backend",
    "row_stride",
    "schedule",
    "scratch_nbytes",
    "triton_available",
    "work",
]
