"""The layout planner: which rank owns which matrix, and where it lies in the packed buffers. No torch here."""

if __name__ != "fused_lw.layout":
    raise ImportError(
        f"import fused_lw.layout, not {__name__!r}: the folder layout/ is installed under fused_lw "
        "(a top-level 'layout' would shadow another package and load every module twice)"
    )
