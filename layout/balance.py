"""Local search on a whole plan: exchanges within a bucket that lower the costliest or the tallest shard.

Letters: B buckets, D shards, K classes (see packing.py), G bundles, P partners. The cost of a shard is a sum over
classes of a function of how many it owns in all buckets, so a measured batch time fits as well as a cost per matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fused_lw.layout.packing import IntArray

# A shard looks for a partner among this many of the best placed ones, and among fewer for exchanges of several items.
PARTNERS = 48
FEW_PARTNERS = 12


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
        # What an exchange gives or takes: nothing or one item; where that does not help two, or up to four alike.
        single = np.eye(len(sizes), dtype=np.int64)
        pairs = [a + b for a, b in itertools.combinations_with_replacement(single, 2)]
        small = np.concatenate([np.zeros_like(single[:1]), single])
        large = np.concatenate([small, pairs, 3 * single, 4 * single])
        self._tries = ((small, PARTNERS), (large, FEW_PARTNERS))  # bundles [G, K], number of partners

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
            for bundles, count in self._tries:
                partners = ranking[:count]
                found = [(self._exchange(b, giver, partners, bundles, cap=int(caps[b])), b) for b in self.free]
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
                for bundles, count in self._tries:
                    best = self._exchange(b, giver, ranking[:count], bundles, peak=peak)
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
        bundles: IntArray,  # [G, K]
        *,
        cap: int | None = None,
        peak: int | None = None,
    ) -> Exchange:
        """The best exchange of two bundles: lowest cost under a cap on the height, or lowest fill under a `peak`."""
        partners = partners[partners != giver]
        gives = bundles[np.all(bundles <= self.counts[b, giver], axis=1)]  # [g, K]
        if not partners.size:
            return Exchange(2**62, 0, bundles[0])
        takes = bundles  # [t, K]
        possible = np.all(takes <= self.counts[b, partners, None], axis=2)  # [P, t]
        disjoint = gives @ takes.T == 0  # [g, t]
        # Costs and fills of giver [g, t] and partners [P, g, t] after the exchange.
        less = self._cost(self.owned[giver] - gives)[:, None] - self.loads[giver]
        more = self._cost(self.owned[giver] + takes)[None] - self.loads[giver]
        cost_giver = self.loads[giver] + less + more
        mine = self.owned[partners, None]
        more = self._cost(mine + gives)
        less = self._cost(np.maximum(mine - takes, 0)) - self.loads[partners, None]
        cost_partner = more[:, :, None] + less[:, None, :]
        grown = (gives @ self.sizes)[:, None] - (takes @ self.sizes)[None]
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
        return Exchange(int(worse[p, g, t]), int(partners[p]), gives[g] - takes[t])

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
