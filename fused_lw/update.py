"""The Muon update over many matrices at once: pack, orthogonalize each same-shape group, unpack.

A step is a list of `Work`, one per parameter that has a gradient. Its matrices are grouped by device, rule and
oriented shape, whatever parameter group they come from, and worked in chunks whose scratch memory stays under a
bound. Every chunk goes copy-in -> Newton-Schulz -> copy-out.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_lw.kernels import pack_reference
from fused_lw.kernels.device import Backend, ResolvedBackend, resolve_backend
from fused_lw.kernels.newton_schulz import NSRule, Precision, Problem, orthogonalize, scratch_nbytes
from fused_lw.kernels.pack_reference import PackedGroup, PackedMatrix
from fused_lw.kernels.products import Arena
from fused_lw.matrices import Block, HigherDims, MatrixView

DEFAULT_CPU_SCRATCH = 1 << 30
DEFAULT_GPU_SCRATCH_SHARE = 16  # of the device's memory

Shape = tuple[int, int]  # (r, s), r <= s
Batch = tuple[int, int, int]  # (B, r, s)
Slice = tuple[Shape, int, int]  # matrices start:stop of the shape's


@dataclass(frozen=True, slots=True)
class MatrixRule:
    """How the matrices of one parameter group are read and updated."""

    lr: float
    weight_decay: float  # decoupled: times the unscaled lr
    momentum: float
    nesterov: bool
    scale: Callable[[int, int], float]  # of the update, from a matrix's rows and columns
    ns: NSRule  # its precision holds where `precision` is given
    precision: Precision | None = None  # None takes the device's default
    ema: bool = True  # m <- mu m + (1 - mu) g; otherwise m <- mu m + g
    state_key: str = "momentum_buffer"
    momentum_dtype: torch.dtype | None = None  # of new momenta; None takes the gradient's
    higher_dims: HigherDims = "auto"
    split_rows: tuple[int, ...] | None = None

    def ns_on(self, device: torch.device) -> NSRule:
        return _with_precision(self.ns, self.precision or default_precision(device))


@functools.lru_cache(maxsize=64)
def _with_precision(ns: NSRule, precision: Precision) -> NSRule:
    return replace(ns, precision=precision)


def default_precision(device: torch.device) -> Precision:
    """Half precision is as fast as a GPU computes; CPUs without half-precision units are hundreds of times slower."""
    return "mixed" if device.type == "cuda" else "fp32"


class Work(NamedTuple):
    """A parameter to update. `grad` and `momentum` have its shape, and their columns collapse as its own do."""

    name: str  # for messages
    param: Tensor
    grad: Tensor
    momentum: Tensor
    view: MatrixView
    ns: NSRule
    group: int  # index of its MatrixRule


class Scratch:
    """One growing byte buffer per device, kept from step to step so that a step allocates nothing large."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device, nbytes: int) -> Tensor:  # uint8 [>= nbytes]
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(device, None)  # freed before its successor is allocated
            buffer = self._buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer


def check_scratch(name: str, view: MatrixView, ns: NSRule, *, backend: ResolvedBackend, bound: int | None) -> None:
    """Raise a ValueError that names the parameter if its largest matrix alone needs more than `bound` bytes."""
    if bound is None:
        return
    for r, s in sorted({_oriented(block) for block in view.blocks}):
        needed = _scratch_nbytes(((1, r, s),), ns, backend)
        if needed > bound:
            raise ValueError(
                f"{name} of shape {view.shape}: one {r} x {s} matrix needs {needed} bytes of scratch memory, "
                f"more than max_scratch_bytes={bound}"
            )


def update(
    work: Sequence[Work],
    rules: Sequence[MatrixRule],
    *,
    backend: Backend,
    scratch: Scratch,
    max_scratch_bytes: int | None = None,
) -> None:
    """Update the momenta and the parameters of `work` in place.

    Args:
        work: parameters with their gradients and momenta, on any devices.
        rules: one per parameter group.
        backend: "auto", "torch" or "triton", resolved per device.
        scratch: kept by the caller from step to step.
        max_scratch_bytes: bound of the scratch memory per device; None takes 1 GiB on a CPU and a sixteenth of
            a GPU's memory, or what the largest matrix needs where that is more.
    """
    families: dict[tuple[torch.device, NSRule], dict[Shape, list[tuple[Work, Block]]]] = {}
    for item in work:
        shapes = families.setdefault((item.param.device, item.ns), {})
        for block in item.view.blocks:
            shapes.setdefault(_oriented(block), []).append((item, block))

    for (device, ns), shapes in families.items():
        resolved = resolve_backend(backend, device)
        hyper = torch.tensor([(rule.lr, rule.weight_decay) for rule in rules], dtype=torch.float64).to(device)
        bound = default_scratch_bytes(device) if max_scratch_bytes is None else max_scratch_bytes
        counts = tuple((shape, len(members)) for shape, members in shapes.items())
        for chunk in plan_chunks(counts, ns, resolved, bound):
            members = [shapes[shape][start:stop] for shape, start, stop in chunk]
            _update_chunk(members, rules, hyper, ns, resolved, scratch)


def _update_chunk(
    members: Sequence[Sequence[tuple[Work, Block]]],  # same-shape matrices
    rules: Sequence[MatrixRule],
    hyper: Tensor,  # [groups, 2] float64: lr, weight decay
    ns: NSRule,
    backend: ResolvedBackend,
    scratch: Scratch,
) -> None:
    batches = tuple((len(same), *_oriented(same[0][1])) for same in members)
    memory = scratch.get(hyper.device, _scratch_nbytes(batches, ns, backend))
    arena = Arena(memory)
    groups = [
        _packed_group(same, rules, arena.take(*batch, ns.workspace_dtype))
        for same, batch in zip(members, batches, strict=True)
    ]
    pack = _pack_module(backend)
    pack.copy_in(groups)
    problems = [Problem(group.workspace, group.sq_norm, group.scale) for group in groups]
    factors = orthogonalize(problems, ns, backend=backend, scratch=memory[arena.nbytes :])
    pack.copy_out(groups, factors, hyper)


def _packed_group(
    same: Sequence[tuple[Work, Block]],
    rules: Sequence[MatrixRule],
    workspace: Tensor,  # [B, r, s]
) -> PackedGroup:
    matrices = []
    for item, block in same:
        rule = rules[item.group]
        matrices.append(
            PackedMatrix(
                block.rows,
                block.cols,
                item.view.locate(item.grad, block),
                item.view.locate(item.momentum, block),
                item.view.locate(item.param, block),
                rule.momentum,
                rule.ema,
                rule.nesterov,
                rule.scale(block.rows, block.cols),
                item.group,
            )
        )
    norms = torch.empty(2, len(matrices), dtype=torch.float32, device=workspace.device)
    return PackedGroup(matrices, workspace, norms[0], norms[1] if workspace.dtype == torch.float16 else None)


@functools.lru_cache(maxsize=64)
def plan_chunks(
    counts: tuple[tuple[Shape, int], ...], ns: NSRule, backend: ResolvedBackend, bound: int
) -> tuple[tuple[Slice, ...], ...]:
    """Cut same-shape groups into chunks that each need at most `bound` bytes of scratch memory.

    A group is cut only where it does not fit into a chunk of its own, so that one shape stays one batch. A
    chunk takes at least one matrix, whatever the bound.
    """
    chunks: list[list[Slice]] = [[]]
    batches: list[Batch] = []  # of the last chunk

    def fitting(shape: Shape, count: int) -> int:
        def needed(n: int) -> int:
            return _scratch_nbytes((*batches, (n, *shape)), ns, backend)

        return bisect_right(range(1, count + 1), bound, key=needed)

    for shape, count in counts:
        start = 0
        while start < count:
            n = fitting(shape, count - start)
            if n < count - start and chunks[-1]:
                chunks.append([])
                batches.clear()
                continue
            n = max(n, 1)
            chunks[-1].append((shape, start, start + n))
            batches.append((n, *shape))
            start += n
    return tuple(map(tuple, chunks)) if counts else ()


def _pack_module(backend: ResolvedBackend) -> ModuleType:
    if backend == "torch":
        return pack_reference
    from fused_lw.kernels import pack  # imported here: it needs Triton, which is not everywhere

    return pack


def default_scratch_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // DEFAULT_GPU_SCRATCH_SHARE
    return DEFAULT_CPU_SCRATCH


def _scratch_nbytes(batches: Sequence[Batch], ns: NSRule, backend: ResolvedBackend) -> int:
    workspaces = Arena(None)
    for batch in batches:
        workspaces.take(*batch, ns.workspace_dtype)
    return workspaces.nbytes + scratch_nbytes(batches, ns, backend=backend)


def _oriented(block: Block) -> Shape:
    return min(block.rows, block.cols), max(block.rows, block.cols)
