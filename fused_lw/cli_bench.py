"""`fused-lw bench`: one subcommand per benchmark, each a module of `fused_lw.bench`."""

from __future__ import annotations

import argparse
import importlib

# name -> (module with `add_arguments(parser)` and `run(args) -> exit status`, one line of help)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "ns": ("fused_lw.bench.newton_schulz", "Newton-Schulz on same-shape batches, providers side by side"),
    "step": ("fused_lw.bench.step", "whole optimizer steps over a model's matrices"),
    "pack": ("fused_lw.bench.pack", "the copies around Newton-Schulz, packed against torch"),
    "layout": ("fused_lw.bench.planning", "planning time and the layouts of every policy"),
    "report": ("fused_lw.bench.report", "result files as tables, Markdown and pictures; what became slower"),
    "roofline": ("fused_lw.bench.roofline", "least time of each shape and stage on a device"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, help_text) in BENCHMARKS.items():
        sub = subparsers.add_parser(name, help=help_text, description=help_text)
        importlib.import_module(module).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    status: int = importlib.import_module(BENCHMARKS[args.benchmark][0]).run(args)
    return status
