"""Where buckets end: a shortest path over cut positions, with the packed height of each bucket as its length.

Letters: P cut positions, W windows (buckets that could be), K classes (see packing.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fused_lw.layout.packing import IntArray, Packer, height_bound

# Work of one search. Longer models are searched piece by piece, so the time grows with their length only.
REFERENCE_BUCKETS = 32
MAX_POSITIONS = 768
MAX_STEPS = 16_000  # cut positions times shortest paths
FEW_CLASSES = 16  # both are less, in proportion, with more classes than this


def cut(
    packer: Packer,
    upto: IntArray,  # [n + 1, K] items of each class before each position
    numels: IntArray,  # [n + 1] elements before each position
    bucket_size: int,
    reference: Sequence[int],  # position where the first bucket of Megatron's starts, and where each of them ends
) -> list[int]:
    """Positions where buckets end, of least total height.

    There are at least 60% of the reference's buckets and at most as many; every one but the last holds `bucket_size`
    elements or more.
    """
    ends = [reference[0]]
    for i in range(1, len(reference), REFERENCE_BUCKETS):
        stops = reference[i : i + REFERENCE_BUCKETS]
        piece = [ends[-1], *stops]
        windows = _Windows(packer, upto, numels, piece, bucket_size, stops[-1] == reference[-1])
        ends += windows.search(fewest_buckets(len(stops)), len(stops))
    return ends[1:]


def fewest_buckets(reference: int) -> int:
    """How many buckets there must be where Megatron has `reference`: communication overlaps only in several."""
    return -(-6 * reference // 10)


class _Windows:
    """All buckets between the cut positions of one piece, with a length each: a bound until it has been packed."""

    def __init__(
        self,
        packer: Packer,
        upto: IntArray,
        numels: IntArray,
        reference: Sequence[int],
        bucket_size: int,
        is_last: bool,  # of the pieces: its last bucket may be small
    ) -> None:
        start, end = reference[0], reference[-1]
        self.crowd = max(1, len(packer.sizes) // FEW_CLASSES)
        step = 1
        while (end - start) // step > MAX_POSITIONS // self.crowd:
            step *= 2  # powers of two, so that runs of equal experts are still cut at multiples of most dp sizes
        self.packer = packer
        self.positions = np.union1d(np.arange(start, end, step), np.array(reference))
        at = numels[self.positions]
        # A bucket longer than three times the reference's mean is looked at only if the reference has such a one.
        longest = max(3 * int(at[-1] - at[0]) // (len(reference) - 1), *np.diff(numels[list(reference)]).tolist())
        # Windows that stop at position p start at positions first[p] to last[p] - 1.
        self.first = np.searchsorted(at, at - longest, side="left")
        self.last = np.searchsorted(at, at - bucket_size, side="right")
        if is_last:
            self.last[-1] = len(at) - 1
        self.last = np.maximum(self.first, np.minimum(self.last, np.arange(len(at))))
        self.offsets = np.concatenate([[0], np.cumsum(self.last - self.first)])
        self.starts = np.concatenate([np.arange(a, b) for a, b in zip(self.first, self.last, strict=True)])
        self.stops = np.repeat(np.arange(len(at)), self.last - self.first)
        windows = upto[self.positions[self.stops]] - upto[self.positions[self.starts]]
        # Layers repeat: most windows hold the same counts as another.
        self.which = _equal_rows(windows)
        _, rows = np.unique(self.which, return_index=True)
        self.unique = windows[rows]
        bounds = height_bound(self.unique, packer.sizes, packer.shards)
        self.lengths = -(-bounds // packer.divisor) * packer.divisor
        self.packed = np.zeros(len(self.unique), dtype=bool)
        for a, b in itertools.pairwise(reference):
            edge = self._edge(int(np.searchsorted(self.positions, a)), int(np.searchsorted(self.positions, b)))
            self._pack(int(self.which[edge]))

    def _edge(self, start: int, stop: int) -> int:
        return int(self.offsets[stop] + start - self.first[stop])

    def _pack(self, window: int) -> None:
        if not self.packed[window]:
            self.lengths[window], _ = self.packer(self.unique[window])
            self.packed[window] = True

    def search(self, fewest: int, most: int) -> list[int]:
        """Ends of the buckets of the shortest path that holds no bound.

        Only windows of paths that look shortest, for some number of buckets, are packed. The search ends when the
        best path holds no bound, or with the best of what is packed so far (the reference is among it).
        """
        for _ in range(max(1, MAX_STEPS // self.crowd // len(self.positions))):
            paths = self._shortest(self.lengths, fewest, most)
            if all(self.packed[self.which[edge]] for edge in paths[0]):
                break
            for edge in itertools.chain.from_iterable(paths):
                self._pack(int(self.which[edge]))
        else:
            paths = self._shortest(np.where(self.packed, self.lengths, 2**56), fewest, most)
        return [int(self.positions[self.stops[edge]]) for edge in paths[0]]

    def _shortest(self, lengths: IntArray, fewest: int, most: int) -> list[list[int]]:
        """Edges of the path of least total length for each number of windows from `fewest` to `most`, best first.

        Of paths that differ by less than a thousandth of a mean bucket the one with more buckets is better: more
        buckets overlap better.
        """
        far = np.int64(2**61)
        total = np.full((len(self.positions), most + 1), far)  # [position, windows so far]
        via = np.zeros((len(self.positions), most + 1), dtype=np.int64)
        total[0, 0] = 0
        edges = lengths[self.which]
        columns = np.arange(most)
        for stop in np.flatnonzero(self.last > self.first).tolist():
            a, b = self.first[stop], self.last[stop]
            through = edges[self.offsets[stop] : self.offsets[stop + 1], None] + total[a:b, :-1]
            best = through.argmin(axis=0)
            total[stop, 1:] = np.minimum(through[best, columns], far)
            via[stop, 1:] = self.offsets[stop] + best
        ends = total[-1, fewest:]
        better = ends - int(ends.min()) // most // 1024 * np.arange(len(ends))
        paths = []
        for windows in (fewest + np.argsort(better, kind="stable")).tolist():
            path: list[int] = []
            stop = len(self.positions) - 1
            if total[stop, windows] == far:
                continue
            for k in range(windows, 0, -1):
                path.append(int(via[stop, k]))
                stop = int(self.starts[path[-1]])
            paths.append(path[::-1])
        return paths


def _equal_rows(rows: IntArray) -> IntArray:  # [W, K] not negative -> [W]
    """Numbers 0, 1, ... that are equal where rows are: np.unique over an axis, many times faster."""
    number = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        _, number = np.unique(number * (int(column.max()) + 1) + column, return_inverse=True)
    return number
