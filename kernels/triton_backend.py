"""Runs programs of products on Triton: products of several programs that fit one launch go out in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lw.kernels import grouped, onchip, table
from fused_lw.kernels.configs import Kind, ProductConfig, choose
from fused_lw.kernels.device import architecture, interpreting
from fused_lw.kernels.launch import launch
from fused_lw.kernels.merge import LaunchKey, merge
from fused_lw.kernels.products import OnChip, Product, Stage

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
KERNELS: dict[Kind, Any] = {
    "symmetric": grouped.symmetric_kernel,
    "general": grouped.general_kernel,
    "update": grouped.update_kernel,
    "reduce": grouped.reduce_kernel,
    "onchip": onchip.onchip_kernel,
}


class Launch(NamedTuple):
    """One launch: the products of a stage that share a kernel and dtypes, described in a table on the device."""

    key: LaunchKey
    config: ProductConfig
    tiles: int
    arguments: tuple[Any, ...]  # the kernel's, its table among them
    products: Sequence[Product]  # kept alive: the table holds addresses only


def describe(
    programs: Sequence[Sequence[Stage]],
    config_for: Callable[[str, Kind, torch.dtype], ProductConfig] = choose,
) -> list[Launch]:
    """The launches that run every program's stages in order, independent programs side by side."""
    launches = merge(programs)
    if not launches:
        return []
    device = launches[0][1][0].out.device
    arch = architecture(device)
    rows: list[int] = []
    plan: list[tuple[LaunchKey, ProductConfig, int, Sequence[Product], int]] = []
    for key, products in launches:
        config = config_for(arch, key.kind, key.operands)
        flat, tiles = table.build(products, config)
        plan.append((key, config, tiles, products, len(rows)))
        rows += flat
        if isinstance(products[0], OnChip):
            rows += table.schedule_rows(products[0].schedule)
    # One copy to the device for all launches of the call.
    tables = table.to_device(rows, device)
    return [
        Launch(key, config, tiles, _arguments(products, tiles, tables[start:]), products)
        for key, config, tiles, products, start in plan
    ]


def _arguments(products: Sequence[Product], tiles: int, rows: Tensor) -> tuple[Any, ...]:
    first = products[0]
    if not isinstance(first, OnChip):
        return rows, tiles
    schedule = rows[(len(products) + 1) * table.FIELDS :]
    # Q is at most the product of all a: a power of two keeps it below 2^14.
    largest = math.prod(abs(a) for a, _, _ in first.schedule)
    q_scale = 2.0 ** min(0, 14 - math.ceil(math.log2(max(largest, 1.0))))
    return rows, schedule, len(first.schedule), tiles, q_scale


def run_launches(launches: Sequence[Launch]) -> None:
    """Run what `describe` described; it may be run again whenever its operands hold new numbers."""
    if any(each.config.tma for each in launches):
        triton.set_allocator(_descriptor_memory)
    for key, config, tiles, arguments, _ in launches:
        grid = (min(tiles, _multiprocessors(arguments[0].device) * config.programs_per_sm),)
        launch(KERNELS[key.kind], grid, *arguments, **constants(key, config, interpreting()))


def run_product(product: Product) -> None:
    """Compute one product into its `out`: `reference.run` on Triton."""
    run_launches(describe([[(product,)]]))


def constants(key: LaunchKey, config: ProductConfig, interpret: bool) -> dict[str, Any]:
    """The compile-time arguments of a launch and Triton's options."""
    c = config
    meta: dict[str, Any] = {
        "IN": _TL_DTYPES[key.operands],
        "OUT_DTYPE": _TL_DTYPES[key.out],
        "INTERPRET": interpret,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
    }
    main_loop = {"BLOCK_K": c.block_k, "GROUP": c.group, "TMA": c.tma, "PRECISION": c.precision}
    of_kind: dict[Kind, dict[str, Any]] = {
        "symmetric": {"TILE": c.tile_m, **main_loop},
        "general": {"TILE_M": c.tile_m, "TILE_N": c.tile_n, **main_loop},
        "update": {"TILE_M": c.tile_m, "TILE_N": c.tile_n, **main_loop},
        "reduce": {"TILE": c.tile_m},
        "onchip": {"R": c.tile_m, "BLOCK_S": c.tile_n, "TMA": c.tma},
    }
    if key.update is not None:
        param, stochastic = key.update
        meta |= {"PARAM_DTYPE": _TL_DTYPES[param], "STOCHASTIC": stochastic}
    return meta | of_kind[key.kind]


def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where kernels build their tensor descriptors; torch's allocator aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
