"""fused_lw: a fused, layer-wise Muon optimizer.

`Muon` is a drop-in for `torch.optim.Muon`. `fused_lw.kernels` holds the Triton kernels under it, and
`fused_lw.layout` the planner that says which rank owns which matrix.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_lw.aux_adamw import MuonWithAuxAdamW
    from fused_lw.convert import convert_state
    from fused_lw.layerwise import LayerWiseMuon
    from fused_lw.muon import Muon
    from fused_lw.replace import replace_step, restore_step
    from fused_lw.routing import split_params
    from fused_lw.rules import StepRule, ns_rule, register_rule
    from fused_lw.update import MatrixRule

__all__ = [
    "LayerWiseMuon",
    "MatrixRule",
    "Muon",
    "MuonWithAuxAdamW",
    "StepRule",
    "__version__",
    "convert_state",
    "ns_rule",
    "register_rule",
    "replace_step",
    "restore_step",
    "split_params",
]

__version__ = "0.1.0"

# Imported when first asked for, so that planning (`fused_lw.layout`) does not wait for torch.
_HOMES = {
    "LayerWiseMuon": "fused_lw.layerwise",
    "MatrixRule": "fused_lw.update",
    "Muon": "fused_lw.muon",
    "MuonWithAuxAdamW": "fused_lw.aux_adamw",
    "StepRule": "fused_lw.rules",
    "convert_state": "fused_lw.convert",
    "ns_rule": "fused_lw.rules",
    "register_rule": "fused_lw.rules",
    "replace_step": "fused_lw.replace",
    "restore_step": "fused_lw.replace",
    "split_params": "fused_lw.routing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fused_lw' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
