"""Local search on a whole plan: exchanges within a bucket that lower the costliest or the tallest shard.

Letters: B buckets, D shards, K classes (see packing.py), G bundles, P partners. The cost of a shard is a sum over
classes of a function of how many it owns in all buckets, so a measured batch time fits as well as a cost per matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from fused_lw.layout.packing import IntArray

# A shard looks for a partner among this many of the best placed ones, and among fewer for exchanges of several items.
PARTNERS = 48
FEW_PARTNERS = 12
# With more classes than this there are fewer partners, and pairs of classes are not exchanged: the work stays bounded.
MANY_CLASSES = 24


class Exchange(NamedTuple):
    """`given` [K] goes from one shard to the partner (negative counts come back); `worse` is the higher of the two
    after it."""

    worse: int
    partner: int
    given: IntArray


class Plan:
    """Counts of every class in every shard of every bucket, and what follows from them."""

    def __init__(
        self,
        counts: IntArray,  # [B, D, K], becomes the plan's own
        cuts: Sequence[range],  # items of each bucket
        sizes: IntArray,  # [K]
        prices: IntArray,  # [K, N + 1] cost of 0, 1, ... N of a class, N at least what there are of it
        divisor: int,
        frozen: Sequence[int] = (),  # buckets that must stay as they are
    ) -> None:
        self.counts = counts
        self.cuts = cuts
        self.sizes = sizes
        self.prices = prices
        self._classes = np.arange(len(sizes))
        self.divisor = divisor
        self.free = [b for b in range(len(counts)) if b not in frozen]
        self.filled = counts @ sizes  # [B, D]
        self.owned = counts.sum(axis=0)  # [D, K]
        self.loads = self._cost(self.owned)  # [D]
        crowd = max(1, len(sizes) // MANY_CLASSES)
        self._tries = ((False, max(4, PARTNERS // crowd)), (True, max(4, FEW_PARTNERS // crowd)))  # several, partners

    @property
    def heights(self) -> IntArray:
        """Size of the shards of each bucket, [B]."""
        heights: IntArray = -(-self.filled.max(axis=1) // self.divisor) * self.divisor
        return heights

    @property
    def height(self) -> int:
        """Size of a shard over all buckets."""
        return int(self.heights.sum())

    @property
    def peak(self) -> int:
        """Cost of the costliest shard."""
        return int(self.loads.max())

    def lower_peak(self, height: int, good: int, steps: int) -> None:
        """Lower the costliest shard, again and again, until it costs `good` or less, `steps` times at most.

        Buckets may grow as long as `height` is not exceeded in all.
        """
        for _ in range(steps if self.free else 0):
            giver = int(np.argmax(self.loads))
            if self.loads[giver] <= good:
                return
            ranking = np.argsort(self.loads, kind="stable")
            heights = self.heights
            caps = heights + max(0, height - int(heights.sum())) // self.divisor * self.divisor
            for several, count in self._tries:
                partners = ranking[:count]
                found = [(self._exchange(b, giver, partners, several, cap=int(caps[b])), b) for b in self.free]
                if len(self.free) > 1:
                    found += [(self._swap(b, giver, partners), b) for b in self.free]
                best, b = min(found, key=lambda pair: pair[0].worse)
                if best.worse < self.loads[giver]:
                    self._move(b, giver, best)
                    break
            else:
                return

    def lower_heights(self, peak: int, steps: int) -> None:
        """Lower the tallest shard of each bucket, again and again, `steps` times at most, with no cost over `peak`.

        A thousandth over the mean is good enough.
        """
        for b in self.free:
            mean = int(self.filled[b].sum()) // len(self.loads)
            for _ in range(steps):
                giver = int(np.argmax(self.filled[b]))
                if self.filled[b, giver] <= mean + mean // 1000:
                    break
                ranking = np.argsort(self.filled[b], kind="stable")
                for several, count in self._tries:
                    best = self._exchange(b, giver, ranking[:count], several, peak=peak)
                    if best.worse < self.filled[b, giver]:
                        self._move(b, giver, best)
                        break
                else:
                    break

    def _exchange(
        self,
        b: int,
        giver: int,
        partners: IntArray,  # [P]
        several: bool,
        *,
        cap: int | None = None,
        peak: int | None = None,
    ) -> Exchange:
        """The best exchange of two bundles: lowest cost under a cap on the height, or lowest fill under a `peak`."""
        partners = partners[partners != giver]
        if not partners.size:
            return Exchange(2**62, 0, self.counts[b, giver])
        # Only the classes C that these shards hold matter.
        there, here = self.counts[b, partners], self.counts[b, giver]
        classes = np.flatnonzero(here + there.sum(axis=0))
        there, here, sizes, prices = there[:, classes], here[classes], self.sizes[classes], self.prices[classes]
        columns = np.arange(len(classes))
        bundles = _bundles(len(classes), several)  # [G, C]
        gives = bundles[np.all(bundles <= here, axis=1)]  # [g, C]
        takes = bundles[np.any(np.all(bundles <= there[:, None], axis=2), axis=0)]  # [t, C]
        possible = np.all(takes <= there[:, None], axis=2)  # [P, t]
        disjoint = gives @ takes.T == 0  # [g, t]

        def changed(owned: IntArray) -> IntArray:
            cost: IntArray = prices[columns, owned].sum(axis=-1)
            return cost

        # Costs and fills of giver [g, t] and partners [P, g, t] after the exchange.
        mine, theirs = self.owned[giver, classes], self.owned[partners][:, None, classes]
        before = changed(mine)
        cost_giver = self.loads[giver] + (changed(mine - gives) - before)[:, None] + (changed(mine + takes) - before)
        before = changed(theirs)
        more = changed(theirs + gives) - before
        less = changed(np.maximum(theirs - takes, 0)) - before
        cost_partner = self.loads[partners, None, None] + more[:, :, None] + less[:, None, :]
        grown = (gives @ sizes)[:, None] - (takes @ sizes)[None]
        fill_giver = self.filled[b, giver] - grown
        fill_partner = self.filled[b, partners, None, None] + grown
        cost = np.maximum(cost_giver, cost_partner)
        fill = np.maximum(fill_giver, fill_partner)
        allowed = possible[:, None, :] & disjoint
        if cap is not None:
            worse = np.where(allowed & (fill <= cap), cost, 2**62)
        else:
            worse = np.where(allowed & (cost <= peak), fill, 2**62)
        p, g, t = np.unravel_index(int(np.argmin(worse)), worse.shape)
        given = np.zeros_like(self.sizes)
        given[classes] = gives[g] - takes[t]
        return Exchange(int(worse[p, g, t]), int(partners[p]), given)

    def _swap(self, b: int, giver: int, partners: IntArray) -> Exchange:
        """All of the bucket's items for all of the partner's that costs least; it changes no height."""
        given = self.counts[b, giver] - self.counts[b, partners]  # [P, K]
        worse = np.maximum(self._cost(self.owned[giver] - given), self._cost(self.owned[partners] + given))
        p = int(np.argmin(worse))
        return Exchange(int(worse[p]), int(partners[p]), given[p])

    def _move(self, b: int, giver: int, exchange: Exchange) -> None:
        for shard, change in ((giver, -exchange.given), (exchange.partner, exchange.given)):
            self.counts[b, shard] += change
            self.owned[shard] += change
            self.filled[b, shard] += change @ self.sizes
            self.loads[shard] = self._cost(self.owned[shard])

    def _cost(self, owned: IntArray) -> IntArray:  # [..., K] -> [...]
        cost: IntArray = self.prices[self._classes, owned].sum(axis=-1)
        return cost


@cache
def _bundles(classes: int, several: bool) -> IntArray:  # [G, C]
    """What an exchange gives or takes: nothing or one item, or `several`: two, three or four alike, a pair."""
    single = np.eye(classes, dtype=np.int64)
    small = np.concatenate([np.zeros((1, classes), dtype=np.int64), single])
    if not several:
        return small
    pairs = itertools.combinations(single, 2) if classes <= MANY_CLASSES else ()
    return np.concatenate([small, *(n * single for n in (2, 3, 4)), *((a + b)[None] for a, b in pairs)])
