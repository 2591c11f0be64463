"""The matrices that one process group steps together: in flat buffers with whole owners, or as row-sharded DTensors.

Both kinds go through the same calls a step: `finish`, `late` and `reduce_again`, `ready` (only to look at gradients
before the step), `step`, `settle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fused_lw.averaging import sq_norm
from fused_lw.buffers import FlatBuffers
from fused_lw.row_shards import Local, RowExchange, RowSharded, even_bounds
from fused_lw.step import collect_work
from fused_lw.update import MatrixRule, Updater

State = MutableMapping[Tensor, dict[str, Any]]


class Matrices(Protocol):
    """What `LayerWiseMuon` asks of its matrices."""

    names: list[str]
    params: list[Tensor]

    def owns(self, index: int) -> bool:
        """Whether this rank keeps state of the parameter."""

    def make_state(self, state: State, rules: Sequence[MatrixRule]) -> None:
        """Zero momenta and master weights of what this rank owns, where there are none."""

    def zero_grad(self, set_to_none: bool) -> None: ...

    def replaced(self) -> list[bool]:
        """Which parameters no longer lie where they were put."""

    def finish(self) -> list[bool]:
        """Start what remains of the reduction; which parameters have a gradient here."""

    def late(self) -> list[bool]:
        """What must be reduced again because of this rank."""

    def reduce_again(self, late: list[bool]) -> None:
        """Reduce again what is late on any rank."""

    def ready(self, touched: list[bool]) -> Tensor:
        """Wait for the gradients. Returns this rank's part of the sum of their squares."""

    def step(self, rules: Sequence[MatrixRule], state: State, touched: list[bool], factor: Tensor | None) -> None:
        """Step those `touched` on any rank, with gradients times `factor`, and start to send the weights."""

    def settle(self) -> None:
        """Wait until all weights are here."""


class OwnedMatrices:
    """Matrices in `FlatBuffers`, each stepped whole by its owner; rows sharded over `gtp_group` are gathered first.

    Args:
        rule_of: name -> index of its MatrixRule.
        rules: number of those.
        gtp_group: ranks with the same place in the data-parallel group that hold the other rows; None without GTP.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        rule_of: Mapping[str, int],
        rules: int,
        updater: Updater,
        gtp_group: dist.ProcessGroup | None,
    ) -> None:
        self.buffers = buffers
        self.names, self.params = buffers.names, buffers.params
        self._updater = updater
        self._rule_of = [rule_of[name] for name in self.names]
        specs = buffers.layout.params
        sharded = [index for index in buffers.owned if specs[index].gtp_size > 1]
        self._sharded = {index: position for position, index in enumerate(sharded)}
        self._groups: list[dict[str, Any]] = [{"params": [], "param_names": []} for _ in range(rules)]
        self._wave_of: dict[int, int] = {}  # by id of what is owned
        for index, owned in buffers.owned.items():
            if index not in self._sharded:
                self._groups[self._rule_of[index]]["params"].append(owned)
                self._groups[self._rule_of[index]]["param_names"].append(self.names[index])
                self._wave_of[id(owned)] = buffers.waves[buffers.layout.slots[index].bucket]
        self._exchange: RowExchange | None = None
        if self._sharded and gtp_group is not None:
            matrices = [
                RowSharded(
                    specs[i].name,
                    specs[i].full_shape,
                    even_bounds(specs[i].full_shape[0], specs[i].shape[1], specs[i].shape[0], specs[i].gtp_size),
                    self._rule_of[i],
                )
                for i in self._sharded
            ]
            self._gtp_rank = dist.get_rank(gtp_group)
            self._exchange = RowExchange(
                matrices, gtp_group, buffers.flat, rules, updater.backend, updater.max_scratch_bytes
            )

    def owns(self, index: int) -> bool:
        return index in self.buffers.owned

    def make_state(self, state: State, rules: Sequence[MatrixRule]) -> None:
        for index, owned in self.buffers.owned.items():
            rule = rules[self._rule_of[index]]
            grad_dtype = torch.promote_types(owned.dtype, torch.float32) if self.buffers.reduce else owned.dtype
            entry = state[self.params[index]]
            if rule.state_key not in entry:
                entry[rule.state_key] = torch.zeros_like(owned, dtype=rule.momentum_dtype or grad_dtype)
            if rule.master_weights and owned.dtype in (torch.bfloat16, torch.float16) and "master_param" not in entry:
                entry["master_param"] = owned.float()

    def zero_grad(self, set_to_none: bool) -> None:
        self.buffers.zero_grad(set_to_none)

    def replaced(self) -> list[bool]:
        return self.buffers.replaced()

    def finish(self) -> list[bool]:
        return self.buffers.finish()

    def late(self) -> list[bool]:
        return self.buffers.late()

    def reduce_again(self, late: list[bool]) -> None:
        self.buffers.reduce_again(late)

    def ready(self, touched: list[bool]) -> Tensor:
        self.buffers.await_reduction(max(self.buffers.waves))
        self.buffers.give_gradients(touched, None)
        sums = torch.zeros(2, dtype=torch.float32, device=self.buffers.flat.device)
        for index, owned in self.buffers.owned.items():
            if owned.grad is not None:
                sums[int(index in self._sharded)] += sq_norm(owned.grad)
        if self._exchange is not None:
            dist.all_reduce(sums[1], group=self._exchange.group)
        return sums.sum()

    def step(self, rules: Sequence[MatrixRule], state: State, touched: list[bool], factor: Tensor | None) -> None:
        buffers = self.buffers
        # Matrices of two ranks must not share the noise of stochastic rounding.
        rules = [replace(rule, seed=rule.seed + (dist.get_rank(buffers.group) << 32)) for rule in rules]
        buffers.give_gradients(touched, factor)
        if self._exchange is not None:
            buffers.await_reduction(max(buffers.waves))
            self._exchange.step([self._local(index, state, rules) for index in self._sharded], rules)
        states = {owned: state[self.params[index]] for index, owned in buffers.owned.items()}
        work = collect_work(self._groups, rules, states, self._updater)
        work = [item._replace(wave=self._wave_of[id(item.param)]) for item in work]

        def before_wave(wave: int) -> None:
            buffers.gather(wave)
            buffers.await_reduction(wave)

        self._updater(work, rules, before_wave)
        last = max(buffers.waves)
        buffers.await_reduction(last)
        buffers.gather(last + 1)

    def settle(self) -> None:
        self.buffers.await_gathering()

    def _local(self, index: int, state: State, rules: Sequence[MatrixRule]) -> Local:
        assert self._exchange is not None
        start, end = self._exchange.matrices[self._sharded[index]].bounds[self._gtp_rank]
        owned, entry = self.buffers.owned[index], state[self.params[index]]
        tensors = (owned, owned.grad, entry[rules[self._rule_of[index]].state_key], entry.get("master_param"))
        param, grad, momentum, master = (None if t is None else t.view(-1)[: end - start] for t in tensors)
        assert param is not None
        assert momentum is not None
        return Local(param, grad, momentum, master)


class ShardedMatrices:
    """FSDP2's matrices: momenta and master weights stay sharded as the parameters are.

    Args:
        params: by name, DTensors on one mesh that are sharded in their first dimension over one of its dimensions.
        rule_of: name -> index of its MatrixRule.

    Raises:
        ValueError: naming a parameter that is sharded otherwise.
    """

    def __init__(self, params: Mapping[str, DTensor], rule_of: Mapping[str, int], rules: int, updater: Updater) -> None:
        self.names = list(params)
        self.params: list[Tensor] = list(params.values())
        self.group = shard_group(next(iter(params.items())))
        world = dist.get_world_size(self.group)
        sharded = []
        for name, param in params.items():
            if shard_group((name, param)) != self.group:
                raise ValueError(f"{name} of shape {tuple(param.shape)} is sharded over another group than others are")
            height = -(-param.shape[0] // world)  # as torch.chunk cuts
            bounds = even_bounds(param.shape[0], math.prod(param.shape[1:]), height, world)
            start, end = bounds[dist.get_rank(self.group)]
            local = param.to_local()
            if local.numel() != end - start or not local.is_contiguous():
                raise ValueError(
                    f"{name} of shape {tuple(param.shape)} has a shard {tuple(local.shape)} on this rank: "
                    f"expected {end - start} consecutive elements"
                )
            sharded.append(RowSharded(name, tuple(param.shape), bounds, rule_of[name]))
        self._exchange = RowExchange(
            sharded,
            self.group,
            next(iter(params.values())).to_local(),
            rules,
            updater.backend,
            updater.max_scratch_bytes,
        )
        self._rule_of = [rule_of[name] for name in self.names]

    def owns(self, index: int) -> bool:
        return True

    def make_state(self, state: State, rules: Sequence[MatrixRule]) -> None:
        for param, index in zip(self.params, self._rule_of, strict=True):
            rule, entry = rules[index], state[param]
            if rule.state_key not in entry:
                entry[rule.state_key] = torch.zeros_like(param, dtype=rule.momentum_dtype or param.dtype)
            if rule.master_weights and param.dtype in (torch.bfloat16, torch.float16) and "master_param" not in entry:
                entry["master_param"] = param.detach().float()

    def zero_grad(self, set_to_none: bool) -> None:
        """The optimizer's own `zero_grad` has done it."""

    def replaced(self) -> list[bool]:
        return [False] * len(self.params)

    def finish(self) -> list[bool]:
        return [param.grad is not None for param in self.params]

    def late(self) -> list[bool]:
        return []

    def reduce_again(self, late: list[bool]) -> None:
        """FSDP2 has reduced."""

    def ready(self, touched: list[bool]) -> Tensor:
        grads = [_local(param.grad) for param in self.params if param.grad is not None]
        zero = torch.zeros((), dtype=torch.float32, device=_local(self.params[0]).device)
        return sum((sq_norm(grad) for grad in grads), zero)

    def step(self, rules: Sequence[MatrixRule], state: State, touched: list[bool], factor: Tensor | None) -> None:
        held = []
        for param, index in zip(self.params, self._rule_of, strict=True):
            grad = None if param.grad is None else _local(param.grad)
            held.append(
                Local(
                    _local(param),
                    grad if grad is None or factor is None else grad * factor,
                    _local(state[param][rules[index].state_key]),
                    _local(state[param]["master_param"]) if "master_param" in state[param] else None,
                )
            )
        self._exchange.step(held, rules)

    def settle(self) -> None:
        """The weights are where they belong."""


def shard_group(named: tuple[str, DTensor]) -> dist.ProcessGroup:
    """The ranks over which a DTensor's first dimension is sharded; a ValueError names one that is placed otherwise."""
    name, param = named
    dims = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
    # A strided shard, as FSDP over tensor parallelism makes, is a subclass.
    if len(dims) != 1 or type(param.placements[dims[0]]) is not Shard or param.placements[dims[0]] != Shard(0):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} has placements {param.placements}: "
            "expected Shard(0) in one dimension of the mesh, as fully_shard makes it, and replicas in the others"
        )
    return param.device_mesh.get_group(dims[0])


def _local(tensor: Tensor) -> Tensor:
    """This rank's elements in one dimension, not a copy."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().view(-1)
