"""fused_lw: a fused, layer-wise Muon optimizer.

`Muon` is a drop-in for `torch.optim.Muon`. `fused_lw.kernels` holds the Triton kernels under it, and
`fused_lw.layout` the planner that says which rank owns which matrix.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_lw.muon import Muon

__all__ = ["Muon", "__version__"]

__version__ = "0.1.0"

# Imported when first asked for, so that planning (`fused_lw.layout`) does not wait for torch.
_HOMES = {"Muon": "fused_lw.muon"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fused_lw' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
