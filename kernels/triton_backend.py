"""Runs programs of products on Triton: products of several programs that fit one launch go out in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class Launch(NamedTuple):
    """One launch: the products of a stage that share a kernel and dtypes, described in a table on the device."""

    key: LaunchKey
    config: ProductConfig
    rows: Tensor  # int64, from the first row of this launch on
    tiles: int


def describe(programs: Sequence[Sequence[Stage]]) -> list[Launch]:
    """The launches that run every program's stages in order, independent programs side by side."""
    launches = merge(programs)
    if not launches:
        return []
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
    return [Launch(key, config, tables[start:], tiles) for key, config, start, tiles in plan]


def run_launches(launches: Sequence[Launch]) -> None:
    """Run what `describe` described; it may be run again whenever its operands hold new numbers."""
    if any(launch_.config.tma for launch_ in launches):
        triton.set_allocator(_descriptor_memory)
    for launch_ in launches:
        _launch(*launch_)


def run_product(product: Product) -> None:
    """Compute one product into its `out`: `reference.run` on Triton."""
    run_launches(describe([[(product,)]]))


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
