"""Which parameters of an optimizer each process group holds alike, and what moves and steps them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_lw.averaging import Averager
from fused_lw.buffers import FlatBuffers
from fused_lw.kernels.device import Backend, resolve_backend
from fused_lw.layout import Layout, ParamSpec, plan
from fused_lw.matrices import view_as_matrices
from fused_lw.matrix_parts import Matrices, OwnedMatrices, ShardedMatrices, shard_group
from fused_lw.muon import begin_step
from fused_lw.routing import param_spec
from fused_lw.update import Updater, check_scratch

MIN_BUCKET = 40_000_000  # elements, or a million a rank where that is more: Megatron-LM's

_OPTIONS = (bool, int, float, str, tuple, list, torch.dtype, Tensor, type(None))

Groups = Sequence[dict[str, Any]]


class Settings(NamedTuple):
    """What all replicas of an optimizer share."""

    scatter: bool  # gradients are reduced here, and not by somebody else
    overlap: bool
    divisor: int  # turns a sum of gradients into their mean
    gtp_group: dist.ProcessGroup | None
    backend: Backend
    max_scratch_bytes: int | None


class Replica(NamedTuple):
    """What steps the parameters that one process group holds alike."""

    matrices: Matrices | None
    averager: Averager


class Members(NamedTuple):
    """The parameters that one process group holds alike, by name."""

    group: dist.ProcessGroup
    matrices: dict[str, Tensor]
    others: dict[str, Tensor]  # AdamW's
    device: torch.device
    layout: Layout | None  # of the matrices; None without any, and for DTensors

    def facts(self, groups: Groups) -> dict[str, object]:
        """What the ranks of the group must have in common."""
        facts: dict[str, object] = {"the number of ranks": dist.get_world_size(self.group)}
        for index, group in enumerate(groups):
            for key, value in group.items():
                # Options of torch's and ours; what a trainer adds for itself need not print alike.
                if key not in ("params", "param_names") and isinstance(value, _OPTIONS):
                    facts[f"{key!r} of group {index}"] = value.tolist() if isinstance(value, Tensor) else value
        for name, param, index in _named(groups):
            if name in self.matrices or name in self.others:
                facts[f"the group, shape and dtype of {name}"] = (index, tuple(param.shape), param.dtype)
        if self.layout is not None:
            facts["the policy of the layout"] = self.layout.policy
            facts["the buckets of the layout"] = [tuple(bucket) for bucket in self.layout.buckets]
            facts["the digest of the layout"] = self.layout.digest()
        return facts

    def build(self, muon_groups: Groups, settings: Settings) -> Replica:
        """Move the parameters into buffers; without DDP or FSDP every rank takes those of the first one."""
        rule_of = {name: index for index, group in enumerate(muon_groups) for name in group["param_names"]}
        updater = Updater(settings.backend, settings.max_scratch_bytes)
        dtensors = {name: param for name, param in self.matrices.items() if isinstance(param, DTensor)}
        matrices: Matrices | None = None
        group, scatter = self.group, settings.scatter
        if dtensors:
            sharded = ShardedMatrices(dtensors, rule_of, len(muon_groups), updater)
            matrices, group, scatter = sharded, sharded.group, False
        elif self.layout is not None:
            buffers = FlatBuffers(
                self.layout,
                self.matrices,
                group,
                reduce=scatter,
                divisor=settings.divisor,
                overlap=settings.overlap,
            )
            if scatter:
                buffers.broadcast()
            matrices = OwnedMatrices(buffers, rule_of, len(muon_groups), updater, settings.gtp_group)
        averager = Averager(self.others, group, reduce=scatter, divisor=settings.divisor, device=self.device)
        if scatter:
            averager.broadcast()
        return Replica(matrices, averager)


def divide(
    groups: Groups,  # with "param_names" and "use_muon"
    layout: Layout | Literal["auto"],
    group: dist.ProcessGroup,
    expert_group: dist.ProcessGroup | None,
    settings: Settings,
) -> list[Members]:
    """What `group` holds alike, then the experts that `expert_group` does, each with its layout.

    Raises:
        ValueError, TypeError: for what this rank can refuse without asking the others, naming the parameter.
    """
    devices = {param.device: name for name, param, _ in _named(groups)}
    if len(devices) > 1:
        raise ValueError(f"parameters are on different devices, for example {devices}")
    (device,) = devices
    if layout != "auto" and not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout or 'auto', not {layout!r}")
    parts = [Members(group, {}, {}, device, None)]
    if expert_group is not None:
        parts.append(Members(expert_group, {}, {}, device, None))
    for name, param, index in _named(groups):
        expert = not getattr(param, "allreduce", True)
        if expert and expert_group is None:
            raise ValueError(f"{name} is tagged allreduce=False, an expert's: pass expert_process_group")
        part = parts[int(expert)]
        (part.matrices if groups[index]["use_muon"] else part.others)[name] = param
    _check_matrices([group for group in groups if group["use_muon"]], device, settings)
    return [part._replace(layout=_layout(part, layout if index == 0 else "auto")) for index, part in enumerate(parts)]


def _named(groups: Groups) -> Iterator[tuple[str, Tensor, int]]:
    """Name, parameter and index of its group."""
    for index, group in enumerate(groups):
        yield from ((*pair, index) for pair in zip(group["param_names"], group["params"], strict=True))


def _check_matrices(muon_groups: Groups, device: torch.device, settings: Settings) -> None:
    """Refuse on every rank what only an owner would find out in its step."""
    gtp_size = 1 if settings.gtp_group is None else dist.get_world_size(settings.gtp_group)
    for group, rule in zip(muon_groups, begin_step(muon_groups), strict=True):
        if group["capturable"]:
            raise ValueError("capturable=True is for one process: ranks agree on gradients at every step, on the host")
        for name, param in zip(group["param_names"], group["params"], strict=True):
            spec = param_spec(name, param, False)
            if spec.gtp_size not in (1, gtp_size):
                raise ValueError(f"{name} is sharded over {spec.gtp_size} ranks, and gtp_process_group has {gtp_size}")
            if rule.stochastic and not rule.master_weights and (isinstance(param, DTensor) or spec.gtp_size > 1):
                raise ValueError(f"{name} is sharded by rows: rounding='stochastic' is for whole matrices")
            view = view_as_matrices(torch.empty(spec.full_shape, device="meta"), rule.higher_dims, rule.split_rows)
            check_scratch(
                f"{name} of shape {tuple(param.shape)}",
                view,
                rule.ns_on(device),
                backend=resolve_backend(settings.backend, device),
                bound=settings.max_scratch_bytes,
            )


def _layout(part: Members, layout: Layout | Literal["auto"]) -> Layout | None:
    if not part.matrices:
        return None
    sharded = [name for name, param in part.matrices.items() if isinstance(param, DTensor)]
    if sharded:
        for name, param in part.matrices.items():
            if not isinstance(param, DTensor):
                raise ValueError(f"{name} is no DTensor, but {sharded[0]} is: shard all matrices or none")
            shard_group((name, param))
        if layout != "auto":
            raise ValueError(f"a layout is for whole parameters, and {sharded[0]} is a DTensor")
        return None
    dtypes = {param.dtype: name for name, param in part.matrices.items()}
    if len(dtypes) > 1:
        raise ValueError(f"the matrices of a flat buffer have one dtype, not those of {dtypes}")
    specs = [
        param_spec(name, param, bool(getattr(param, "shared_embedding", False)))
        for name, param in part.matrices.items()
    ]
    world = dist.get_world_size(part.group)
    if layout == "auto":
        return plan(specs, dp_size=world, bucket_size=max(MIN_BUCKET, 1_000_000 * world), cost="flops")
    _check_layout(layout, specs, world)
    return layout


def _check_layout(layout: Layout, specs: list[ParamSpec], world: int) -> None:
    if layout.dp_size != world:
        raise ValueError(f"the layout is for {layout.dp_size} ranks, the process group has {world}")
    placed = {spec.name: spec for spec in layout.params}
    for spec in specs:
        if spec.name not in placed:
            raise ValueError(f"the layout does not place {spec.name} of shape {spec.shape}")
        if placed.pop(spec.name) != spec:
            raise ValueError(f"the layout places another {spec.name} than this one of shape {spec.shape}")
    for name, spec in placed.items():
        raise ValueError(f"the layout places {name} of shape {spec.shape}, which is no matrix of these parameters")
    layout.validate()
