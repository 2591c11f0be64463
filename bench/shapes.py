"""Which batches of matrices are measured: from a model's real counts per rank, a list, or a sweep.

Shapes are oriented: r rows, s columns, r <= s.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from fused_lw.layout import Layout, load_model, model_names, model_specs, plan

# Rows and s/r of a sweep: heads and routers, experts, dense matrices.
SWEEP_ROWS = (64, 256, 1024, 2048, 4096)
SWEEP_RATIOS = (1, 2, 4)

_SHAPE = re.compile(r"(\d+)x(\d+)(?:\*(\d+))?")


class Batch(NamedTuple):
    """`size` matrices of r x s that run as one batch."""

    size: int
    r: int
    s: int

    def __str__(self) -> str:
        return f"{self.r}x{self.s}*{self.size}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="a published model: " + ", ".join(model_names()))
    what.add_argument("--shapes", metavar="RxS*B,...", help="batches, like 2688x1856*4,4096x4096")
    what.add_argument("--sweep", action="store_true", help="64 to 4,096 rows, square to 4 times as long")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="of --model: its counts on one of N ranks")
    parser.add_argument("--ep", type=int, default=1, metavar="E", help="of --model: experts lie on E of the ranks")
    parser.add_argument("--scale-down", type=int, default=1, metavar="K", help="divide every dimension by this")
    parser.add_argument("--max-batch", type=int, metavar="B", help="measure at most so many matrices of a shape")


def from_arguments(args: argparse.Namespace) -> list[Batch]:
    """The batches that the command line names. ValueError says what is wrong with it."""
    for name in ("dp", "ep", "scale_down", "max_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.model is None and (args.dp, args.ep) != (1, 1):
        raise ValueError("--dp and --ep say how a model is distributed: they need --model")
    if args.model is not None:
        batches = of_model(args.model, args.dp, args.ep)
    elif args.shapes is not None:
        batches = parse(args.shapes)
    else:
        batches = [Batch(1, r, r * ratio) for r in SWEEP_ROWS for ratio in SWEEP_RATIOS]
    return cut(batches, args.scale_down, args.max_batch)


def parse(text: str) -> list[Batch]:
    """Batches from "2688x1856*4,4096x4096": rows x columns, times how many (1)."""
    counts: Counter[tuple[int, int]] = Counter()
    for item in text.split(","):
        match = _SHAPE.fullmatch(item.strip().lower())
        if match is None:
            raise ValueError(f"{item.strip()!r} is no shape: write rows x columns * how many, like 2688x1856*4")
        rows, cols, count = int(match[1]), int(match[2]), int(match[3] or 1)
        if not rows or not cols or not count:
            raise ValueError(f"{item.strip()!r}: rows, columns and count must be at least 1")
        counts[min(rows, cols), max(rows, cols)] += count
    return _batches(counts)


def of_model(name: str, dp: int = 1, ep: int = 1) -> list[Batch]:
    """What the most loaded of `dp` data-parallel ranks runs of a model, its experts spread over `ep` of them.

    Dense matrices are planned over all `dp` ranks, experts over the `dp / ep` ranks that hold the same experts.
    """
    if dp == 1:
        return _batches(Counter(_oriented(m.rows, m.cols) for m in load_model(name, ep=ep)))
    if dp % ep:
        raise ValueError(f"--ep {ep} does not divide --dp {dp}")
    layouts: list[tuple[Layout, int]] = []  # and how many ranks share one of its shards
    for kind, sharing in (("dense", 1), ("expert", ep)):
        specs = model_specs(name, ep=ep, kinds=(kind,))
        if specs:
            layouts.append((plan(specs, dp_size=dp // sharing), sharing))
    slowest = max(range(dp), key=lambda rank: sum(layout.shard_costs[rank // sharing] for layout, sharing in layouts))
    counts: Counter[tuple[int, int]] = Counter()
    for layout, sharing in layouts:
        for group in layout.groups(slowest // sharing):
            counts[_oriented(*group.shape)] += len(group.names)
    return _batches(counts)


def cut(batches: Iterable[Batch], scale_down: int, max_batch: int | None) -> list[Batch]:
    """The batches with every dimension divided, and no more than `max_batch` matrices each."""
    counts: Counter[tuple[int, int]] = Counter()
    for count, r, s in batches:
        counts[max(1, r // scale_down), max(1, s // scale_down)] += count
    return [b._replace(size=min(b.size, max_batch or b.size)) for b in _batches(counts)]


def _batches(counts: Counter[tuple[int, int]]) -> list[Batch]:
    return [Batch(count, r, s) for (r, s), count in sorted(counts.items())]


def _oriented(rows: int, cols: int) -> tuple[int, int]:
    return min(rows, cols), max(rows, cols)
