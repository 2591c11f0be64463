"""`fused-lw doctor`: what this machine has, and what the step would run for each kind of matrix here, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

import torch
from rich.console import Console
from rich.table import Table

from fused_lw.arguments import usable_device
from fused_lw.kernels.coefficients import schedule
from fused_lw.kernels.device import (
    ResolvedBackend,
    architecture,
    cpu_has_bf16_units,
    explain_backend,
    resolve_backend,
)
from fused_lw.kernels.newton_schulz import NSRule, executed_flops
from fused_lw.routing import model_from, split_params
from fused_lw.update import default_precision, default_scratch_bytes

# name -> rows, columns of a matrix as its parameter has it
SHAPES = {
    "square: attention output": (4096, 4096),
    "wide: MLP down": (4096, 14336),
    "tall: MLP up": (14336, 4096),
    "tall, 3 : 1: fused QKV": (2304, 768),
    "nearly square: expert": (1856, 2688),
    "short side up to 64": (64, 2048),
    "router": (128, 7168),
    "odd": (102, 767),
    "a single row": (1, 4096),
    "very wide: latent projection": (32768, 512),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="look at this device only, for example cpu or cuda:1")
    parser.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:FACTORY",
        help="say instead which parameters of a model Muon would step, and why; the factory takes no arguments, "
        "and its module may lie in this folder",
    )


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if args.model is not None:
        return _print_model(args.model, console)
    if args.device is not None:
        try:
            devices = [usable_device(args.device)]
        except ValueError as error:
            console.print(str(error), style="red", markup=False)
            return 2
    else:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        devices.append(torch.device("cpu"))
    _print_versions(console)
    for device in devices:
        console.print()
        _print_device(device, console)
    return 0


def _print_model(where: str, console: Console) -> int:
    try:
        split = split_params(model_from(where))
    except (ValueError, TypeError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    console.print(split.table())
    for optimizer, part in (("Muon", split.matrices), ("AdamW", split.others)):
        numel = sum(param.numel() for _, param in part)
        console.print(f"{optimizer} steps {len(part)} parameters with {numel / 1e6:.1f} M elements")
    return 0


def _print_versions(console: Console) -> None:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("fused-lw", "torch", "triton", "numpy", "matplotlib"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["CUDA or ROCm of torch"] = str(torch.version.cuda or torch.version.hip or "none: a CPU build")
    versions["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "not set")
    table = Table(show_header=False, box=None)
    for name, version in versions.items():
        table.add_row(name, version)
    console.print(table)


def _print_device(device: torch.device, console: Console) -> None:
    backend = resolve_backend("auto", device)
    precision = default_precision(device)
    rule = NSRule(schedule("jordan", 5), precision=precision)
    console.print(f"[bold]{device}[/]: {_describe(device)}")
    console.print(f"backend {explain_backend(device)}")
    console.print(f"precision {precision}, scratch memory up to {default_scratch_bytes(device) / 2**30:.1f} GiB")
    if device.type == "cpu" and cpu_has_bf16_units():
        console.print('this CPU has bf16 units: precision="bf16" is faster, and as accurate as torch.optim.Muon')
    table = Table()
    for heading in ("matrix", "rows x columns", "as worked on", "algorithm", "why"):
        table.add_column(heading)
    for name, (rows, cols) in SHAPES.items():
        r, s = min(rows, cols), max(rows, cols)
        algorithm = rule.resolve_algorithm(r, s, backend)
        table.add_row(name, f"{rows} x {cols}", f"{r} x {s}", algorithm, _reason(rule, r, s, backend))
    console.print(table)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {architecture(device)}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return device.type


def _reason(rule: NSRule, r: int, s: int, backend: ResolvedBackend) -> str:
    algorithm = rule.resolve_algorithm(r, s, backend)
    if algorithm == "onchip":
        return "short side up to 64: the whole iteration in one kernel"
    gram, standard = (executed_flops(r, s, rule, name, backend) / r**3 for name in ("gram", "standard"))
    if algorithm == "gram":
        return f"saves {1 - gram / standard:.0%}: {gram:.0f} r³ flops instead of {standard:.0f} r³"
    change = f"save only {1 - gram / standard:.0%}" if gram < standard else f"cost {gram / standard - 1:.0%} more"
    return f"{standard:.0f} r³ flops; gram would {change}"
