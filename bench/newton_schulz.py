"""`fused-lw bench ns`: Newton-Schulz on batches of one shape, all providers side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from fused_lw.arguments import positive
from fused_lw.bench import environment, gate, peers, roofline, shapes, tables, timing
from fused_lw.bench.environment import Row
from fused_lw.bench.peers import Provider
from fused_lw.bench.shapes import Batch
from fused_lw.kernels.device import cpu_has_bf16_units
from fused_lw.update import default_precision

ROUNDS = 15
QUICK_ROUNDS, QUICK_BATCH = 3, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes.add_arguments(parser)
    environment.add_arguments(parser)
    parser.add_argument("--providers", nargs="+", metavar="NAME", help="only these, or those that start with it")
    parser.add_argument("--rounds", type=positive, help=f"times that everyone is timed (default: {ROUNDS})")
    parser.add_argument(
        "--quick", action="store_true", help=f"one matrix of each shape, {QUICK_ROUNDS} rounds; ends within two minutes"
    )
    roofline.add_peak_argument(parser)


def run(args: argparse.Namespace) -> int:
    try:
        device = environment.use(args)
        batches = shapes.from_arguments(args)
        everyone = {provider.name: provider for provider in peers.providers(device)}
        found = [everyone[name] for name in peers.select(list(everyone), args.providers)]
        peak = roofline.peak(device, args.peak)
    except ValueError as error:
        print(f"fused-lw bench ns: {error}", file=sys.stderr)
        return 2
    if args.quick:
        batches = shapes.cut(batches, 1, QUICK_BATCH)
        found = [quickly(provider, device) for provider in found]
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    about = environment.describe(device) | {"model": args.model, "scale_down": args.scale_down}
    rows: list[Row] = []
    for batch in track(batches, "shapes", console=Console(stderr=True)):
        rows += [about | row for row in measure(batch, found, device, rounds, peak)]
    tables.print_rows(Console(highlight=False), rows)
    if args.json is not None:
        environment.append(args.json, rows)
    return tables.exit_status(rows)


def quickly(provider: Provider, device: torch.device) -> Provider:
    """The provider, or for a quick look on a CPU a note that it would take too long."""
    if device.type != "cpu" or provider.unavailable is not None:
        return provider
    reason = None
    if provider.dtype == "bf16" and not cpu_has_bf16_units():
        reason = "this CPU has no bf16 units, and multiplies bf16 hundreds of times slower than float32"
    elif "compiled" in provider.name:
        reason = "it compiles for every shape"
    return replace(provider, unavailable=reason and f"left out by --quick: {reason}")


def measure(
    batch: Batch, providers: Sequence[Provider], device: torch.device, rounds: int, peak: roofline.Peak
) -> list[Row]:
    """One row per provider and mode (eager, and on a GPU also as a CUDA graph). Only who passes the gate is timed."""
    generator = torch.Generator(device=device).manual_seed(0)
    source = torch.randn(batch, generator=generator, device=device)
    own = default_precision(device)
    on_gpu = device.type == "cuda"
    floor = roofline.floors(batch, peak, own)["newton-schulz"]
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    by_name = {provider.name: provider for provider in distinct(providers, batch)}
    for name, provider in by_name.items():
        rows[name] = {
            "benchmark": "ns",
            "provider": name,
            "version": provider.version,
            "shape": [batch.r, batch.s],
            "batch": batch.size,
            "dtype": provider.dtype,
            "accuracy": provider.accuracy,
            "algorithm": provider.algorithm(batch),
            "mode": "eager",
        }
        call, rows[name]["error"], reason = admit(provider, source)
        if call is None:
            rows[name] |= {"status": "unavailable" if provider.unavailable else "wrong", "reason": reason}
        else:
            calls[name] = call
    samples = {"eager": timing.interleave(calls, device, rounds)} if calls else {}
    if on_gpu and calls:
        graphs = graphed(calls)
        if graphs:
            samples["graph"] = timing.interleave(graphs, device, rounds)
    timed = [
        rows[name]
        | {"status": "measured", "mode": mode, "rounds": rounds}
        | speed(by_name[name], batch, sample, device)
        # A CPU's peak is one of float32: it says nothing about bf16 units.
        | roofline.against(floor if on_gpu or by_name[name].accuracy == "float32" else None, sample, peak)
        | against_best_peer(name, by_name, taken)
        for mode, taken in samples.items()
        for name, sample in taken.items()
    ]
    return [*timed, *(row for name, row in rows.items() if name not in calls)]


def speed(provider: Provider, batch: Batch, sample: timing.Samples, device: torch.device) -> Row:
    """Times and rates; bytes are those of the standard iteration, operations also those that were executed."""
    seconds = timing.quantiles(sample.device).p50
    return timing.fields(sample, device) | {
        "tflops_executed": None if provider.flops is None else provider.flops(batch) / seconds / 1e12,
        "tflops_standard": peers.plain_flops(batch) / seconds / 1e12,
        "gb_per_s": peers.plain_bytes(batch, provider.dtype) / seconds / 1e9,
    }


def distinct(providers: Sequence[Provider], batch: Batch) -> list[Provider]:
    """Without those of ours that would run the algorithm that "auto" takes for this shape."""
    kept: dict[object, Provider] = {}
    for provider in providers:
        ours = provider.backend and (provider.backend, provider.dtype, provider.algorithm(batch))
        kept.setdefault(ours or provider.name, provider)
    return list(kept.values())


def admit(
    provider: Provider,
    source: Tensor,  # [B, r, s]
) -> tuple[Callable[[], Tensor] | None, float | None, str | None]:
    """What to time, warm; its error against float64; or no call and why not."""
    if provider.unavailable is not None:
        return None, None, provider.unavailable
    before = source.clone()
    try:
        call = provider.make(source)
        call()
        result = call()  # the second one: the first may compile, and state left behind shows in the next
    except Exception as failure:  # other people's code may fail in any way, and the rest is still worth measuring
        return None, None, f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
    if not torch.equal(source, before):
        return None, None, "it changed its input"
    if result.shape != source.shape:
        return None, None, f"its result has shape {tuple(result.shape)}, not {tuple(source.shape)}"
    checked = gate.checked_indices(len(source))
    error = gate.worst_error([result[i] for i in checked], [gate.exact(source[i], provider.schedule) for i in checked])
    reason = gate.judge(error, provider.accuracy)
    return (call if reason is None else None), error, reason


def graphed(calls: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Those that can be captured as a CUDA graph."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = timing.captured(call)
        except RuntimeError as error:  # what waits for the device, or captures for itself, cannot be captured
            print(f"{name} has no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
    return graphs


def against_best_peer(name: str, by_name: dict[str, Provider], taken: dict[str, timing.Samples]) -> Row:
    """For the algorithm that we choose: the fastest peer of its accuracy class, our time over its, paired by round."""
    if not by_name[name].is_choice:
        return {}
    accuracy = by_name[name].accuracy
    rivals = [n for n in taken if by_name[n].backend is None and by_name[n].accuracy == accuracy]
    if not rivals:
        return {}
    best = min(rivals, key=lambda rival: timing.quantiles(taken[rival].device).p50)
    return {"best_peer": best, "ratio_to_best_peer": timing.paired_ratio(taken[name].device, taken[best].device)}
