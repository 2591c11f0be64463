"""Whole optimizer steps over a model's matrices: `python -m bench.step --model gpt2-124m --json FILE`.

Providers are interleaved, one step each in turn, and compared by the median of paired ratios. Before anything is
timed, every provider has to move the parameters as the float32 loop does, within the rounding of its arithmetic.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fused_lw.layout import load_model, model_names
from fused_lw.muon import Muon
from fused_lw.plain import PlainMuon

# name -> (optimizer, relative distance to the float32 loop's update that its arithmetic explains)
PROVIDERS: dict[str, tuple[Any, float]] = {
    "fused_lw": (Muon, 1e-4),
    "float32 loop": (PlainMuon, 0.0),
    "torch.optim.Muon": (torch.optim.Muon, 0.1),
}
NO_BF16_UNITS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m", choices=model_names(), metavar="NAME")
    parser.add_argument("--first", type=int, help="only so many matrices, from the first on (gpt2: 4 make a layer)")
    parser.add_argument("--scale-down", type=int, default=1, help="divide every dimension by this")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="append the rows to this JSON Lines file")
    parser.add_argument(
        "--without-bf16-units",
        action="store_true",
        help="keep oneDNN from using bf16 instructions, as on a CPU that has none",
    )
    args = parser.parse_args()
    if args.without_bf16_units and any(os.environ.get(key) != value for key, value in NO_BF16_UNITS.items()):
        # oneDNN reads its environment once, when it is loaded.
        return subprocess.run(
            [sys.executable, "-m", "bench.step", *sys.argv[1:]], env=os.environ | NO_BF16_UNITS
        ).returncode
    torch.set_num_threads(args.threads)
    rows = measure(args)
    report(rows)
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    matrices = load_model(args.model)[: args.first]
    shapes = [(max(1, m.rows // args.scale_down), max(1, m.cols // args.scale_down)) for m in matrices]
    optimizers = {name: make(name, shapes) for name in args.providers}
    check(optimizers)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in track(range(args.repeats), description="steps"):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    ours = seconds.get("fused_lw")
    common = {
        "benchmark": "step",
        "model": args.model,
        "matrices": len(shapes),
        "scale_down": args.scale_down,
        "device": cpu_name(),
        "threads": args.threads,
        "bf16_units": not args.without_bf16_units and has_bf16_units(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
    }
    rows = []
    for name, times in seconds.items():
        p20, p50, p80 = (q * 1e3 for q in quantiles(times))
        row = {**common, "provider": name, "p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "repeats": args.repeats}
        if ours is not None:
            row["median_ratio_to_ours"] = statistics.median(a / b for a, b in zip(times, ours, strict=True))
        rows.append(row)
    return rows


def make(provider: str, shapes: list[tuple[int, int]]) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer: torch.optim.Optimizer = PROVIDERS[provider][0](params, lr=0.02)
    return optimizer


def check(optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Take one step with each, which also warms it up; raise for one that moves its parameters differently."""
    starts = {name: [p.detach().clone() for p in parameters(optimizer)] for name, optimizer in optimizers.items()}
    for optimizer in optimizers.values():
        optimizer.step()
    exact = optimizers.get("float32 loop")
    if exact is None:
        return
    for name, optimizer in optimizers.items():
        pairs = zip(parameters(optimizer), parameters(exact), starts[name], strict=True)
        worst = max(float((a - b).norm() / (b - start).norm()) for a, b, start in pairs)
        if worst > PROVIDERS[name][1]:
            raise SystemExit(f"{name} is wrong: its update is {worst:.1e} away from the float32 loop's")


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


def report(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    units = "with" if first["bf16_units"] else "without"
    table = Table(
        title=f"{first['model']}, {first['matrices']} matrices, dimensions / {first['scale_down']}: "
        f"one step on {first['device']}, {first['threads']} threads, {units} bf16 units"
    )
    for heading in ("provider", "p20 ms", "p50 ms", "p80 ms", "median of paired ratios to fused_lw"):
        table.add_column(heading, justify="left" if heading == "provider" else "right")
    for row in rows:
        times = (f"{row[key]:.1f}" for key in ("p20_ms", "p50_ms", "p80_ms"))
        table.add_row(row["provider"], *times, f"{row.get('median_ratio_to_ours', float('nan')):.2f}")
    Console().print(table)


def quantiles(times: list[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    p20, p80 = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return p20, statistics.median(ordered), p80


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def has_bf16_units() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def revision() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
