"""The Muon update over many matrices at once: pack, orthogonalize each same-shape group, unpack.

A step is a list of `Work`, one per parameter that has a gradient. Its matrices are grouped by device, rule and
oriented shape, whatever parameter group they come from, and worked in chunks whose scratch memory stays under a
bound. Every chunk goes copy-in -> Newton-Schulz -> copy-out.
"""

from __future__ import annotations

import functools
import zlib
from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fused_lw import nvtx
from fused_lw.kernels import pack_reference
from fused_lw.kernels.device import Backend, ResolvedBackend, resolve_backend
from fused_lw.kernels.newton_schulz import NSRule, Precision, Problem, prepare, scratch_nbytes
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix
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

    lr: float | Tensor  # a tensor (0-d, on the parameters' device) is read on the device, without waiting for it
    weight_decay: float | Tensor  # decoupled: times the unscaled lr
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
    master_weights: bool = False  # of parameters below fp32: updated instead, kept under "master_param"
    stochastic: bool = False  # rounding of bf16 parameters without master weights
    seed: int = 0  # of the stochastic rounding
    steps_done: float | Tensor = 0.0  # counts the noise on from step to step

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
    master: Tensor | None = None  # fp32
    wave: int = 0  # a wave is written before the next one is started


class _Chunk(NamedTuple):
    """Matrices that are packed, orthogonalized and unpacked together."""

    pack: Pack
    members: list[tuple[PackedMatrix, int, Block]]  # with the index of its Work
    orthogonalize: Callable[[], list[Tensor | None]]
    backend: ResolvedBackend
    hyper: Tensor  # [groups, 3] float64: lr, weight decay, steps done
    wave: int
    label: str  # of the range around orthogonalize


class Updater:
    """Updates momenta and parameters in place, and remembers from step to step where everything lies.

    The first step allocates scratch memory and describes every matrix (on a GPU, in tables on the device). Later
    steps only look up where the gradients are, until a parameter, a momentum or a rule changes.

    Args:
        backend: "auto", "torch" or "triton", resolved per device.
        max_scratch_bytes: bound of the scratch memory per device; None takes 1 GiB on a CPU and a sixteenth of
            a GPU's memory, or what the largest matrix needs where that is more.
    """

    def __init__(self, backend: Backend, max_scratch_bytes: int | None = None) -> None:
        self.backend: Backend = backend
        self.max_scratch_bytes = max_scratch_bytes
        # Of each parameter: the dtype of the gradient that its last step saw.
        self.grad_dtypes: MutableMapping[Tensor, torch.dtype] = WeakIdKeyDictionary()
        self.checked_spans: list[Any] = []  # of parameters known not to overlap
        self._scratch: dict[torch.device, Tensor] = {}
        self._signature: tuple[Any, ...] | None = None
        self._chunks: list[_Chunk] = []
        self._hypers: list[_Hyper] = []

    def __call__(
        self, work: Sequence[Work], rules: Sequence[MatrixRule], before_wave: Callable[[int], None] | None = None
    ) -> None:
        """One step. `rules` holds one per parameter group.

        `before_wave` is called with the number of each wave that has work here, in rising order, when everything
        of the waves before it has been written (on a GPU: enqueued) and before its own gradients are read.
        """
        with nvtx.step():
            self._step(work, rules, before_wave)

    def _step(
        self, work: Sequence[Work], rules: Sequence[MatrixRule], before_wave: Callable[[int], None] | None
    ) -> None:
        signature = _signature(work, rules)
        if signature != self._signature:
            self._signature = None  # so that a failure leaves nothing half described
            self._describe(work, rules)
            self._signature = signature
        for hyper in self._hypers:
            hyper.write(rules)
        wave = -1
        for chunk in self._chunks:
            if before_wave is not None and chunk.wave > wave:
                before_wave(chunk.wave)
            wave = chunk.wave
            for matrix, index, block in chunk.members:
                matrix.grad = work[index].view.locate(work[index].grad, block)
            pack = _pack_module(chunk.backend)
            with nvtx.span("fused_lw/pack"):
                pack.copy_in(chunk.pack)
            with nvtx.span(chunk.label):
                factors = chunk.orthogonalize()
            with nvtx.span("fused_lw/unpack"):
                pack.copy_out(chunk.pack, factors, chunk.hyper)
            for matrix, _, _ in chunk.members:
                matrix.grad = None  # or zero_grad(set_to_none=True) would free nothing

    def _describe(self, work: Sequence[Work], rules: Sequence[MatrixRule]) -> None:
        families: dict[tuple[int, torch.device, NSRule], dict[Shape, list[tuple[int, Block]]]] = {}
        for index, item in sorted(enumerate(work), key=lambda pair: pair[1].wave):
            shapes = families.setdefault((item.wave, item.param.device, item.ns), {})
            for block in item.view.blocks:
                shapes.setdefault(_oriented(block), []).append((index, block))

        planned: list[tuple[int, torch.device, NSRule, list[list[tuple[int, Block]]]]] = []
        needed: dict[torch.device, int] = {}
        for (wave, device, ns), shapes in families.items():
            backend = resolve_backend(self.backend, device)
            bound = self.max_scratch_bytes or default_scratch_bytes(device)
            counts = tuple((shape, len(members)) for shape, members in shapes.items())
            for chunk in plan_chunks(counts, ns, backend, bound):
                planned.append((wave, device, ns, [shapes[shape][start:stop] for shape, start, stop in chunk]))
                batches = [(stop - start, *shape) for shape, start, stop in chunk]
                needed[device] = max(needed.get(device, 0), _scratch_nbytes(batches, ns, backend))

        self._chunks, self._hypers = [], []
        for device, nbytes in needed.items():
            if device not in self._scratch or self._scratch[device].numel() < nbytes:
                self._scratch.pop(device, None)  # freed before its successor is allocated
                self._scratch[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._hypers.append(_Hyper(len(rules), device))
        hypers = {hyper.table.device: hyper.table for hyper in self._hypers}
        for wave, device, ns, members in planned:
            self._chunks.append(self._describe_chunk(work, rules, members, ns, hypers[device], wave))

    def _describe_chunk(
        self,
        work: Sequence[Work],
        rules: Sequence[MatrixRule],
        members: Sequence[Sequence[tuple[int, Block]]],  # same-shape matrices
        ns: NSRule,
        hyper: Tensor,
        wave: int,
    ) -> _Chunk:
        scratch = self._scratch[hyper.device]
        arena = Arena(scratch)
        groups, located = [], []
        for same in members:
            matrices = [_packed_matrix(work[index], block, rules[work[index].group]) for index, block in same]
            located += [(matrix, index, block) for matrix, (index, block) in zip(matrices, same, strict=True)]
            workspace = arena.take(len(same), *_oriented(same[0][1]), ns.workspace_dtype)
            norms = torch.empty(2, len(same), dtype=torch.float32, device=hyper.device)
            scale = norms[1] if workspace.dtype == torch.float16 else None
            groups.append(PackedGroup(matrices, workspace, norms[0], scale))
        problems = [Problem(group.workspace, group.sq_norm, group.scale) for group in groups]
        backend = resolve_backend(self.backend, hyper.device)
        updates = [_pack_module(backend).fused_update(group, hyper) for group in groups]
        rest = scratch[arena.nbytes :]
        orthogonalize = prepare(problems, ns, backend=backend, scratch=rest, updates=updates)
        shapes = {_oriented(same[0][1]) for same in members}
        algorithms = {ns.resolve_algorithm(r, s, backend) for r, s in shapes}
        label = f"fused_lw/ns/{'+'.join(sorted(algorithms))}"
        return _Chunk(Pack(groups, rest), located, orthogonalize, backend, hyper, wave, label)


class _Hyper:
    """What changes from step to step in a rule, on a device: written only where it changed."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.table = torch.zeros(groups, 3, dtype=torch.float64, device=device)
        self._written: list[list[float]] = []

    def write(self, rules: Sequence[MatrixRule]) -> None:
        values = [(rule.lr, rule.weight_decay, rule.steps_done) for rule in rules]
        numbers = [[0.0 if isinstance(value, Tensor) else value for value in row] for row in values]
        if numbers != self._written:
            self.table.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
            self._written = numbers
        for index, row in enumerate(values):
            for column, value in enumerate(row):
                if isinstance(value, Tensor):
                    self.table[index, column].copy_(value.view(()), non_blocking=True)


def _signature(work: Sequence[Work], rules: Sequence[MatrixRule]) -> tuple[Any, ...]:
    """Everything that a description depends on; where a gradient lies is looked up at every step instead."""
    items = tuple(
        (
            item.param.data_ptr(),
            item.param.stride(),
            item.param.dtype,
            item.param.device,
            item.momentum.data_ptr(),
            item.momentum.dtype,
            item.momentum.stride(),
            item.grad.dtype,
            item.wave,
            item.grad.stride(),
            item.view,
            item.ns,
            item.group,
            None if item.master is None else (item.master.data_ptr(), item.master.stride()),
        )
        for item in work
    )
    return items, tuple(
        (rule.momentum, rule.nesterov, rule.ema, rule.scale, rule.stochastic, rule.seed) for rule in rules
    )


def _packed_matrix(item: Work, block: Block, rule: MatrixRule) -> PackedMatrix:
    return PackedMatrix(
        rows=block.rows,
        cols=block.cols,
        grad=item.view.locate(item.grad, block),
        momentum=item.view.locate(item.momentum, block),
        param=item.view.locate(item.param, block),
        mu=rule.momentum,
        ema=rule.ema,
        nesterov=rule.nesterov,
        scale=rule.scale(block.rows, block.cols),
        group=item.group,
        master=None if item.master is None else item.view.locate(item.master, block),
        stochastic=rule.stochastic and item.master is None and item.param.dtype == torch.bfloat16,
        # Matrices must not share their noise. crc32 spreads neighbouring numbers over 32 bits.
        noise_key=zlib.crc32(repr((rule.seed, item.name, block.lead, block.first_row)).encode()),
    )


def check_scratch(name: str, view: MatrixView, ns: NSRule, *, backend: ResolvedBackend, bound: int | None) -> None:
    """Raise a ValueError that names the parameter if its largest matrix alone needs more than `bound` bytes."""
    if bound is None:
        return
    for r, s in sorted({_oriented(block) for block in view.blocks}):
        needed = _scratch_nbytes(((1, r, s),), ns, backend)
        if needed > bound:
            raise ValueError(
                f"{name}: one {r} x {s} matrix needs {needed} bytes of scratch memory, "
                f"more than max_scratch_bytes={bound}"
            )


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
