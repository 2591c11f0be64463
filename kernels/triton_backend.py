"""Runs programs of products on Triton: products of several programs that fit one launch go out in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lw.kernels import grouped, table
from fused_lw.kernels.configs import ProductConfig, choose
from fused_lw.kernels.device import architecture, interpreting
from fused_lw.kernels.launch import launch
from fused_lw.kernels.merge import LaunchKey, merge
from fused_lw.kernels.products import Product, Stage

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def run_programs(programs: Sequence[Sequence[Stage]]) -> None:
    """Run every program's stages in order, independent programs side by side."""
    launches = merge(programs)
    if not launches:
        return
    device = launches[0][1][0].out.device
    arch = architecture(device)
    rows: list[int] = []
    plan: list[tuple[LaunchKey, ProductConfig, int, int]] = []
    for key, products in launches:
        config = choose(arch, key.kind, key.operands)
        flat, tiles = table.build(products, config)
        plan.append((key, config, len(rows), tiles))
        rows += flat
    # One copy to the device for all launches of the call.
    tables = table.to_device(rows, device)
    if any(config.tma for _, config, _, _ in plan):
        triton.set_allocator(_descriptor_memory)
    for key, config, start, tiles in plan:
        _launch(key, config, tables[start:], tiles)


def run_product(product: Product) -> None:
    """Compute one product into its `out`: `reference.run` on Triton."""
    run_programs([[(product,)]])


def _launch(key: LaunchKey, config: ProductConfig, rows: Tensor, tiles: int) -> None:
    meta = {
        "IN": _TL_DTYPES[key.operands],
        "OUT_DTYPE": _TL_DTYPES[key.out],
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "TMA": config.tma,
        "INTERPRET": interpreting(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    grid = (min(tiles, _multiprocessors(rows.device) * config.programs_per_sm),)
    if key.kind == "general":
        launch(grouped.general_kernel, grid, rows, tiles, TILE_M=config.tile_m, TILE_N=config.tile_n, **meta)
    else:
        launch(grouped.symmetric_kernel, grid, rows, tiles, TILE=config.tile_m, **meta)


def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where kernels build their tensor descriptors; torch's allocator aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
