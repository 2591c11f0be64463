"""`plan`: parameters in, a frozen `Layout` out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from fused_lw.layout.balanced import balanced
from fused_lw.layout.cost import CostModel, CostTable, batch_cost, check_cost_model, lower_bound, ns_cost
from fused_lw.layout.layout import TABLE, Layout, lay_out
from fused_lw.layout.megatron import megatron, numel
from fused_lw.layout.problem import Assignment, Policy, Problem
from fused_lw.layout.spec import ParamSpec, check_specs, integer


def plan(
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    bucket_size: int | None = None,
    policy: Policy = "balanced",
    numel_slack: float = 0.3,
    high_nccl_busbw: bool = False,
    cost: CostModel | CostTable = "megatron",
) -> Layout:
    """Decide which rank owns which parameter and where it lies in the packed buffer.

    `params` come in forward order; buckets are filled in backprop order. `bucket_size` is in elements, None makes
    one bucket. `cost` is what balances the ranks: "megatron" and "flops" (see `ns_cost`) or a measured `CostTable`.
    `high_nccl_busbw` aligns buckets to 2**16 elements.

    "megatron" is Megatron-LM's algorithm, with `numel_slack` over the mean shard that it lets a shard hold in one
    bucket; "numel" the older rule. "balanced" never has a larger buffer or a higher maximum shard cost than
    "megatron" with the same arguments, nor fewer than 60% of its buckets, and lays same-shape parameters of a shard
    side by side in each bucket. Equal arguments give equal layouts in every process and on every platform.

    Raises ValueError naming the argument or the parameter: no elements, a name listed twice, no row left by
    gtp_size and pad_rows, either of them on something that is not 2-D, dp_size or bucket_size < 1, numel_slack < 0,
    an unknown policy or cost model, a shape that the cost table lacks. TypeError for a size that is no integer.
    """
    params = tuple(params)
    dp_size = integer(dp_size, "dp_size")
    bucket_size = None if bucket_size is None else integer(bucket_size, "bucket_size")
    if policy not in get_args(Policy):
        raise ValueError(f"unknown policy {policy!r}, expected one of {', '.join(get_args(Policy))}")
    if dp_size < 1:
        raise ValueError(f"dp_size must be at least 1, got {dp_size}")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 or None, got {bucket_size}")
    if not numel_slack >= 0:
        raise ValueError(f"numel_slack must be at least 0, got {numel_slack}")
    check_cost_model(cost)
    check_specs(params)

    costs = [ns_cost(spec, cost) for spec in params]
    problem = Problem.of(params, costs, dp_size, bucket_size, numel_slack, high_nccl_busbw)
    if policy == "megatron":
        assignment = megatron(problem)
    elif policy == "numel":
        assignment = numel(problem)
    else:
        assignment = balanced(
            problem,
            lambda spec, most: _batch_prices(spec, most, cost),
            lambda candidate: max(shard_costs(problem, candidate, cost)),
        )
    slots, buckets = lay_out(params, assignment, problem.divisor)
    return Layout(
        params=params,
        slots=slots,
        buckets=buckets,
        dp_size=dp_size,
        policy=policy,
        cost_model=TABLE + cost.name if isinstance(cost, CostTable) else cost,
        high_nccl_busbw=bool(high_nccl_busbw),
        shard_costs=tuple(shard_costs(problem, assignment, cost)),
        lower_bound=lower_bound(costs, dp_size)
        if isinstance(cost, str)
        else _table_bound(params, costs, cost, dp_size),
    )


def shard_costs(problem: Problem, assignment: Assignment, cost: CostModel | CostTable) -> list[int]:
    """Newton-Schulz cost of each rank, each oriented shape one batch over all buckets.

    An assignment may end early: shards that it does not list are empty.
    """
    totals = [0] * problem.dp_size
    if not isinstance(cost, CostTable):
        for shards in assignment:
            for d, shard in enumerate(shards):
                totals[d] += sum([problem.costs[i] for i in shard])
        return totals
    batches: dict[tuple[int, tuple[int, int]], list[ParamSpec]] = {}
    for shards in assignment:
        for d, shard in enumerate(shards):
            for i in shard:
                batches.setdefault((d, problem.specs[i].oriented), []).append(problem.specs[i])
    for (d, _), specs in batches.items():
        totals[d] += batch_cost(specs, cost)
    return totals


def _table_bound(params: Sequence[ParamSpec], costs: Sequence[int], table: CostTable, dp_size: int) -> int:
    """The costliest parameter, or every matrix at the batch that is cheapest per matrix, spread evenly."""
    matrices: Counter[tuple[int, int]] = Counter()
    for spec in params:
        matrices[spec.oriented] += spec.matrices
    total = sum(table.least_nanoseconds(shape, n) for shape, n in matrices.items() if n)
    return max(total // dp_size, *costs, 0)


def _batch_prices(spec: ParamSpec, most: int, cost: CostModel | CostTable) -> list[int]:
    if isinstance(cost, CostTable):
        return [cost.nanoseconds(spec.oriented, n * spec.matrices) if spec.matrices else 0 for n in range(most + 1)]
    one = ns_cost(spec, cost)
    return [n * one for n in range(most + 1)]
