"""What a Newton-Schulz call costs, counted exactly from the program that would run: flops, bytes and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fused_lw.kernels import table
from fused_lw.kernels.configs import Kind, ProductConfig, choose
from fused_lw.kernels.merge import key_of, merge
from fused_lw.kernels.newton_schulz import NSRule, meta_program
from fused_lw.kernels.products import General, OnChip, Product, Reduce

# On-chip steps multiply fp32 tiles as three fp16 products, and Q as two.
_SPLIT_SQUARE = 3
_SPLIT_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Totals of one call.

    Attributes:
        useful_flops: what the algorithm needs, one triangle of symmetric products; a multiply-add counts 2.
        executed_flops: what the tiles compute: whole tiles, whole steps of the main loop.
        nbytes: every operand read once and every result written once, without row padding.
        launches: kernel launches.
    """

    useful_flops: int
    executed_flops: int
    nbytes: int
    launches: int


def work(
    shapes: Sequence[tuple[int, int, int]],
    rule: NSRule,
    arch: str = "sm_90",
    config: Callable[[str, Kind, torch.dtype], ProductConfig] = choose,
) -> Work:
    """Count one call of `orthogonalize` on the Triton backend over problems of shapes (B, r, s), r <= s.

    `config(arch, kind, operands)` names the configuration of each launch; by default the one that ships.
    """
    programs = [meta_program(shape, rule, "triton")[0] for shape in shapes]
    products = [product for program in programs for stage in program for product in stage]
    configs = [config(arch, key.kind, key.operands) for key in map(key_of, products)]
    return Work(
        useful_flops=sum(map(_useful_flops, products)),
        executed_flops=sum(map(_executed_flops, products, configs)),
        nbytes=sum(map(_nbytes, products)),
        launches=len(merge(programs)),
    )


def _useful_flops(p: Product) -> int:
    batch, r, columns = p.out.shape
    if isinstance(p, General):
        return batch * 2 * r * r * columns
    if isinstance(p, OnChip):
        # R^2, QW, RW and (RW)W per step, less those that the first step (Q = I) and the last (no new R) do without.
        squares = 4 * len(p.schedule) - 3
        return batch * r * r * (3 * columns + squares * r)
    if isinstance(p, Reduce):
        return 0
    return batch * r * r * p.P.shape[2]


def _executed_flops(p: Product, config: ProductConfig) -> int:
    batch, _, columns = p.out.shape
    tiles = batch * table.tiles_per_matrix(p, config)
    if isinstance(p, OnChip):
        rows = config.tile_m
        passes = (1 + _SPLIT_FACTOR) * _up(columns, config.tile_n)
        return tiles * 2 * rows * rows * (passes + _SPLIT_SQUARE * 4 * len(p.schedule) * rows)
    if isinstance(p, Reduce):
        return 0
    depth = p.L.shape[2] if isinstance(p, General) else p.P.shape[2]
    return tiles * 2 * config.tile_m * config.tile_n * _up(depth, config.block_k)


def _nbytes(p: Product) -> int:
    if isinstance(p, General) and p.update is not None:
        # The parameters are read and written instead of the result.
        operands = [p.L, p.X]
        return sum(t.numel() * t.element_size() for t in operands) + 2 * p.out.numel() * p.update.param.itemsize
    if isinstance(p, General):
        operands = [p.L, p.X]
    elif isinstance(p, OnChip):
        operands = [p.X, p.X]
    elif isinstance(p, Reduce):
        operands = [p.partials]
    else:
        operands = [p.P] if p.P is p.Q else [p.P, p.Q]
    return sum(t.numel() * t.element_size() for t in (*operands, p.out))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
