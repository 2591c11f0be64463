"""The problem table of a grouped launch: one int64 row per product, pointers and sizes, walked by the kernels.

A launch covers all products of one kind and dtypes that a stage has. Rows are in the order of their first tile, and a
last row that holds only the total number of tiles ends the walk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_lw.kernels.coefficients import Triple
from fused_lw.kernels.configs import ProductConfig
from fused_lw.kernels.products import General, InputNorm, OnChip, Product, Reduce, Update

# Columns of the table. The kernels read them by these numbers.
FIRST_TILE = 0
MATRIX_TILES = 1
LEFT = 2
RIGHT = 3
OUT = 4
ROWS = 5
COLUMNS = 6
DEPTH = 7
LEFT_STRIDE = 8
RIGHT_STRIDE = 9
OUT_STRIDE = 10
ALPHA = 11
BETA = 12
DELTA = 13
GAMMA = 14
SQ_NORM = 15
SCALE = 16
EPS = 17
EPS_IS_ADDED = 18
NORM_FACTOR = 19
# Of a product that updates parameters: pointers to `products.Update`'s tensors.
UPDATE_ROWS = 20
UPDATE_RULES = 21
UPDATE_HYPER = 22
FIELDS = 24  # a multiple of 16 bytes


def tiles_per_matrix(product: Product, config: ProductConfig) -> int:
    """Tiles that are computed for one matrix: a triangle of a symmetric product's; on chip the matrix is one."""
    if isinstance(product, OnChip):
        return 1
    rows = -(-product.out.shape[1] // config.tile_m)
    if isinstance(product, General):
        return rows * -(-product.out.shape[2] // config.tile_n)
    return rows * (rows + 1) // 2


def build(products: Sequence[Product], config: ProductConfig) -> tuple[list[int], int]:
    """The table's rows, flattened, and the number of tiles."""
    table: list[int] = []
    first_tile = 0
    for product in products:
        tiles = tiles_per_matrix(product, config)
        update = product.update if isinstance(product, General) else None
        row = [first_tile, tiles, *_operands(product), *_norm(product.norm), *_update(update)]
        table += row + [0] * (FIELDS - len(row))
        first_tile += tiles * product.out.shape[0]
    return [*table, first_tile, *[0] * (FIELDS - 1)], first_tile


def _operands(p: Product) -> list[int]:
    _, rows, columns = p.out.shape
    depth = 0
    beta = delta = gamma = 0.0
    if isinstance(p, OnChip):
        left, right, alpha = p.X, p.X, 1.0
    elif isinstance(p, Reduce):
        # As far apart as the first two are all partial products.
        left, right, alpha, depth = p.partials[0], p.partials[1], p.alpha, p.partials.shape[0]
    elif isinstance(p, General):
        left, right, alpha, beta, depth = p.L, p.X, p.alpha, p.beta, p.L.shape[2]
    else:
        left, right, alpha, beta, depth = p.P, p.Q, p.alpha, p.beta, p.P.shape[2]
        delta, gamma = p.delta, p.gamma
    return [
        left.data_ptr(),
        right.data_ptr(),
        p.out.data_ptr(),
        rows,
        columns,
        depth,
        _stride(left),
        _stride(right),
        _stride(p.out),
        _bits(alpha),
        _bits(beta),
        _bits(delta),
        _bits(gamma),
    ]


def _norm(norm: InputNorm | None) -> list[int]:
    if norm is None:
        return [0, 0, 0, 0, 0]
    scale = 0 if norm.scale is None else norm.scale.data_ptr()
    return [norm.sq_norm.data_ptr(), scale, _bits(norm.eps), int(norm.eps_rule == "add"), _bits(norm.factor)]


def _update(update: Update | None) -> list[int]:
    return [] if update is None else [update.rows.data_ptr(), update.rules.data_ptr(), update.hyper.data_ptr()]


def _stride(matrices: Tensor) -> int:
    """Units of 16 bytes from row to row."""
    return matrices.stride(1) * matrices.element_size() // 16


def _bits(value: float) -> int:
    """A float32's bits as a non-negative integer."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def schedule_rows(schedule: tuple[Triple, ...]) -> list[int]:
    """A schedule's numbers as table entries, padded to 16 bytes."""
    numbers = [_bits(value) for triple in schedule for value in triple]
    return numbers + [0] * (len(numbers) % 2)


def to_device(rows: list[int], device: torch.device) -> Tensor:
    """The table as an int64 tensor on the device."""
    return torch.tensor(rows, dtype=torch.int64).to(device)
