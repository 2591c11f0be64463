"""`fused-lw tune`: measure kernel configurations on this machine's GPU and keep the fastest for later runs."""

from __future__ import annotations

import argparse
import datetime

import torch
from rich.console import Console
from rich.table import Table

from fused_lw.arguments import positive
from fused_lw.kernels.configs import Kind, ProductConfig, save_tuned, tuned_path
from fused_lw.kernels.device import architecture, explain_backend, resolve_backend
from fused_lw.kernels.tuning import SHAPES, TUNABLE, Measurement, tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=TUNABLE, action="append", help="kernels to tune; all if left out")
    parser.add_argument("--rounds", type=positive, default=15, help="timings of each candidate (default: 15)")
    parser.add_argument("--dry-run", action="store_true", help="measure, but leave the table as it is")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if not torch.cuda.is_available():
        console.print("tune measures on a GPU, and torch sees none here: the shipped configurations stay in use.")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    if resolve_backend("auto", device) != "triton":
        console.print(f"tune needs the Triton backend on {device}: {explain_backend(device)}")
        return 1
    arch = architecture(device)
    best: dict[tuple[Kind, int], ProductConfig] = {}
    for kind in args.kind or TUNABLE:
        measured = list(tune(arch, kind, torch.float16, device, args.rounds))
        console.print(report(kind, measured))
        fastest = min(measured, key=lambda m: m.total)
        if fastest.failure is not None:
            console.print(f"no candidate for {kind} computed the right result: nothing is written")
            return 1
        best[kind, torch.float16.itemsize] = fastest.config
    if not args.dry_run:
        path = tuned_path(arch)
        about = {
            "gpu": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        save_tuned(path, best, about)
        console.print(f"wrote {path}; it is read when a process first runs a kernel")
    return 0


def report(kind: Kind, measured: list[Measurement]) -> Table:
    """Candidates from fastest to slowest, with milliseconds a shape or the reason for having none."""
    table = Table(title=f"{kind}, float16, median milliseconds")
    for column in ("configuration", *(f"{b} x {r} x {s}" for b, r, s in SHAPES[kind])):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for m in sorted(measured, key=lambda m: m.total):
        c = m.config
        name = f"{c.tile_m}x{c.tile_n}x{c.block_k} g{c.group} w{c.num_warps} s{c.num_stages} p{c.programs_per_sm}"
        times = [m.failure] if m.failure is not None else [f"{t:.3f}" for t in m.milliseconds]
        table.add_row(name + (" tma" if c.tma else ""), *times)
    return table
