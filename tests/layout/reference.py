"""Megatron's algorithm a second time, in plain loops over lists, and what must hold of every layout."""

from __future__ import annotations

import itertools
import math
from typing import Any

from fused_lw.layout import Layout, ParamSpec, ns_cost, plan


def up(value: int, divisor: int) -> int:
    while value % divisor:
        value += 1
    return value


def megatron_again(
    params: list[ParamSpec], dp_size: int, bucket_size: int | None, slack: float, high_nccl_busbw: bool
) -> tuple[dict[str, tuple[int, int, int, int]], list[tuple[int, int, int]]]:
    """Placements (start, end, bucket, shard) by name, and buckets (start, end, numel), the straightforward way."""
    end_divisor = math.lcm(dp_size, 128, 2**16) if high_nccl_busbw else math.lcm(dp_size, 128)
    divisor = math.lcm(64, end_divisor // dp_size)
    chunks: list[list[ParamSpec]] = [[]]
    est = [0] * dp_size
    for spec in reversed(params):
        if spec.shared_embedding:
            chunks += [[spec], []]
            est = [0] * dp_size
            continue
        chunk = chunks[-1]
        if chunk and bucket_size is not None:
            full = sum(p.numel for p in chunk) >= max(bucket_size, int(dp_size * max(p.numel for p in chunk) * 0.9))
            absorbed = up(min(est), 64) + spec.numel <= up(max(est), divisor)
            if full and not absorbed:
                chunks.append([])
                est = [0] * dp_size
        chunks[-1].append(spec)
        low = est.index(min(est))
        est[low] = up(est[low], 64) + spec.numel
    placements, buckets = {}, []
    loads = [0] * dp_size
    base = 0
    for b, chunk in enumerate(chunk for chunk in chunks if chunk):
        total = sum(spec.numel for spec in chunk)
        cursors = [0] * dp_size
        spots = []
        for spec in sorted(chunk, key=ns_cost, reverse=True):  # sorted keeps the order of equals, reversed or not
            fits = [s for s in range(dp_size) if up(cursors[s], 64) + spec.numel <= total / dp_size * (1 + slack)]
            if spec.shared_embedding:
                fits = [0]
            shard = min(fits, key=lambda s: loads[s]) if fits else min(range(dp_size), key=lambda s: cursors[s])
            start = up(cursors[shard], 64)
            cursors[shard] = start + spec.numel
            loads[shard] += ns_cost(spec)
            spots.append((spec, start, shard))
        size = up(max(cursors), divisor)
        for spec, start, shard in spots:
            at = base + shard * size + start
            placements[spec.name] = (at, at + spec.numel, b, shard)
        buckets.append((base, base + size * dp_size, total))
        base += size * dp_size
    return placements, buckets


def check_balanced(params: list[ParamSpec], **arguments: Any) -> tuple[Layout, Layout]:
    """Plan with both policies and hold "balanced" to everything it promises; returns (ours, Megatron's)."""
    ours = plan(params, policy="balanced", **arguments)
    theirs = plan(params, policy="megatron", **arguments)
    for layout in (ours, theirs):
        layout.validate()
        assert max(layout.shard_costs) >= layout.lower_bound
    assert ours.buffer_numel <= theirs.buffer_numel
    assert max(ours.shard_costs) <= max(theirs.shard_costs)
    assert len(ours.buckets) >= math.ceil(0.6 * len(theirs.buckets))
    embeddings = {ours.placements[spec.name].bucket for spec in params if spec.shared_embedding}
    bucket_size = arguments.get("bucket_size")
    for b, bucket in enumerate(ours.buckets[:-1]):
        assert bucket_size is None or bucket.numel >= bucket_size or {b, b + 1} & embeddings
    check_adjacent(ours)
    return ours, theirs


def check_adjacent(layout: Layout) -> None:
    """Same-shape parameters of a shard of a bucket touch, and so lie at one stride."""
    specs = {spec.name: spec for spec in layout.params}
    for rank in range(layout.dp_size):
        for part in layout.shard(rank):
            shapes = [(specs[name].full_shape, specs[name].shape) for name in part.names]
            changes = sum(a != b for a, b in itertools.pairwise(shapes))
            assert changes == max(0, len(set(shapes)) - 1), part
            full = [shape for shape, _ in shapes]
            assert sum(a != b for a, b in itertools.pairwise(full)) == max(0, len(set(full)) - 1), part
            end = part.start
            for name in part.names:
                start, end_of_param, *_ = layout.placements[name]
                assert start == -(-end // 64) * 64  # nothing between neighbours but alignment
                end = end_of_param
