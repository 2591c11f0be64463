"""The default policy: cuts and placements chosen for a small buffer and equal Newton-Schulz cost at once.

1. Megatron's plan is made first: the guarantees are measured against it, and it is the last resort.
2. Buckets are cut for the least packed height (cuts.py).
3. They are packed one after another by cost under a cap on the height, for caps from tight to loose, and a local
   search evens out the costs of the shards (balance.py).
4. Of the plans that are no worse than Megatron's, in buffer and in maximum cost, the one with the least sum of the
   two, each relative to a lower bound, wins; of equal ones that with the fewest batches.
5. Same-shape parameters are laid side by side in their shard.

The search counts parameters by class: one size in the buffer and one oriented shape, so one cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fused_lw.layout.balance import Plan
from fused_lw.layout.cuts import cut
from fused_lw.layout.megatron import megatron
from fused_lw.layout.packing import IntArray, Packer, deal, match, spread, stretch
from fused_lw.layout.problem import ALIGNMENT, Assignment, Problem, round_up
from fused_lw.layout.spec import ParamSpec

# How much taller than the lowest packing found a plan may become, in thousandths; one try for each.
LOOSENESS = (0, 5, 20, 60, 150)
# Buffer and maximum cost together within two thousandths of their bounds: good enough to stop.
GOOD_SCORE = 2_002_000
# Plans are equally good within two tenths of a thousandth; then the one with fewer batches wins.
SAME_SCORE = 200
# Exchanges of one local search, at most.
STEPS = 200

# Costs of batches of 0, 1, ... n parameters like a spec.
Prices = Callable[[ParamSpec, int], list[int]]


def balanced(problem: Problem, prices: Prices, peak_of: Callable[[Assignment], int]) -> Assignment:
    """The best plan found. `peak_of` gives the exact cost of the costliest shard of an assignment."""
    if not problem.specs:
        return []
    reference = megatron(problem)
    # Of equal shards the first is always taken, so parameters never lie beyond as many shards as there are of them.
    shards = min(problem.dp_size, len(problem.specs))
    best = by_shape(problem, [bucket[:shards] for bucket in reference])
    height = sum(problem.height(bucket) for bucket in best)
    peak = peak_of(best)
    search = _Search(problem, prices, best)
    best_rank = (search.score(height, peak) // SAME_SCORE, _owned_shapes(problem, best))
    for plan in search.plans(height, peak):
        # The search's peak is a little off for costs beyond 64 bits and for measured batches: it only screens.
        if plan.height > height or search.score(plan.height, plan.peak * search.scale) // SAME_SCORE > best_rank[0]:
            continue
        assignment = search.assignment(plan)
        exact = peak_of(assignment)
        rank = (search.score(plan.height, exact) // SAME_SCORE, _owned_shapes(problem, assignment))
        if exact <= peak and rank < best_rank:
            best, best_rank = assignment, rank
        if exact <= peak and best_rank[0] * SAME_SCORE <= GOOD_SCORE:
            break
    empty: list[list[int]] = [[] for _ in range(problem.dp_size - shards)]
    return [[*bucket, *empty] for bucket in best]


def _owned_shapes(problem: Problem, assignment: Assignment) -> int:
    """Distinct oriented shapes of each rank, over all ranks: the batches that run."""
    shapes = [spec.oriented for spec in problem.specs]
    return len({(d, shapes[i]) for shards in assignment for d, shard in enumerate(shards) for i in shard})


def by_shape(problem: Problem, assignment: Assignment) -> Assignment:
    """The same owners, with the items of each shard ordered by shape, then in backprop order."""
    specs = problem.specs
    return [
        [sorted(shard, key=lambda i: (specs[i].oriented, specs[i].full_shape, specs[i].shape, i)) for shard in shards]
        for shards in assignment
    ]


class _Search:
    """A problem in counts of classes. Letters as in packing.py, but D only as many shards as the reference has, and
    n items.
    """

    def __init__(self, problem: Problem, prices: Prices, reference: Assignment) -> None:
        self.problem = problem
        self.reference = reference
        self.shards = len(reference[0])
        keys = [
            (round_up(numel, ALIGNMENT), spec.matrices, spec.oriented)
            for spec, numel in zip(problem.specs, problem.numels, strict=True)
        ]
        # Large ones first, which is what first fit wants.
        classes = sorted(set(keys), reverse=True)
        index = {key: k for k, key in enumerate(classes)}
        self.kinds = np.array([index[key] for key in keys], dtype=np.int64)  # [n] class of each item
        self.upto: IntArray = np.zeros((len(keys) + 1, len(classes)), dtype=np.int64)  # items before each position
        self.upto[np.arange(1, len(keys) + 1), self.kinds] = 1
        self.upto = self.upto.cumsum(axis=0)
        self.sizes = np.array([size for size, *_ in classes], dtype=np.int64)  # [K]
        self.packer = Packer(self.sizes, self.shards, problem.divisor)

        examples = dict(zip(self.kinds.tolist(), problem.specs, strict=True))
        most = int(self.upto[-1].max()) + 4  # a search looks that much further
        exact = [prices(examples[k], most) for k in range(len(classes))]
        self.scale = 1 + sum(row[-1] for row in exact) // 2**61  # sums of costs must fit 64 bits
        self.prices = np.array([[cost // self.scale for cost in row] for row in exact], dtype=np.int64)
        self.costs = self.prices[:, 1]  # [K] of one item
        self.batches_pay = any(row[2] != 2 * row[1] for row in exact)
        total = sum(row[n] for row, n in zip(exact, self.upto[-1].tolist(), strict=True))
        self.least_peak: int = max(1, total // problem.dp_size, *(row[1] for row in exact))
        self.least_height = -(-sum(problem.numels) // problem.dp_size)

    def score(self, height: int, peak: int) -> int:
        """Buffer and costliest shard, each in millionths of its lower bound: padding costs as much as imbalance."""
        return height * 10**6 // self.least_height + peak * 10**6 // self.least_peak

    def plans(self, allowed_height: int, allowed_peak: int) -> Iterator[Plan]:
        """Plans to choose from, tight ones first."""
        cuts = self.cuts()
        lowest = sum(self.packer(self.window(items))[0] for items in cuts)
        allowed_peak //= self.scale
        good = min(allowed_peak, (self.least_peak + self.least_peak // 1000) // self.scale)
        scores: list[int] = []
        for loose in LOOSENESS:
            plan = self.pack(cuts, loose)
            plan.lower_peak(lowest + lowest * loose // 1000, good, STEPS)
            if plan.peak > allowed_peak:
                plan.lower_peak(allowed_height, good, STEPS)
            if plan.peak <= allowed_peak:
                yield plan
                plan.lower_heights(allowed_peak, STEPS)
                yield plan
                scores.append(self.score(plan.height, plan.peak * self.scale))
                # Looser plans balance better and pad more: two in a row that do not win tell that it no longer pays.
                if min(scores) not in scores[-2:]:
                    break
        last_resorts = [self.reference_plan()]
        if self.batches_pay:
            last_resorts.append(self.by_class(cuts))
        for plan in last_resorts:
            plan.lower_peak(allowed_height, good, STEPS)
            plan.lower_heights(max(plan.peak, allowed_peak), STEPS)
            yield plan

    def cuts(self) -> list[range]:
        """Buckets of least packed height; a shared embedding is alone in its own."""
        specs = self.problem.specs
        ends = [0, *itertools.accumulate(sum(map(len, shards)) for shards in self.reference)]
        if self.problem.bucket_size is None:
            return [range(a, b) for a, b in itertools.pairwise(ends)]
        numels = np.concatenate([[0], np.cumsum(self.problem.numels)])
        # Runs of the reference's buckets between shared embeddings, each as [start, end, end, ...].
        runs = [[0]]
        for a, b in itertools.pairwise(ends):
            if specs[a].shared_embedding:
                runs.append([b])
            else:
                runs[-1].append(b)
        buckets: list[range] = []
        for run in runs:
            if run[0]:
                buckets.append(range(run[0] - 1, run[0]))
            new = cut(self.packer, self.upto, numels, self.problem.bucket_size, run) if len(run) > 1 else []
            buckets += [range(a, b) for a, b in itertools.pairwise([run[0], *new])]
        return buckets

    def window(self, items: range) -> IntArray:
        counts: IntArray = self.upto[items.stop] - self.upto[items.start]
        return counts

    def pack(self, cuts: Sequence[range], loose: int) -> Plan:
        """Pack buckets one after another, costly ones first, each `loose` thousandths over its lowest height."""
        counts = np.zeros((len(cuts), self.shards, len(self.sizes)), dtype=np.int64)
        loads = np.zeros(self.shards, dtype=np.int64)
        windows = [self.window(items) for items in cuts]
        order = sorted(range(len(cuts)), key=lambda b: -int(windows[b] @ self.costs))
        for b in order:
            if self.problem.specs[cuts[b].start].shared_embedding:
                counts[b, 0] = windows[b]
            else:
                lowest, fills = self.packer(windows[b])
                cap = lowest + lowest * loose // 1000
                packing = spread(windows[b].tolist(), self.sizes.tolist(), self.costs.tolist(), loads, cap)
                counts[b] = match(fills, self.costs, loads) if packing is None else packing
            loads += counts[b] @ self.costs
        for b in order:
            if not self.problem.specs[cuts[b].start].shared_embedding:
                others = loads - counts[b] @ self.costs
                counts[b] = deal(counts[b], self.costs, others)
                loads = others + counts[b] @ self.costs
        return self.plan(counts, cuts)

    def by_class(self, cuts: Sequence[range]) -> Plan:
        """Few classes a shard, whatever the height."""
        counts = np.zeros((len(cuts), self.shards, len(self.sizes)), dtype=np.int64)
        for b, items in enumerate(cuts):
            if self.problem.specs[items.start].shared_embedding:
                counts[b, 0] = self.window(items)
            else:
                counts[b] = stretch(self.window(items), self.costs, self.shards)
        return self.plan(counts, cuts)

    def plan(self, counts: IntArray, cuts: Sequence[range]) -> Plan:
        frozen = [b for b, items in enumerate(cuts) if self.problem.specs[items.start].shared_embedding]
        return Plan(counts, cuts, self.sizes, self.prices, self.problem.divisor, frozen)

    def reference_plan(self) -> Plan:
        """The reference's own cuts and placements."""
        counts = np.zeros((len(self.reference), self.shards, len(self.sizes)), dtype=np.int64)
        ends = [0]
        for b, shards in enumerate(self.reference):
            for d, items in enumerate(shards):
                np.add.at(counts[b, d], self.kinds[items], 1)
            ends.append(ends[-1] + sum(map(len, shards)))
        return self.plan(counts, [range(a, b) for a, b in itertools.pairwise(ends)])

    def assignment(self, plan: Plan) -> Assignment:
        """Items for counts. Shapes of one class (a matrix and its transpose) are dealt in order over the shards, so
        that most shards get only one of them."""
        specs = self.problem.specs
        buckets: Assignment = []
        for items, counts in zip(plan.cuts, plan.counts, strict=True):
            members: list[list[int]] = [[] for _ in self.sizes]
            for item in items:
                members[self.kinds[item]].append(item)
            shards: list[list[int]] = [[] for _ in range(self.shards)]
            for k, ordered in enumerate(members):
                ordered.sort(key=lambda i: (specs[i].full_shape, specs[i].shape))
                taken = 0
                for d in np.flatnonzero(counts[:, k]).tolist():
                    shards[d] += ordered[taken : taken + int(counts[d, k])]
                    taken += int(counts[d, k])
            buckets.append(shards)
        return by_shape(self.problem, buckets)
