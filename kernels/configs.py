"""Launch configurations per architecture, the one predicate that says which are valid, and the one chooser.

A configuration depends on the architecture and on what is multiplied, never on which matrices are in the call:
the order of a matrix's sums, and with it its bits, must not change with its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["symmetric", "general", "update", "reduce", "onchip"]
KINDS: tuple[Kind, ...] = ("symmetric", "general", "update", "reduce", "onchip")


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How one launch is cut into tiles and run.

    Attributes:
        tile_m, tile_n: rows and columns of an output tile; equal for symmetric products and sums. On chip: the rows
            that are held, and the columns of X that are taken at once.
        block_k: how much of the sum one step of the main loop takes; on chip, the same as tile_n.
        group: tile rows walked together, so that neighbouring programs share operands in L2.
        num_warps, num_stages: Triton's.
        tma: load operands through tensor descriptors; else through pointers (cp.async).
        programs_per_sm: persistent programs started for each multiprocessor.
        precision: how fp32 operands are multiplied: "tf32x3" is three tensor-core products, about fp32.
    """

    tile_m: int
    tile_n: int
    block_k: int
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = False
    programs_per_sm: int = 1
    precision: Literal["ieee", "tf32x3"] = "ieee"


# Elementwise sums: 32 elements a thread.
_REDUCE = ProductConfig(64, 64, 16, num_warps=4, num_stages=2, programs_per_sm=4)

# Small, so that matrices the interpreter can manage still have several tiles.
INTERPRETER: dict[tuple[Kind, int], ProductConfig] = {
    ("symmetric", 2): ProductConfig(32, 32, 32, group=2, num_warps=4, programs_per_sm=3),
    ("general", 2): ProductConfig(32, 64, 32, group=2, num_warps=4, programs_per_sm=3),
    ("update", 2): ProductConfig(32, 64, 32, group=2, num_warps=4, programs_per_sm=3),
    ("symmetric", 4): ProductConfig(32, 32, 32, group=2, num_warps=4, programs_per_sm=3),
    ("general", 4): ProductConfig(32, 64, 32, group=2, num_warps=4, programs_per_sm=3),
    ("update", 4): ProductConfig(32, 64, 32, group=2, num_warps=4, programs_per_sm=3),
    ("reduce", 4): ProductConfig(32, 32, 16, num_warps=4, programs_per_sm=3),
    ("onchip", 2): ProductConfig(64, 64, 64, num_warps=4, programs_per_sm=3),
}


def _pointers(
    block_k: int, num_stages: int, precision: Literal["ieee", "tf32x3"], onchip_warps: int
) -> dict[tuple[Kind, int], ProductConfig]:
    """Architectures without TMA, or whose shared memory holds no more."""
    return {
        ("symmetric", 2): ProductConfig(128, 128, block_k, num_stages=num_stages),
        ("general", 2): ProductConfig(128, 128, block_k, num_stages=num_stages),
        ("update", 2): ProductConfig(64, 64, block_k, num_warps=4, num_stages=num_stages),
        ("symmetric", 4): ProductConfig(64, 64, 32, num_warps=4, num_stages=num_stages, precision=precision),
        ("general", 4): ProductConfig(64, 64, 32, num_warps=4, num_stages=num_stages, precision=precision),
        ("update", 4): ProductConfig(64, 64, 32, num_warps=4, num_stages=num_stages, precision=precision),
        ("reduce", 4): _REDUCE,
        ("onchip", 2): ProductConfig(64, 64, 64, num_warps=onchip_warps, num_stages=2),
    }


def _descriptors(num_stages: int, onchip_warps: int) -> dict[tuple[Kind, int], ProductConfig]:
    """Hopper and Blackwell: TMA, and tiles as large as their shared memory allows."""
    fp32 = ProductConfig(64, 64, 32, num_warps=4, tma=True, programs_per_sm=2, precision="tf32x3")
    return {
        ("symmetric", 2): ProductConfig(128, 128, 64, num_stages=4, tma=True),
        ("general", 2): ProductConfig(128, 256, 64, num_stages=num_stages, tma=True),
        # The parameters' tile lies in registers beside the sums, so the tile is half as large.
        ("update", 2): ProductConfig(128, 128, 64, num_stages=4, tma=True),
        ("symmetric", 4): fp32,
        ("general", 4): fp32,
        ("update", 4): fp32,
        ("reduce", 4): _REDUCE,
        ("onchip", 2): ProductConfig(64, 64, 64, num_warps=onchip_warps, tma=True, programs_per_sm=2),
    }


# (kind, bytes per operand element) -> configuration. Compiled, not yet timed: `fused-lw tune` measures alternatives.
SHIPPED: dict[str, dict[tuple[Kind, int], ProductConfig]] = {
    "interpreter": INTERPRETER,
    "sm_80": _pointers(32, 4, "tf32x3", onchip_warps=8),
    "sm_90": _descriptors(3, onchip_warps=4),
    "sm_100": _descriptors(4, onchip_warps=8),
    "sm_103": _descriptors(4, onchip_warps=8),
    "sm_120": _pointers(32, 3, "tf32x3", onchip_warps=8),
    "gfx942": _pointers(32, 2, "ieee", onchip_warps=4),
    "gfx950": _pointers(64, 2, "ieee", onchip_warps=4),
}

# Bytes of shared memory that one program can have.
_SHARED_MEMORY = {
    "sm_80": 166_912,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


def family(arch: str) -> str:
    """The architecture whose configurations run on `arch`: itself, or the newest one that it can stand in for."""
    if arch in SHIPPED:
        return arch
    known = [name for name in SHIPPED if name.startswith("sm_")]
    older = [name for name in known if arch.startswith("sm_") and int(name[3:]) <= int(arch[3:])]
    if not older:
        raise ValueError(f"no kernel configurations for {arch}; known: {', '.join(SHIPPED)}")
    return max(older, key=lambda name: int(name[3:]))


def is_valid(config: ProductConfig, arch: str, kind: Kind, itemsize: int) -> bool:
    """True if a configuration can be compiled for an architecture and makes sense there."""
    sizes = (config.tile_m, config.tile_n, config.block_k, config.num_warps)
    if any(size < 1 or size & (size - 1) for size in sizes) or min(sizes[:3]) < 16:
        return False
    if kind in ("symmetric", "reduce") and config.tile_m != config.tile_n:
        return False
    if kind == "onchip" and (config.tile_m != 64 or itemsize != 2):
        return False
    if config.tma and not (arch.startswith("sm_") and int(arch[3:]) >= 90):
        return False
    # More than 128 fp32 sums a thread leave no registers for anything else.
    if arch.startswith("sm_") and config.tile_m * config.tile_n > 128 * 32 * config.num_warps:
        return False
    staged = config.num_stages * (config.tile_m + config.tile_n) * config.block_k * itemsize
    return arch == "interpreter" or staged <= _SHARED_MEMORY[family(arch)]


def choose(arch: str, kind: Kind, operands: torch.dtype) -> ProductConfig:
    """The configuration of a launch on an architecture ("sm_90", "gfx942", "interpreter")."""
    tuned = _tuned(arch).get((kind, operands.itemsize))
    return tuned if tuned is not None else SHIPPED[family(arch)][kind, operands.itemsize]


def tuned_path(arch: str) -> Path:
    """Where `fused-lw tune` writes what it measured; FUSED_LW_CONFIG_DIR moves it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FUSED_LW_CONFIG_DIR") or Path(cache) / "fused_lw") / f"configs-{arch}.json"


@functools.cache
def _tuned(arch: str) -> dict[tuple[Kind, int], ProductConfig]:
    path = tuned_path(arch)
    return load_tuned(path, arch) if arch != "interpreter" and path.exists() else {}


def load_tuned(path: Path, arch: str) -> dict[tuple[Kind, int], ProductConfig]:
    """Read a table of measured configurations; a row that is not valid is an error, not ignored."""
    table: dict[tuple[Kind, int], ProductConfig] = {}
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["configs"]
    for row in rows:
        config = ProductConfig(**row["config"])
        if not is_valid(config, arch, row["kind"], row["itemsize"]):
            raise ValueError(f"{path} has a configuration that is not valid on {arch}: {row}")
        table[row["kind"], row["itemsize"]] = config
    return table


def save_tuned(path: Path, table: dict[tuple[Kind, int], ProductConfig], about: dict[str, str]) -> None:
    """Write a table that `load_tuned` reads, with what was measured where."""
    rows = [
        {"kind": kind, "itemsize": itemsize, "config": dataclasses.asdict(config)}
        for (kind, itemsize), config in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "configs": rows}, indent=1) + "\n", encoding="utf-8")
