"""`fused-lw bench step`: whole optimizer steps over a model's matrices, ours and peers in turn.

Before anything is timed every optimizer takes two steps on all matrices, and the first and the last matrix of every
shape have to move as a float64 loop moves them, within the bound of the accuracy class that it claims.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from fused_lw.arguments import positive
from fused_lw.bench import environment, gate, tables, timing
from fused_lw.bench.environment import Row
from fused_lw.bench.peers import select
from fused_lw.bench.shapes import parse
from fused_lw.bench.step_peers import PlainMuon64, StepProvider, step_providers
from fused_lw.kernels import NSRule, count_launches, schedule, work
from fused_lw.layout import load_model, model_names

ROUNDS, QUICK_ROUNDS, QUICK_MATRICES = 7, 3, 4
LR = 0.02

Shape = tuple[int, int]  # rows, columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(model_names())
    parser.add_argument("--model", default="gpt2-124m", metavar="NAME", help=f"gpt2-124m if not given, or: {names}")
    parser.add_argument("--ep", type=int, default=1, metavar="E", help="experts lie on E ranks: take one's share")
    parser.add_argument("--first", type=int, metavar="N", help="only so many matrices, from the first on")
    parser.add_argument("--scale-down", type=int, default=1, metavar="K", help="divide every dimension by this")
    environment.add_arguments(parser)
    parser.add_argument("--providers", nargs="+", metavar="NAME", help="only these, or those that start with it")
    parser.add_argument("--rounds", type=positive, help=f"steps that are timed of each (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MATRICES} matrices, {QUICK_ROUNDS} rounds")


def run(args: argparse.Namespace) -> int:
    try:
        device = environment.use(args)
        shapes = shapes_of(args.model, args.ep, args.first, args.scale_down)
        everyone = {provider.name: provider for provider in step_providers(device)}
        providers = [everyone[name] for name in select(list(everyone), args.providers)]
    except ValueError as error:
        print(f"fused-lw bench step: {error}", file=sys.stderr)
        return 2
    if args.quick:
        shapes = shapes[:QUICK_MATRICES]
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    about = environment.describe(device) | {"model": args.model, "scale_down": args.scale_down}
    rows = [about | row for row in measure(shapes, providers, device, rounds)]
    console = Console(highlight=False)
    tables.print_rows(console, rows)
    console.print(
        f"on a GPU the Newton-Schulz of all these matrices is {gpu_launches(shapes)} Triton launches "
        "(counted from its program)"
    )
    if args.json is not None:
        environment.append(args.json, rows)
    return tables.exit_status(rows)


def shapes_of(model: str, ep: int, first: int | None, scale_down: int) -> list[Shape]:
    """Rows and columns of a model's matrices, in order. ValueError for what is not there."""
    if scale_down < 1 or (first is not None and first < 1):
        raise ValueError(f"--scale-down and --first must be at least 1, got {scale_down} and {first}")
    matrices = load_model(model, ep=ep)[:first]
    return [(max(1, m.rows // scale_down), max(1, m.cols // scale_down)) for m in matrices]


def measure(shapes: Sequence[Shape], providers: Sequence[StepProvider], device: torch.device, rounds: int) -> list[Row]:
    """One row per provider; those that move the parameters elsewhere than float64 does get no time."""
    sampled = sample(shapes)
    right = updates(PlainMuon64, shapes, sampled, device)
    rows: dict[str, Row] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for provider in track(providers, "checking against float64", console=Console(stderr=True)):
        row: Row = {
            "benchmark": "step",
            "provider": provider.name,
            "batch": len(shapes),
            "dtype": provider.dtype,
            "accuracy": provider.accuracy,
            "mode": "eager",
        }
        rows[provider.name] = row
        optimizer = make(provider, shapes, range(len(shapes)), device)
        moved = two_steps(optimizer, sampled)
        row["error"] = gate.worst_error(moved, right)
        reason = gate.judge(row["error"], provider.accuracy)
        if reason is None:
            if device.type == "cuda":
                with count_launches() as launches:
                    optimizer.step()
                row["triton_launches"] = sum(launches.values())
            optimizers[provider.name] = optimizer
        else:
            row |= {"status": "wrong", "reason": reason}
    calls = {name: optimizer.step for name, optimizer in optimizers.items()}
    taken = timing.interleave(calls, device, rounds, progress=True) if calls else {}
    by_name = {provider.name: provider for provider in providers}
    for name, samples in taken.items():
        rows[name] |= {"status": "measured", "rounds": rounds} | timing.fields(samples, device)
        rivals = [n for n in taken if not by_name[n].ours and by_name[n].accuracy == by_name[name].accuracy]
        if by_name[name].ours and rivals:
            best = min(rivals, key=lambda rival: timing.quantiles(taken[rival].device).p50)
            ratio = timing.paired_ratio(samples.device, taken[best].device)
            rows[name] |= {"best_peer": best, "ratio_to_best_peer": ratio}
    return list(rows.values())


def sample(shapes: Sequence[Shape]) -> list[int]:
    """The first and the last matrix of each shape."""
    first: dict[Shape, int] = {}
    last: dict[Shape, int] = {}
    for i, shape in enumerate(shapes):
        first.setdefault(shape, i)
        last[shape] = i
    return sorted({*first.values(), *last.values()})


def make(
    provider: StepProvider, shapes: Sequence[Shape], indices: Sequence[int], device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer over the matrices of these indices; each matrix and its gradient depend on its index alone."""
    params = []
    for i in indices:
        generator = torch.Generator(device=device).manual_seed(i)
        param = torch.nn.Parameter(torch.randn(shapes[i], generator=generator, device=device))
        param.grad = torch.randn(param.shape, generator=generator, device=device)
        params.append(param)
    return provider.make(params, lr=LR)


def two_steps(optimizer: torch.optim.Optimizer, indices: Sequence[int]) -> list[Tensor]:
    """Take two steps on two gradients, which also warms it up; how far the parameters at these positions moved."""
    params = optimizer.param_groups[0]["params"]
    starts = [params[i].detach().clone() for i in indices]
    optimizer.step()
    for param in params:
        param.grad.copy_(param.grad.flip(0))  # with one gradient over and over any momentum gives the same direction
    optimizer.step()
    return [params[i].detach() - start for i, start in zip(indices, starts, strict=True)]


def gpu_launches(shapes: Sequence[Shape]) -> int:
    """Triton launches of our Newton-Schulz over these matrices, the programs of all shapes merged."""
    batches = parse(",".join(f"{rows}x{cols}" for rows, cols in shapes))
    rule = NSRule(schedule("jordan", 5), precision="mixed")
    return work([(batch.size, batch.r, batch.s) for batch in batches], rule).launches


def updates(
    reference: type[torch.optim.Optimizer], shapes: Sequence[Shape], indices: Sequence[int], device: torch.device
) -> list[Tensor]:
    provider = StepProvider("reference", reference, "float32", "fp64")
    return two_steps(make(provider, shapes, indices, device), range(len(indices)))
