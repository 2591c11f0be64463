"""`fused-lw bench layout`: how long planning takes, and what each policy's layout costs. No hardware involved."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

import torch
from rich.console import Console

from fused_lw.arguments import elements, positive
from fused_lw.bench import environment, tables, timing
from fused_lw.bench.environment import Row
from fused_lw.layout import ParamSpec, Policy, model_names, model_specs, plan

ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help=", ".join(model_names()))
    parser.add_argument("--dp", type=positive, default=32, metavar="N", help="ranks that share a buffer (default: 32)")
    parser.add_argument("--ep", type=positive, default=1, metavar="E", help="expert-parallel ranks (default: 1)")
    parser.add_argument("--bucket-size", type=elements, metavar="S", help="elements, like 400M (default: one bucket)")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"timings of each (default: {ROUNDS})")
    environment.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    about = environment.describe(torch.device("cpu"))
    rows: list[Row] = []
    try:
        environment.check_json(args.json)
        for kind in ("dense", "expert"):
            specs = model_specs(args.model, ep=args.ep, kinds=(kind,))
            if specs:
                about |= {"model": args.model, "stage": kind}
                rows += [about | row for row in measure(specs, args.dp, args.bucket_size, args.rounds)]
    except ValueError as error:
        print(f"fused-lw bench layout: {error}", file=sys.stderr)
        return 2
    tables.print_rows(Console(highlight=False), rows)
    if args.json is not None:
        environment.append(args.json, rows)
    return tables.exit_status(rows)


def measure(specs: list[ParamSpec], dp_size: int, bucket_size: int | None, rounds: int) -> list[Row]:
    """A row per policy: seconds to plan, and of the layout its imbalance, padding, buckets and batches."""
    rows = []
    for policy in get_args(Policy):
        layout = plan(specs, dp_size=dp_size, bucket_size=bucket_size, policy=policy)
        layout.validate()
        call = {policy: lambda policy=policy: plan(specs, dp_size=dp_size, bucket_size=bucket_size, policy=policy)}
        samples = timing.interleave(call, torch.device("cpu"), rounds)[policy]
        rows.append(
            {
                "benchmark": "layout",
                "provider": policy,
                "batch": len(specs),
                "accuracy": "exact",
                "mode": "eager",
                "status": "measured",
                "ranks": dp_size,
                "bucket_size": bucket_size,
                "rounds": rounds,
                **timing.fields(samples, torch.device("cpu")),
                "imbalance": layout.imbalance,
                "padding": layout.padding,
                "buckets": len(layout.buckets),
                "batches": layout.launches,
                "max_cost": max(layout.shard_costs),
            }
        )
    return rows
