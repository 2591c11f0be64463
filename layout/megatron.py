"""The published algorithm of Megatron-LM's layer-wise optimizer, number for number, and the rule it replaced.

Source: the layer-wise distributed optimizer of NVIDIA Megatron-LM. Both walk the parameters in backprop order, close
buckets on the way, and then place each bucket's parameters greedily.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_lw.layout.problem import ALIGNMENT, Assignment, Problem, round_up

# A bucket is worth closing once its largest parameter, repeated over all shards, would fill this much of it.
FILL = 0.9


def megatron(problem: Problem) -> Assignment:
    """Close where nothing can be absorbed any more; place in falling cost on the shard with the least compute."""
    # Exact beyond 64 bits too, with Python's integers.
    loads: NDArray[Any] = np.zeros(problem.dp_size, dtype=np.int64 if sum(problem.costs) < 2**62 else object)
    return [_place_by_cost(problem, items, loads) for items in close_buckets(problem, absorb=True)]


def numel(problem: Problem) -> Assignment:
    """The older rule: close at the threshold; place in falling element count on the shard with the lowest cursor."""
    return [_place_by_numel(problem, items) for items in close_buckets(problem, absorb=False)]


def close_buckets(problem: Problem, *, absorb: bool) -> list[range]:
    """Ranges of backprop order, one a bucket. A shared embedding is alone in its own."""
    buckets = []
    start = 0
    estimate = _Estimate(problem)
    for item, spec in enumerate(problem.specs):
        if item > start and (spec.shared_embedding or estimate.closes_before(item, absorb)):
            buckets.append(range(start, item))
            start = item
            estimate = _Estimate(problem)
        estimate.add(item)
        if spec.shared_embedding:
            buckets.append(range(item, item + 1))
            start = item + 1
            estimate = _Estimate(problem)
    if start < len(problem.specs):
        buckets.append(range(start, len(problem.specs)))
    return buckets


class _Estimate:
    """The open chunk of the walk, and shard heights if each parameter went to the lowest shard at once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.chunk_numel = 0
        self.largest = 0
        self.heights = [(0, shard) for shard in range(problem.dp_size)]  # a heap: lowest, first of equals
        self.tallest = 0

    def closes_before(self, item: int, absorb: bool) -> bool:
        problem = self.problem
        if problem.bucket_size is None:
            return False
        if self.chunk_numel < max(problem.bucket_size, int(problem.dp_size * self.largest * FILL)):
            return False
        end = round_up(self.heights[0][0], ALIGNMENT) + problem.numels[item]
        return not (absorb and end <= round_up(self.tallest, problem.divisor))

    def add(self, item: int) -> None:
        numel = self.problem.numels[item]
        lowest, shard = self.heights[0]
        end = round_up(lowest, ALIGNMENT) + numel
        heapq.heapreplace(self.heights, (end, shard))
        self.tallest = max(self.tallest, end)
        self.chunk_numel += numel
        self.largest = max(self.largest, numel)


def _place_by_cost(problem: Problem, items: Sequence[int], loads: NDArray[Any]) -> list[list[int]]:
    """Place one bucket; `loads` [dp_size] is the compute of all buckets so far and is updated."""
    shards: list[list[int]] = [[] for _ in range(problem.dp_size)]
    if problem.specs[items[0]].shared_embedding:  # alone in its bucket, and in shard 0 whatever that has to do
        loads[0] += problem.costs[items[0]]
        shards[0].append(items[0])
        return shards
    cursors = np.zeros(problem.dp_size, dtype=np.int64)
    # Kept in floating point as published: the comparison below must round as it does there.
    limit = sum(problem.numels[i] for i in items) / problem.dp_size * (1 + problem.numel_slack)
    for item in sorted(items, key=lambda i: -problem.costs[i]):
        ends = -(-cursors // ALIGNMENT) * ALIGNMENT + problem.numels[item]
        fitting = np.flatnonzero(ends <= limit)
        shard = int(fitting[np.argmin(loads[fitting])] if fitting.size else np.argmin(cursors))
        cursors[shard] = ends[shard]
        loads[shard] += problem.costs[item]
        shards[shard].append(item)
    return shards


def _place_by_numel(problem: Problem, items: Iterable[int]) -> list[list[int]]:
    cursors = [(0, shard) for shard in range(problem.dp_size)]
    shards: list[list[int]] = [[] for _ in range(problem.dp_size)]
    for item in sorted(items, key=lambda i: -problem.numels[i]):
        cursor, shard = cursors[0]
        heapq.heapreplace(cursors, (round_up(cursor, ALIGNMENT) + problem.numels[item], shard))
        shards[shard].append(item)
    return shards
