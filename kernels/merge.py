"""Which products go out together: merges the stages of several programs into as few launches as possible.

A launch takes products of one kind and one pair of dtypes. Programs are straight lines of such keys, so the fewest
launches are the shortest common supersequence of those lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fused_lw.kernels.configs import Kind
from fused_lw.kernels.products import General, OnChip, Product, Reduce, Stage


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """What all products of one launch have in common."""

    kind: Kind
    operands: torch.dtype
    out: torch.dtype
    update: tuple[torch.dtype, bool] | None = None  # of the parameters: dtype, whether rounded stochastically


def key_of(product: Product) -> LaunchKey:
    if isinstance(product, General):
        update = product.update
        if update is None:
            return LaunchKey("general", product.X.dtype, product.out.dtype)
        return LaunchKey("update", product.X.dtype, product.out.dtype, (update.param, update.stochastic))
    if isinstance(product, Reduce):
        return LaunchKey("reduce", product.partials.dtype, product.out.dtype)
    if isinstance(product, OnChip):
        return LaunchKey("onchip", product.X.dtype, product.out.dtype)
    return LaunchKey("symmetric", product.P.dtype, product.out.dtype)


Line = tuple[LaunchKey, ...]


def merge(programs: Sequence[Sequence[Stage]]) -> list[tuple[LaunchKey, list[Product]]]:
    """The launches that run all programs, each program's stages in order.

    Products of one stage that need different keys run one after the other; they are independent, so any order will do.
    """
    steps = [_split(program) for program in programs]
    lines = [tuple(key for key, _ in program) for program in steps]
    common: Line = ()
    for line in sorted(set(lines), key=len, reverse=True):
        common = _shortest_common_supersequence(common, line)
    launches: list[tuple[LaunchKey, list[Product]]] = [(key, []) for key in common]
    for program in steps:
        position = 0
        for key, products in program:
            while launches[position][0] != key:
                position += 1
            launches[position][1].extend(products)
            position += 1
    return launches


def _split(program: Sequence[Stage]) -> list[tuple[LaunchKey, list[Product]]]:
    steps: list[tuple[LaunchKey, list[Product]]] = []
    for stage in program:
        by_key: dict[LaunchKey, list[Product]] = {}
        for product in stage:
            by_key.setdefault(key_of(product), []).append(product)
        steps += by_key.items()
    return steps


def _shortest_common_supersequence(a: Line, b: Line) -> Line:
    # length[i][j]: of the shortest supersequence of a[i:] and b[j:].
    length = [[len(a) - i + len(b) - j for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            if a[i] == b[j]:
                length[i][j] = 1 + length[i + 1][j + 1]
            else:
                length[i][j] = 1 + min(length[i + 1][j], length[i][j + 1])
    merged: list[LaunchKey] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            merged.append(a[i])
            i, j = i + 1, j + 1
        elif length[i + 1][j] <= length[i][j + 1]:
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return (*merged, *a[i:], *b[j:])
