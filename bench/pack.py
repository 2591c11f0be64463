"""`fused-lw bench pack`: the copies around Newton-Schulz, packed against torch matrix by matrix and against foreach.

Copy-in updates the momentum, applies Nesterov, casts, orients and takes the norms; copy-out applies scale, learning
rate and weight decay and turns the result back.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from fused_lw.arguments import positive
from fused_lw.bench import environment, gate, roofline, shapes, tables, timing
from fused_lw.bench.environment import Row
from fused_lw.bench.roofline import Stage
from fused_lw.bench.shapes import Batch
from fused_lw.kernels import NSRule, pack_reference, resolve_backend, row_stride, schedule
from fused_lw.kernels.pack_reference import Pack, PackedGroup, PackedMatrix, Strided
from fused_lw.update import default_precision

ROUNDS = 15
MU, LR, WEIGHT_DECAY = 0.95, 0.02, 0.1
# Elementwise operations: what rounding once or twice explains.
BOUNDS: dict[gate.Accuracy, float] = {"float32": 1e-6, "half": 1e-2}
# Of a squared norm, times the root of the number of elements. On a CPU torch adds their squares in order.
NORM_BOUND = 1e-6

Call = Callable[[], object]


class Buffers(NamedTuple):
    """What a step reads and writes for one batch; a half of the matrices lies the tall way round."""

    grads: list[Tensor]  # [R, C] float32
    momenta: list[Tensor]  # [R, C] float32
    params: list[Tensor]  # [R, C] float32
    workspace: Tensor  # [B, r, s]
    sq_norm: Tensor  # [B] float32
    factor: Tensor  # [B, r, s]


Provider = Callable[[Buffers], tuple[Call, Call]]  # copy-in and copy-out over these buffers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes.add_arguments(parser)
    environment.add_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"timings of each (default: {ROUNDS})")
    roofline.add_peak_argument(parser)


def run(args: argparse.Namespace) -> int:
    try:
        device = environment.use(args)
        batches = shapes.from_arguments(args)
        peak = roofline.peak(device, args.peak)
    except ValueError as error:
        print(f"fused-lw bench pack: {error}", file=sys.stderr)
        return 2
    about = environment.describe(device) | {"model": args.model, "scale_down": args.scale_down}
    rows = [about | row for batch in batches for row in measure(batch, PROVIDERS, device, args.rounds, peak)]
    tables.print_rows(Console(highlight=False), rows)
    if args.json is not None:
        environment.append(args.json, rows)
    return tables.exit_status(rows)


def measure(
    batch: Batch, providers: dict[str, Provider], device: torch.device, rounds: int, peak: roofline.Peak
) -> list[Row]:
    """A row per stage and provider. Only who leaves the numbers that float64 gives is timed."""
    precision = default_precision(device)
    dtype = NSRule(schedule("jordan", 5), precision=precision).workspace_dtype
    accuracy: gate.Accuracy = "float32" if dtype == torch.float32 else "half"
    floors = roofline.floors(batch, peak, precision)
    moved = roofline.copy_nbytes(batch.size * batch.r * batch.s, dtype)
    rows: dict[tuple[str, str], Row] = {}
    calls: dict[Stage, dict[str, Call]] = {"copy-in": {}, "copy-out": {}}
    for name, provider in providers.items():
        buffers = allocate(batch, device, dtype)
        expected_in, expected_out = expected(buffers)
        copy_in, copy_out = provider(buffers)
        copy_in()
        copy_out()
        matrices, norms = expected_in
        errors = {
            "copy-in": gate.worst_error([*buffers.momenta, *packed(buffers)], matrices),
            "copy-out": gate.worst_error(buffers.params, expected_out),
        }
        norm_error = gate.worst_error([*buffers.sq_norm], norms)
        for stage, call in (("copy-in", copy_in), ("copy-out", copy_out)):
            reason = gate.judge(errors[stage], accuracy, BOUNDS[accuracy])
            if stage == "copy-in" and reason is None:
                reason = gate.judge(norm_error, accuracy, NORM_BOUND * math.sqrt(batch.r * batch.s))
            rows[stage, name] = {
                "benchmark": "pack",
                "stage": stage,
                "provider": name,
                "shape": [batch.r, batch.s],
                "batch": batch.size,
                "dtype": str(dtype).removeprefix("torch."),
                "accuracy": accuracy,
                "mode": "eager",
                "error": errors[stage],
                "status": "measured" if reason is None else "wrong",
                "reason": reason,
            }
            if reason is None:
                calls[stage][name] = call  # type: ignore[index]
    for stage, of_stage in calls.items():
        taken = timing.interleave(of_stage, device, rounds) if of_stage else {}
        rivals = [name for name in taken if name != "fused_lw"]
        for name, samples in taken.items():
            row = rows[stage, name]
            row |= {"rounds": rounds} | timing.fields(samples, device)
            row["copy_gb_per_s"] = moved[stage] / row["p50_ms"] / 1e6
            row |= roofline.against(floors[stage], samples, peak)
            if name == "fused_lw" and rivals:
                best = min(rivals, key=lambda rival: timing.quantiles(taken[rival].device).p50)
                row["best_peer"] = best
                row["ratio_to_best_peer"] = timing.paired_ratio(samples.device, taken[best].device)
    return list(rows.values())


def allocate(batch: Batch, device: torch.device, dtype: torch.dtype) -> Buffers:
    generator = torch.Generator(device=device).manual_seed(0)
    size, r, s = batch

    def matrices() -> list[Tensor]:
        ways = [(r, s) if i % 2 == 0 else (s, r) for i in range(size)]
        return [torch.randn(way, generator=generator, device=device) for way in ways]

    grads, momenta, params = matrices(), matrices(), matrices()
    workspace = torch.zeros(size, r, row_stride(s, dtype), dtype=dtype, device=device)[..., :s]
    factor = torch.randn(size, r, s, generator=generator, device=device).to(dtype)
    return Buffers(grads, momenta, params, workspace, torch.zeros(size, device=device), factor)


def packed(buffers: Buffers) -> list[Tensor]:
    """The workspace, each matrix turned back to the way round of its parameter."""
    return [oriented(X, param) for X, param in zip(buffers.workspace, buffers.params, strict=True)]


def oriented(X: Tensor, like: Tensor) -> Tensor:
    return X if X.shape == like.shape else X.mT


def expected(buffers: Buffers) -> tuple[tuple[list[Tensor], list[Tensor]], list[Tensor]]:
    """In float64: momenta and packed matrices after copy-in, squared norms of those; parameters after copy-out."""
    grads = [g.double() for g in buffers.grads]
    momenta = [m.double().lerp(g, 1 - MU) for m, g in zip(buffers.momenta, grads, strict=True)]
    updates = [g.lerp(m, MU) for g, m in zip(grads, momenta, strict=True)]
    params = [
        p.double() * (1 - LR * WEIGHT_DECAY) - LR * oriented(o, p).double()
        for p, o in zip(buffers.params, buffers.factor, strict=True)
    ]
    return ([*momenta, *updates], [update.square().sum() for update in updates]), params


def _ours(buffers: Buffers) -> tuple[Call, Call]:
    device = buffers.workspace.device
    matrices = [
        PackedMatrix(
            rows=param.shape[0],
            cols=param.shape[1],
            grad=_strided(grad),
            momentum=_strided(momentum),
            param=_strided(param),
            mu=MU,
            ema=True,
            nesterov=True,
            scale=1.0,
            group=0,
        )
        for grad, momentum, param in zip(buffers.grads, buffers.momenta, buffers.params, strict=True)
    ]
    room = torch.empty(buffers.workspace[0].numel() * torch.float32.itemsize, dtype=torch.uint8, device=device)
    pack = Pack([PackedGroup(matrices, buffers.workspace, buffers.sq_norm)], room)
    hyper = torch.tensor([[LR, WEIGHT_DECAY, 0.0]], dtype=torch.float64, device=device)
    module: ModuleType = pack_reference
    if resolve_backend("auto", device) == "triton":
        from fused_lw.kernels import pack as triton_pack  # imported here: it needs Triton

        module = triton_pack
    return lambda: module.copy_in(pack), lambda: module.copy_out(pack, [buffers.factor], hyper)


def _strided(matrix: Tensor) -> Strided:
    return Strided(matrix, 0, matrix.stride(0), matrix.stride(1))


def _loop(buffers: Buffers) -> tuple[Call, Call]:
    """As torch.optim.Muon does it, one matrix after the other."""

    def copy_in() -> None:
        for i, (grad, momentum) in enumerate(zip(buffers.grads, buffers.momenta, strict=True)):
            momentum.lerp_(grad, 1 - MU)
            update = grad.lerp(momentum, MU)
            X = buffers.workspace[i].copy_(oriented(update, buffers.workspace[i]))
            buffers.sq_norm[i] = torch.linalg.vector_norm(X, dtype=torch.float32).square()

    def copy_out() -> None:
        for param, factor in zip(buffers.params, buffers.factor, strict=True):
            param.mul_(1 - LR * WEIGHT_DECAY)
            param.add_(oriented(factor, param), alpha=-LR)

    return copy_in, copy_out


def _foreach(buffers: Buffers) -> tuple[Call, Call]:
    """The same with torch's operations over lists of tensors."""
    inputs = [oriented(X, param) for X, param in zip(buffers.workspace, buffers.params, strict=True)]
    factors = [oriented(o, param) for o, param in zip(buffers.factor, buffers.params, strict=True)]

    def copy_in() -> None:
        torch._foreach_lerp_(buffers.momenta, buffers.grads, 1 - MU)
        torch._foreach_copy_(inputs, torch._foreach_lerp(buffers.grads, buffers.momenta, MU))
        norms: Sequence[Tensor] = torch._foreach_norm(inputs)
        torch.stack([norm.float() for norm in norms], out=buffers.sq_norm)
        buffers.sq_norm.square_()

    def copy_out() -> None:
        torch._foreach_mul_(buffers.params, 1 - LR * WEIGHT_DECAY)
        torch._foreach_add_(buffers.params, factors, alpha=-LR)

    return copy_in, copy_out


PROVIDERS: dict[str, Provider] = {"fused_lw": _ours, "torch loop": _loop, "torch foreach": _foreach}
