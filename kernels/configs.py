"""Launch configurations per architecture, the one predicate that says which are valid, and the one chooser.

A configuration depends on the architecture and on what is multiplied, never on which matrices are in the call:
the order of a matrix's sums, and with it its bits, must not change with its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["symmetric", "general"]


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How one launch of a product kernel is cut into tiles and run.

    Attributes:
        tile_m, tile_n: rows and columns of an output tile; equal for symmetric products.
        block_k: how much of the sum one step of the main loop takes.
        group: tile rows walked together, so that neighbouring programs share operands in L2.
        num_warps, num_stages: Triton's.
        tma: load operands through tensor descriptors; else through pointers (cp.async).
        programs_per_sm: persistent programs started for each multiprocessor.
    """

    tile_m: int
    tile_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int
    tma: bool
    programs_per_sm: int


INTERPRETER = ProductConfig(32, 32, 32, 2, num_warps=4, num_stages=1, tma=False, programs_per_sm=3)
INTERPRETER_TMA = ProductConfig(32, 32, 32, 2, num_warps=4, num_stages=1, tma=True, programs_per_sm=3)


def choose(arch: str, kind: Kind, operands: torch.dtype) -> ProductConfig:
    """The configuration of a launch on an architecture ("sm_90", "gfx942", "interpreter")."""
    return INTERPRETER
