"""The rule of Megatron-Core's `TensorParallelMuon`: Emerging-Optimizers' Muon, with fused QKV and rows over GTP.

A query group's rows of Q, K and V lie together, so the matrix Q is not one block of rows; and a weight's rows may be
sharded over a GTP group. Such parameters are staged: their momentum is updated where it lies, what Newton-Schulz takes
is gathered and cut into matrices, and the update is cut back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_lw.known_rules import EmergingOptimizers
from fused_lw.rules import Part, names_in, register_rule, title
from fused_lw.step import step_groups
from fused_lw.update import MatrixRule, Updater


@dataclass(frozen=True)
class _Stage:
    """How a parameter's rows become matrices."""

    gtp_group: Any = None  # process group over which the rows are sharded, or None
    padding: int = 0  # last rows of the gathered matrix that never enter Newton-Schulz
    qkv_sizes: tuple[int, ...] | None = None  # rows of each projection in one query group

    def gather(self, local: Tensor) -> list[Tensor]:  # [m, n] -> [m_0, n], [m_1, n], ...
        full = local
        if self.gtp_group is not None:
            shards = [torch.empty_like(local) for _ in range(self.gtp_group.size())]
            torch.distributed.all_gather(shards, local.contiguous(), self.gtp_group)
            full = torch.cat(shards)
        full = full[: len(full) - self.padding]
        if self.qkv_sizes is None:
            return [full]
        by_group = full.reshape(-1, sum(self.qkv_sizes), full.shape[1])
        return [part.reshape(-1, full.shape[1]) for part in torch.split(by_group, list(self.qkv_sizes), dim=1)]

    def scatter(self, matrices: Sequence[Tensor], local_rows: int) -> Tensor:  # what `gather` took apart
        full = matrices[0]
        if self.qkv_sizes is not None:
            parts = [m.view(-1, size, m.shape[1]) for m, size in zip(matrices, self.qkv_sizes, strict=True)]
            full = torch.cat(parts, dim=1).reshape(-1, full.shape[1])
        full = torch.nn.functional.pad(full, (0, 0, 0, self.padding))
        rank = 0 if self.gtp_group is None else self.gtp_group.rank()
        return full[rank * local_rows : (rank + 1) * local_rows]


@register_rule(
    "megatron.core.optimizer.emerging_optimizers.TensorParallelMuon",
    "megatron.core.optimizer.muon.TensorParallelMuon",  # up to 0.16
)
class Megatron(EmergingOptimizers):
    """Megatron-Core's `TensorParallelMuon` without tensor parallelism, or with `tp_mode="blockwise"`."""

    name = "megatron"

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.pg_collection = getattr(optimizer, "pg_collection", None)
        self.tp_mode = getattr(optimizer, "tp_mode", getattr(optimizer, "mode", None))
        self.split_qkv = bool(getattr(optimizer, "split_qkv", False))
        self.is_qkv_fn = getattr(optimizer, "is_qkv_fn", None)
        self.qkv_split_shapes = getattr(optimizer, "qkv_split_shapes", None)
        self.per_head = bool(getattr(optimizer, "split_qkv_per_head", False))

    def parts(self, optimizer: Optimizer) -> list[Part]:
        """The parameters that need no staging."""
        parts = []
        for index, group in enumerate(optimizer.param_groups):
            rule = self.group_rule(optimizer, group)
            plain = [self._stage(optimizer, param) == _Stage() for param in group["params"]]
            params = list(itertools.compress(group["params"], plain))
            parts.append(Part(params, rule, list(itertools.compress(names_in(group, index), plain))))
        return parts

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._stage(optimizer, param)

    def update(self, optimizer: Optimizer, parts: Sequence[Part], updater: Updater) -> None:
        # `parts` carry the overrides of `replace_step`: one per group, so staged parameters take theirs from it.
        staged = [
            (param, self._stage(optimizer, param), part.rule)
            for group, part in zip(optimizer.param_groups, parts, strict=True)
            for param in group["params"]
            if param.grad is not None and self._stage(optimizer, param) != _Stage()
        ]
        super().update(optimizer, parts, updater)
        if staged:
            self._update_staged(optimizer, staged, Updater(updater.backend, updater.max_scratch_bytes))

    def _update_staged(
        self, optimizer: Optimizer, staged: Sequence[tuple[Tensor, _Stage, MatrixRule]], updater: Updater
    ) -> None:
        groups: list[dict[str, Any]] = []
        rules = []
        state: dict[Tensor, dict[str, Any]] = {}
        for param, stage, rule in staged:
            matrices = []
            for matrix in stage.gather(_momentum_step(param, optimizer.state[param], rule)):
                # A zero parameter that is not decayed receives the update alone.
                update = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
                update.grad = matrix
                state[update] = {}
                matrices.append(update)
            groups.append(
                {"params": matrices, "param_names": [f"a parameter of shape {tuple(param.shape)}"] * len(matrices)}
            )
            rules.append(replace(rule, momentum=0.0, ema=True, nesterov=False, weight_decay=0.0))
        step_groups(groups, rules, state, updater)
        for (param, stage, rule), group in zip(staged, groups, strict=True):
            param.mul_(1 - rule.lr * rule.weight_decay)
            param.add_(stage.scatter(group["params"], len(param)))

    def _stage(self, optimizer: Optimizer, param: Tensor) -> _Stage:
        """How a parameter is staged; `_Stage()` says not at all.

        Raises:
            ValueError: tensor parallelism over which the matrix would have to be gathered, or QKV blocks that do
                not fit the rows.
        """
        where = f"a parameter of shape {tuple(param.shape)} of {title(optimizer)}"
        expert = getattr(param, "expert_tp", False)
        tp_group = getattr(self.pg_collection, "expt_tp" if expert else "tp", None)
        partition_dim = getattr(param, "partition_dim", None)
        tp_size = 1 if tp_group is None else tp_group.size()
        if tp_size > 1 and partition_dim not in (None, -1) and self.tp_mode != "blockwise":
            raise ValueError(
                f"{where} is split along partition_dim={partition_dim} over {tp_size} ranks of tensor parallelism, "
                f"with tp_mode={self.tp_mode!r}: use tp_mode='blockwise', in which every rank orthogonalizes its own "
                "block, or leave the step as it is"
            )
        gtp_group, padding = None, 0
        if getattr(param, "is_gtp_weight_remat", False):
            gtp_group = getattr(self.pg_collection, "expt_gtp_remat" if expert else "gtp_remat", None)
            size = getattr(param, "gtp_remat_size", None)
            if gtp_group is None and size != 1:
                raise ValueError(
                    f"{where} is tagged is_gtp_weight_remat with gtp_remat_size={size}, but pg_collection has no "
                    "group for it: pass pg_collection to the optimizer"
                )
            padding = int(getattr(param, "pad_length", 0) or getattr(param, "qkv_gtp_pad_length", 0))
            if gtp_group is not None and gtp_group.size() == 1:
                gtp_group = None
        if not (self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(param)):
            return _Stage(gtp_group, padding)
        shapes = getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes
        rows = len(param) * (1 if gtp_group is None else gtp_group.size()) - padding
        if not shapes or rows % sum(shapes) or (self.per_head and rows != sum(shapes)):
            raise ValueError(
                f"{where} holds fused QKV of {rows} rows in all, which qkv_split_shapes={shapes} does not divide: they "
                "have to be the rows of Q, K and V of one query group, and a rank's rows whole groups"
            )
        return _Stage(gtp_group, padding, tuple(shapes))


def _momentum_step(param: Tensor, state: dict[str, Any], rule: MatrixRule) -> Tensor:
    """Update the momentum in place and return what Newton-Schulz takes."""
    grad = param.grad
    assert grad is not None
    momentum: Tensor = state.setdefault(rule.state_key, torch.zeros_like(grad))
    momentum.lerp_(grad, 1 - rule.momentum)
    return grad.lerp(momentum, rule.momentum) if rule.nesterov else momentum
