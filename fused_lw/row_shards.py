"""Matrices whose rows are sharded over a group: to one owner each, Newton-Schulz there, and back.

Momenta, master weights and parameters stay where they are. Two all-to-alls a step move the matrices that go into
Newton-Schulz and the updates that come out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_lw.kernels.device import Backend
from fused_lw.layout import Layout, ParamSpec, plan
from fused_lw.matrices import view_as_matrices
from fused_lw.step import collect_work
from fused_lw.update import MatrixRule, Updater


class RowSharded(NamedTuple):
    """A matrix (or stack, or convolution) of which every rank of a group holds consecutive elements."""

    name: str
    shape: tuple[int, ...]  # of the whole, without padding
    bounds: tuple[tuple[int, int], ...]  # elements [start, end) of the whole that each rank holds
    rule: int  # index of its MatrixRule


class Local(NamedTuple):
    """What this rank holds of a matrix, each [end - start]."""

    param: Tensor
    grad: Tensor | None  # None counts as zero where another rank has one
    momentum: Tensor
    master: Tensor | None  # fp32


class RowExchange:
    """Steps row-sharded matrices, each orthogonalized by one rank of the group.

    Owners are chosen by the layout planner, so that Newton-Schulz work is balanced. The owner keeps two buffers of
    its matrices in fp32 (fp64 for fp64 parameters).

    Args:
        matrices: the same on every rank of the group.
        group: the ranks that hold parts.
        like: a tensor of the parameters' dtype, on their device.
        groups: number of parameter groups, which `RowSharded.rule` counts.
    """

    def __init__(
        self,
        matrices: Sequence[RowSharded],
        group: dist.ProcessGroup,
        like: Tensor,
        groups: int,
        backend: Backend,
        max_scratch_bytes: int | None,
    ) -> None:
        self.matrices = tuple(matrices)
        self.group = group
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        self.layout: Layout = plan([ParamSpec(m.name, m.shape) for m in matrices], dp_size=world, cost="flops")
        self.owners = [slot.shard for slot in self.layout.slots]
        self._owned = [index for index, owner in enumerate(self.owners) if owner == self._rank]
        self._updater = Updater(backend, max_scratch_bytes)
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._device = like.device
        numels = [math.prod(matrices[index].shape) for index in self._owned]
        whole = torch.empty(2, sum(numels), dtype=self._dtype, device=like.device)
        # What goes into Newton-Schulz and what comes out, per owned matrix.
        self._inputs = dict(zip(self._owned, torch.split(whole[0], numels), strict=True))
        self._updates = {
            index: update.view(matrices[index].shape)
            for index, update in zip(self._owned, torch.split(whole[1], numels), strict=True)
        }
        self._groups: list[dict[str, Any]] = [{"params": [], "param_names": []} for _ in range(groups)]
        for index, update in self._updates.items():
            self._groups[matrices[index].rule]["params"].append(update)
            self._groups[matrices[index].rule]["param_names"].append(matrices[index].name)

    def step(self, held: Sequence[Local], rules: Sequence[MatrixRule]) -> None:
        """One step of every matrix of which some rank of the group has a gradient.

        Args:
            held: this rank's part of each matrix.
            rules: one per parameter group, equal on every rank of the group.
        """
        touched = torch.tensor([local.grad is not None for local in held], dtype=torch.uint8, device=self._device)
        dist.all_reduce(touched, op=dist.ReduceOp.MAX, group=self.group)
        stepped = [index for index, some in enumerate(touched.tolist()) if some]

        inputs = {index: _advance(held[index], rules[self.matrices[index].rule]) for index in stepped}
        received = self._exchange(stepped, inputs, to_owners=True)
        for (source, index), part in received.items():
            start, end = self.matrices[index].bounds[source]
            self._inputs[index][start:end].copy_(part)
        self._orthogonalize(stepped, rules)
        received = self._exchange(
            stepped, {index: self._updates[index].view(-1) for index in self._owned}, to_owners=False
        )
        for (_, index), update in received.items():
            matrix = self.matrices[index]
            spans = _scaled_spans(matrix, matrix.bounds[self._rank], rules[matrix.rule])
            _apply(held[index], update, rules[matrix.rule], spans)

    def _orthogonalize(self, stepped: Sequence[int], rules: Sequence[MatrixRule]) -> None:
        """Write minus the orthogonal factor of every input into its update."""
        # A step of zero weights by the whole of a gradient: momentum is behind it; decay, rate and scale are to come.
        bare = [
            replace(
                rule,
                scale=_unscaled,
                lr=1.0,
                weight_decay=0.0,
                momentum=0.0,
                nesterov=False,
                master_weights=False,
                momentum_dtype=None,
            )
            for rule in rules
        ]
        state: dict[Tensor, dict[str, Any]] = {}
        for index in set(self._owned).intersection(stepped):
            update = self._updates[index].zero_()
            update.grad = self._inputs[index].view(update.shape)
            state[update] = {bare[0].state_key: update.grad}
        self._updater(collect_work(self._groups, bare, state, self._updater), bare)
        for update in self._updates.values():
            update.grad = None

    def _exchange(
        self, stepped: Sequence[int], values: dict[int, Tensor], *, to_owners: bool
    ) -> dict[tuple[int, int], Tensor]:
        """One all-to-all. Returns (source rank, matrix) -> its elements.

        To owners, `values` are this rank's part of every matrix; back from them, the whole of every owned one.
        """
        world = range(dist.get_world_size(self.group))
        owned: list[list[int]] = [[] for _ in world]
        for index in stepped:
            owned[self.owners[index]].append(index)
        mine = owned[self._rank]
        bounds = [matrix.bounds for matrix in self.matrices]
        if to_owners:
            outgoing = [[values[i] for i in owned[rank]] for rank in world]
            incoming = [(rank, i, bounds[i][rank]) for rank in world for i in mine]
        else:
            outgoing = [[values[i][slice(*bounds[i][rank])] for i in mine] for rank in world]
            incoming = [(rank, i, bounds[i][self._rank]) for rank in world for i in owned[rank]]
        sizes = [end - start for _, _, (start, end) in incoming]
        per_rank = [0 for _ in world]
        for (rank, _, _), size in zip(incoming, sizes, strict=True):
            per_rank[rank] += size
        sent = [part for parts in outgoing for part in parts]
        send = torch.cat(sent).to(self._dtype) if sent else torch.empty(0, dtype=self._dtype, device=self._device)
        receive = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        sent_per_rank = [sum(part.numel() for part in parts) for parts in outgoing]
        dist.all_to_all_single(receive, send, per_rank, sent_per_rank, group=self.group)
        keys = [(rank, index) for rank, index, _ in incoming]
        return dict(zip(keys, torch.split(receive, sizes), strict=True))


def even_bounds(rows: int, row_numel: int, height: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Elements that each rank holds of `rows` rows when rank i has rows i * height to (i + 1) * height."""
    cuts = [min(rank * height, rows) * row_numel for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(cuts))


def _advance(local: Local, rule: MatrixRule) -> Tensor:
    """Update the momentum; returns what goes into Newton-Schulz. The arithmetic is that of copy-in."""
    momentum = local.momentum
    grad = torch.zeros_like(momentum) if local.grad is None else local.grad.to(momentum.dtype)
    momentum.lerp_(grad, 1 - rule.momentum)
    return grad.lerp(momentum, rule.momentum) if rule.nesterov else momentum


def _unscaled(rows: int, cols: int) -> float:
    return 1.0


def _scaled_spans(
    matrix: RowSharded, bounds: tuple[int, int], rule: MatrixRule
) -> list[tuple[int, int, float]]:  # elements [start, end) of this rank's, scale of the update
    """Where blocks of different shapes, and so different scales, lie in the part of a matrix that a rank holds."""
    start, end = bounds
    view = view_as_matrices(torch.empty(matrix.shape, device="meta"), rule.higher_dims, rule.split_rows)
    spans: list[tuple[int, int, float]] = []
    position = 0
    for block in view.blocks:
        first, position = position, position + block.rows * block.cols
        low, high, scale = max(first, start) - start, min(position, end) - start, rule.scale(block.rows, block.cols)
        if low >= high:
            continue
        if spans and spans[-1][2] == scale:
            low = spans.pop()[0]
        spans.append((low, high, scale))
    return spans


def _apply(local: Local, update: Tensor, rule: MatrixRule, spans: Sequence[tuple[int, int, float]]) -> None:
    """Decay and move the weights. The arithmetic is that of copy-out."""
    weights = local.param if local.master is None else local.master
    weights.mul_(1 - float(rule.lr) * float(rule.weight_decay))
    for start, end, scale in spans:
        weights[start:end].add_(update[start:end], alpha=float(rule.lr) * scale)
    if local.master is not None:
        local.param.copy_(local.master)
