"""Layouts at scale: the sweep over models that the planner's claims rest on, and a simulator of the step.

    python -m fused_lw.bench.layouts sweep      # -> bench/results/layouts.csv, exact counts, no hardware involved
    python -m fused_lw.bench.layouts simulate   # -> bench/results/layouts_simulated.csv

Times of `simulate` are simulated from the table below. None was measured on a GPU.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from fused_lw.layout import Layout, ParamSpec, Policy, model_names, model_specs, ns_cost, plan

RESULTS = Path(__file__).parent / "results"
RANKS = (8, 16, 32, 64, 128, 256)
# Bucket sizes of the sweep, as the buffer's elements over this; None is one bucket.
BUCKET_DIVISORS = (None, 16, 6)
EXPERT_PARALLEL = 8


class Hardware(NamedTuple):
    """One GPU of a machine; the three rates are of the data sheet, the rest is assumed."""

    flops: float  # dense 16-bit tensor-core operations per second
    nvlink: float  # bytes per second in one direction
    network: float  # bytes per second in one direction
    nvlink_ranks: int  # GPUs in one NVLink domain
    source: str


HARDWARE = {
    "GB200": Hardware(
        flops=2.5e15,
        nvlink=0.9e12,
        network=50e9,
        nvlink_ranks=72,
        source="NVIDIA GB200 NVL72 data sheet: 360 PFLOPS sparse 16-bit and 130 TB/s NVLink per 72; 400 Gb/s network",
    ),
    "H100": Hardware(
        flops=989e12,
        nvlink=0.45e12,
        network=50e9,
        nvlink_ranks=8,
        source="NVIDIA H100 SXM and DGX H100 data sheets: 989 TFLOPS dense 16-bit; 900 GB/s NVLink; 400 Gb/s network",
    ),
}
# Assumptions, the same for every policy: the share of the data sheet's rates that is reached, the time a collective
# takes to start, the backward pass that reduce-scatters hide behind, and bytes per element of gradients and weights.
EFFICIENCY = 0.6
LATENCY = 20e-6
BACKWARD = 2.0
GRADIENT_BYTES = 2
WEIGHT_BYTES = 2


def sweep_cases() -> Iterator[tuple[str, str, list[ParamSpec], int, int | None]]:
    """(model, buffer, specs, ranks, bucket size) of every case."""
    for model in model_names():
        for kind in ("dense", "expert"):
            specs = model_specs(model, ep=EXPERT_PARALLEL, kinds=(kind,))
            numel = sum(spec.numel for spec in specs)
            for ranks in RANKS if specs else ():
                for divisor in BUCKET_DIVISORS:
                    yield model, kind, specs, ranks, None if divisor is None else numel // divisor


def sweep_row(model: str, kind: str, specs: Sequence[ParamSpec], ranks: int, bucket_size: int | None) -> dict[str, Any]:
    """Both policies on one case: padding, imbalance, maximum cost over the lower bound, buckets, batches."""
    row: dict[str, Any] = {
        "model": model,
        "buffer": kind,
        "matrices": len(specs),
        "ranks": ranks,
        "bucket_size": bucket_size or "",
    }
    policies: tuple[Policy, ...] = ("megatron", "balanced")
    for policy in policies:
        layout = plan(specs, dp_size=ranks, bucket_size=bucket_size, policy=policy)
        row |= {
            f"{policy}_buffer": layout.buffer_numel,
            f"{policy}_padding": f"{layout.padding:.6f}",
            f"{policy}_max_cost": max(layout.shard_costs),
            f"{policy}_imbalance": f"{layout.imbalance:.6f}",
            f"{policy}_over_bound": f"{max(layout.shard_costs) / layout.lower_bound:.6f}",
            f"{policy}_buckets": len(layout.buckets),
            f"{policy}_launches": layout.launches,
        }
    return row


def simulate(layout: Layout, hardware: Hardware, ranks_per_domain: int) -> dict[str, float]:
    """Seconds of one optimizer step, simulated.

    Gradients of a bucket are ready in proportion to the backward pass done, and its ring reduce-scatter runs after
    the one before it; Newton-Schulz starts when all are done. A bucket's all-gather starts when the slowest rank
    has finished the bucket, and runs after the one before it. What is counted is from the end of the backward
    pass on. Copies and the gather of GTP rows are the same for every policy and are left out.
    """
    ranks = layout.dp_size
    rate = (hardware.nvlink if ranks <= ranks_per_domain else hardware.network) * EFFICIENCY
    costs = [[0] * ranks for _ in layout.buckets]
    for spec, slot in zip(layout.params, layout.slots, strict=True):
        costs[slot.bucket][slot.shard] += ns_cost(spec, "flops")

    def collective(elements: int, size: int) -> float:
        return LATENCY + elements * size * (ranks - 1) / ranks / rate

    reduced = ready = 0.0
    for bucket in layout.buckets:
        ready += BACKWARD * bucket.numel / layout.numel
        reduced = max(reduced, ready) + collective(bucket.end - bucket.start, GRADIENT_BYTES)
    exposed = reduced - BACKWARD
    done = [0.0] * ranks
    gathered = 0.0
    for bucket, cost in zip(layout.buckets, costs, strict=True):
        done = [before + c / (hardware.flops * EFFICIENCY) for before, c in zip(done, cost, strict=True)]
        gathered = max(gathered, *done) + collective(bucket.end - bucket.start, WEIGHT_BYTES)
    return {"reduce_scatter_exposed": exposed, "newton_schulz": max(done), "step": exposed + gathered}


class Scenario(NamedTuple):
    model: str
    kind: str
    hardware: str
    ranks: int  # of the buffer
    gtp: int
    ep: int
    bucket_size: int


# The end-to-end setting of the layer-wise work: 1,024 GB200, rows of dense matrices over 64 of them (so 16 share the
# dense buffer), experts over 8 (so 128 share theirs). Then one model over growing numbers of ranks.
SCENARIOS = (
    Scenario("ultra-half", "dense", "GB200", 16, 64, 8, 400_000_000),
    Scenario("ultra-half", "expert", "GB200", 128, 1, 8, 400_000_000),
    *(Scenario("qwen3-30b-a3b", "expert", "GB200", 2**k, 1, 1, 400_000_000) for k in range(3, 15)),
    *(Scenario("llama3-70b", "dense", "H100", 2**k, 1, 1, 400_000_000) for k in range(3, 10)),
)


def simulated_rows(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """One row a policy, all planned with the same costs (the operations that run), so that policies are compared."""
    specs = model_specs(scenario.model, ep=scenario.ep, gtp=scenario.gtp, kinds=(scenario.kind,))
    hardware = HARDWARE[scenario.hardware]
    policies: tuple[Policy, ...] = ("numel", "megatron", "balanced")
    for policy in policies:
        layout = plan(
            specs,
            dp_size=scenario.ranks,
            bucket_size=scenario.bucket_size,
            policy=policy,
            cost="flops",
        )
        seconds = simulate(layout, hardware, hardware.nvlink_ranks // scenario.gtp)
        yield scenario._asdict() | {
            "policy": policy,
            "buckets": len(layout.buckets),
            "padding": f"{layout.padding:.4f}",
            **{f"simulated_{name}_ms": f"{value * 1e3:.3f}" for name, value in seconds.items()},
            "hardware_source": hardware.source,
        }


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows written to {path}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "simulate"))
    args = parser.parse_args(argv)
    if args.what == "sweep":
        rows = [sweep_row(*case) for case in track(list(sweep_cases()), "planning")]
        write(RESULTS / "layouts.csv", rows)
    else:
        rows = [row for scenario in track(SCENARIOS, "simulating") for row in simulated_rows(scenario)]
        write(RESULTS / "layouts_simulated.csv", rows)


if __name__ == "__main__":
    main()
