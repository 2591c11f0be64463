"""Triton kernels for batched Newton-Schulz and packed copies: tensors in, tensors out, no optimizer state."""

if __name__ != "fused_lw.kernels":
    raise ImportError(
        f"import fused_lw.kernels, not {__name__!r}: the folder kernels/ is installed under fused_lw "
        "(a top-level 'kernels' would shadow another package and load every module twice)"
    )
