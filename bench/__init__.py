"""Benchmarks, rooflines and profiles of the layers; what they write is committed in results/."""

if __name__ != "fused_lw.bench":
    raise ImportError(
        f"import fused_lw.bench, not {__name__!r}: the folder bench/ is installed under fused_lw "
        "(python -m fused_lw.bench.layouts, fused-lw bench)"
    )
