"""Packing one bucket: its parameters are counted by class, and shards are filled with counts.

Letters: B buckets, D shards (dp_size), K classes. A class is one stored shape with one cost, so a bucket is a vector
of K counts and a packing is a matrix [D, K]. That makes a bucket of ten thousand equal experts as cheap as one of
ten. Sizes are aligned element counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def height_bound(
    counts: IntArray,  # [W, K] windows
    sizes: IntArray,  # [K] falling
    shards: int,
) -> IntArray:  # [W]
    """No packing of a window is lower: the mean, the largest item, and the pigeonhole over the largest items.

    Of any k * shards + 1 items some shard holds k + 1, so it is at least as tall as the k + 1 smallest of them.
    """
    bound = -(-(counts @ sizes) // shards)
    upto = np.cumsum(counts, axis=1)
    present = upto[:, -1]
    for k in range(4):
        last = k * shards + 1
        smallest = np.zeros(len(counts), dtype=np.int64)
        for rank in range(last - k, last + 1):
            smallest += sizes[np.minimum((upto < rank).sum(axis=1), len(sizes) - 1)]
        bound = np.maximum(bound, np.where(present >= last, smallest, 0))
    return bound


Fills = list[tuple[list[int], int]]  # counts [K] of a shard, and how many shards are filled like that


def first_fit(counts: Sequence[int], sizes: Sequence[int], shards: int, cap: int) -> Fills | None:
    """Fill shard after shard up to `cap`, large items first; None if items are left over.

    Equal shards are filled at once: a fill is repeated for as long as the items last.
    """
    left = list(counts)
    volume = sum(n * size for n, size in zip(counts, sizes, strict=True))
    fills: Fills = []
    while volume:
        if volume > shards * cap:
            return None
        room = cap
        repeats = shards
        fill = [0] * len(left)
        for k, n in enumerate(left):
            size = sizes[k]
            if n and size <= room:
                take = min(n, room // size)
                fill[k] = take
                room -= take * size
                repeats = min(repeats, n // take)
        if room == cap:
            return None
        shards -= repeats
        volume -= repeats * (cap - room)
        for k, take in enumerate(fill):
            left[k] -= repeats * take
        fills.append((fill, repeats))
    return fills


def lowest(counts: Sequence[int], sizes: Sequence[int], shards: int, bound: int) -> tuple[int, Fills]:
    """A packing that first fit finds, by bisection of the cap (MULTIFIT), and its height.

    `bound` is a height that nothing can go below. First fit is not monotone in the cap, so the result is good and
    not always the best; bisection ends at a thousandth of the bound.
    """
    low, cap, best = bound, bound, None
    while best is None:
        best = first_fit(counts, sizes, shards, cap)
        high = cap
        cap += (cap - bound) + bound // 32 + 1
    while high - low > bound // 1024:
        cap = (low + high) // 2
        found = first_fit(counts, sizes, shards, cap)
        if found is None:
            low = cap + 1
        else:
            best = found
            high = max(sum(n * size for n, size in zip(fill, sizes, strict=True)) for fill, _ in best)
    high = max(sum(n * size for n, size in zip(fill, sizes, strict=True)) for fill, _ in best)
    return high, best


class Packer:
    """First-fit packings of buckets by their counts of each class; layers repeat, so most are looked up."""

    def __init__(self, sizes: IntArray, shards: int, divisor: int) -> None:  # sizes [K], falling
        self.sizes = sizes
        self.shards = shards
        self.divisor = divisor
        self._known: dict[tuple[int, ...], tuple[int, Fills]] = {}

    def __call__(self, counts: IntArray) -> tuple[int, Fills]:  # [K]
        """Height of a bucket's shards, a multiple of the divisor, and their fills."""
        key = tuple(counts.tolist())
        if key not in self._known:
            bound = int(height_bound(counts[None], self.sizes, self.shards)[0])
            # A bucket of a model with many shapes holds few of them.
            there = np.flatnonzero(counts)
            height, found = lowest(counts[there].tolist(), self.sizes[there].tolist(), self.shards, bound)
            fills: Fills = []
            for fill, repeats in found:
                full = np.zeros_like(counts)
                full[there] = fill
                fills.append((full.tolist(), repeats))
            self._known[key] = (-(-height // self.divisor) * self.divisor, fills)
        return self._known[key]


def spread(
    counts: Sequence[int],  # [K]
    sizes: Sequence[int],  # [K]
    costs: Sequence[int],  # [K]
    loads: IntArray,  # [D] cost of each shard in the other buckets
    cap: int,
) -> IntArray | None:  # [D, K]
    """Longest processing time first: costly items to the least loaded shard with room; None if one has no room."""
    shards = len(loads)
    packing = np.zeros((shards, len(counts)), dtype=np.int64)
    room = [cap] * shards
    heap = [(int(load), shard) for shard, load in enumerate(loads)]
    heapq.heapify(heap)
    for k in sorted(range(len(counts)), key=lambda k: (-costs[k], -sizes[k])):
        full = []
        for _ in range(counts[k]):
            while heap and room[heap[0][1]] < sizes[k]:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            load, shard = heap[0]
            heapq.heapreplace(heap, (load + costs[k], shard))
            room[shard] -= sizes[k]
            packing[shard, k] += 1
        for entry in full:
            heapq.heappush(heap, entry)
    return packing


def match(
    fills: Fills,
    costs: IntArray,  # [K]
    loads: IntArray,  # [D] cost of each shard in the other buckets
) -> IntArray:  # [D, K]
    """Give the costliest fill to the least loaded shard, and so on."""
    packing = np.zeros((len(loads), len(costs)), dtype=np.int64)
    rows = np.repeat(np.array([fill for fill, _ in fills], dtype=np.int64), [n for _, n in fills], axis=0)
    packing[: len(rows)] = rows
    return deal(packing, costs, loads)


def deal(packing: IntArray, costs: IntArray, loads: IntArray) -> IntArray:
    """The rows of a packing [D, K] permuted so that the costliest goes to the least loaded shard, and so on."""
    dealt = np.empty_like(packing)
    dealt[np.argsort(loads, kind="stable")] = packing[np.argsort(-(packing @ costs), kind="stable")]
    return dealt


def stretch(counts: IntArray, costs: IntArray, shards: int) -> IntArray:  # [K], [K] -> [D, K]
    """Class after class along the shards, an equal cost to each: few classes a shard, so large batches."""
    kinds = np.repeat(np.arange(len(counts)), counts)
    until = np.cumsum(costs[kinds])
    total = int(until[-1])
    ends = np.array([2 * total * (shard + 1) // shards for shard in range(shards)])
    shard = np.searchsorted(ends, 2 * until - costs[kinds], side="right")
    packing = np.zeros((shards, len(counts)), dtype=np.int64)
    np.add.at(packing, (np.minimum(shard, shards - 1), kinds), 1)
    return packing
