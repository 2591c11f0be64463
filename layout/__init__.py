"""The layout planner: which rank owns which matrix, and where it lies in the buffers. No torch here."""

if __name__ != "fused_lw.layout":
    raise ImportError(
        f"import fused_lw.layout, not {__name__!r}: the folder layout/ is installed under fused_lw "
        "(a top-level 'layout' would shadow another package and load every module twice)"
    )

from fused_lw.layout.cost import CostModel, CostTable, ns_cost, ns_flops
from fused_lw.layout.layout import Bucket, Group, Layout, Placement, ShardPart
from fused_lw.layout.models import Matrix, load_model, model_names, model_source, model_specs
from fused_lw.layout.plan import plan
from fused_lw.layout.problem import Policy
from fused_lw.layout.spec import ParamSpec

__all__ = [
    "Bucket",
    "CostModel",
    "CostTable",
    "Group",
    "Layout",
    "Matrix",
    "ParamSpec",
    "Placement",
    "Policy",
    "ShardPart",
    "load_model",
    "model_names",
    "model_source",
    "model_specs",
    "ns_cost",
    "ns_flops",
    "plan",
]
