"""How fast a device could be at most: peaks by datasheet or as measured, and floor times from exact counts of work."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from fused_lw.bench import environment, shapes, timing
from fused_lw.bench.shapes import Batch
from fused_lw.kernels import NSRule, schedule, work
from fused_lw.kernels.newton_schulz import Precision
from fused_lw.kernels.pack_reference import copy_in_nbytes, copy_out_nbytes
from fused_lw.update import default_precision

Stage = Literal["copy-in", "newton-schulz", "copy-out"]
STAGES: tuple[Stage, ...] = ("copy-in", "newton-schulz", "copy-out")


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations and bytes per second of one device; a multiply-add is two operations."""

    device: str
    flops: float  # dense, 16-bit operands on a GPU, float32 on a CPU
    bandwidth: float  # of its memory
    source: str


# Per GPU, dense 16-bit tensor-core rate and memory bandwidth. Where a data sheet gives the rate with sparsity, it is
# halved; where it gives a whole system, it is divided by the GPUs in it.
_DGX_B200 = "NVIDIA DGX B200 data sheet: 36 PFLOPS sparse FP16 (half of 72 FP8) and 64 TB/s per 8 GPUs"
DATASHEETS: tuple[tuple[str, Peak], ...] = (
    (r"\bH100\b(?!.*(PCIe|NVL))", Peak("H100 SXM", 989.4e12, 3.35e12, "NVIDIA H100 data sheet, SXM5")),
    (r"\bH200\b(?!.*NVL)", Peak("H200 SXM", 989.4e12, 4.8e12, "NVIDIA H200 data sheet, SXM")),
    (r"\bB200\b", Peak("B200", 2250e12, 8.0e12, _DGX_B200)),
    (
        r"\bGB200\b",
        Peak("GB200", 2500e12, 8.0e12, "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS sparse FP16, 576 TB/s per 72 GPUs"),
    ),
    (
        r"\bGB300\b",
        Peak("GB300", 2500e12, 8.0e12, "NVIDIA GB300 NVL72 data sheet: 360 PFLOPS sparse FP16, 576 TB/s per 72 GPUs"),
    ),
    (r"\bMI300X\b", Peak("MI300X", 1307.4e12, 5.3e12, "AMD Instinct MI300X data sheet")),
)


def datasheet(device_name: str) -> Peak | None:
    """The data sheet's peak of a device by the name that torch gives it, or None."""
    return next((peak for pattern, peak in DATASHEETS if re.search(pattern, device_name)), None)


def measured(device: torch.device) -> Peak:
    """What a large matmul and a large copy reach on this device now, the best of a few."""
    on_gpu = device.type == "cuda"
    n, dtype = (8192, torch.float16) if on_gpu else (1536, torch.float32)
    A, B = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    C = torch.empty_like(A)
    source = torch.empty(2**30 if on_gpu else 2**27, dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def best(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    flops = 2 * n**3 / best(lambda: torch.matmul(A, B, out=C))
    bandwidth = 2 * source.nbytes / best(lambda: target.copy_(source))
    name = torch.cuda.get_device_name(device) if on_gpu else environment.cpu_name()
    kind = str(dtype).removeprefix("torch.")
    return Peak(name, flops, bandwidth, f"measured: {kind} matmul of {n}, copy of {source.nbytes >> 20} MiB")


def peak(device: torch.device, source: str = "auto") -> Peak:
    """The peak to compare with: "datasheet", "measured", or "auto": the data sheet's where there is one."""
    if source != "measured" and device.type == "cuda":
        found = datasheet(torch.cuda.get_device_name(device))
        if found is not None:
            return found
    if source == "datasheet":
        raise ValueError(f"no data sheet for {environment.describe(device)['device']!r}: use --peak measured")
    return measured(device)


def floors(batch: Batch, peak: Peak, precision: Precision) -> dict[Stage, float]:
    """Least seconds of each stage of the step: its bytes at full bandwidth or its operations at full rate.

    Newton-Schulz by the algorithm that needs least, with the operations that it needs (half of symmetric products)
    and every operand read and written once. Copies are those of float32 gradients, momenta and parameters.
    """
    workspace = NSRule(schedule("jordan", 5), precision=precision).workspace_dtype
    copies = copy_nbytes(batch.size * batch.r * batch.s, workspace)
    return {
        "copy-in": copies["copy-in"] / peak.bandwidth,
        "newton-schulz": min(
            max(w.useful_flops / peak.flops, w.nbytes / peak.bandwidth)
            for w in (
                work(
                    [(batch.size, batch.r, batch.s)],
                    NSRule(schedule("jordan", 5), algorithm=algorithm, precision=precision),
                )
                for algorithm in ("standard", "gram")
            )
        ),
        "copy-out": copies["copy-out"] / peak.bandwidth,
    }


def against(floor: float | None, samples: timing.Samples, peak: Peak) -> environment.Row:
    """The fields of a row that compare it with its floor; empty values where there is none."""
    seconds = timing.quantiles(samples.device).p50
    if floor is None:
        return {"floor_ms": None, "gap_ms": None, "roofline_fraction": None, "peak": None}
    return {
        "floor_ms": floor * 1e3,
        "gap_ms": (seconds - floor) * 1e3,
        "roofline_fraction": floor / seconds,
        "peak": peak.source,
    }


def copy_nbytes(elements: int, workspace: torch.dtype) -> dict[Stage, int]:
    """Bytes that the copies around Newton-Schulz move, of float32 gradients, momenta and parameters."""
    return {
        "copy-in": copy_in_nbytes(elements, torch.float32, torch.float32, workspace),
        "copy-out": copy_out_nbytes(elements, torch.float32, workspace),
    }


def add_peak_argument(parser: argparse.ArgumentParser) -> None:
    """The choice of `peak`'s source."""
    parser.add_argument("--peak", choices=("auto", "datasheet", "measured"), default="auto", help="of the roofline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes.add_arguments(parser)
    parser.add_argument("--device", default=environment.default_device(), help="measure the peak of this one")
    parser.add_argument(
        "--of", metavar="NAME", help="instead: by data sheet, " + ", ".join(p.device for _, p in DATASHEETS)
    )


def run(args: argparse.Namespace) -> int:
    try:
        batches = shapes.from_arguments(args)
        precision: Precision = "mixed"
        if args.of is not None:
            found = next((p for _, p in DATASHEETS if args.of.lower() in p.device.lower().split()), None)
            if found is None:
                raise ValueError(f"no data sheet of {args.of!r}, only of {', '.join(p.device for _, p in DATASHEETS)}")
        else:
            device = environment.use_device(args.device)
            found, precision = measured(device), default_precision(device)
    except ValueError as error:
        print(f"fused-lw bench roofline: {error}", file=sys.stderr)
        return 2
    print_floors(batches, found, precision)
    return 0


def print_floors(batches: list[Batch], peak: Peak, precision: Precision) -> None:
    table = Table(
        title=f"least milliseconds on {peak.device} ({precision}): "
        f"{peak.flops / 1e12:.2f} TFLOP/s, {peak.bandwidth / 1e12:.3f} TB/s\n{peak.source}"
    )
    for heading in ("shape", *STAGES, "sum"):
        table.add_column(heading, justify="right")
    for batch in batches:
        seconds = floors(batch, peak, precision)
        table.add_row(str(batch), *(f"{value * 1e3:.4f}" for value in (*seconds.values(), sum(seconds.values()))))
    Console(highlight=False).print(table)
