"""Times of several functions side by side: interleaved, with a cold cache, device and host apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

# Written before every call, so that no operand is still in a cache: larger than any L2 or L3 that we know of.
FLUSH_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}

Call = Callable[[], object]


class Quantiles(NamedTuple):
    p20: float
    p50: float
    p80: float


class Samples(NamedTuple):
    """Seconds of each round: until the device was done, and until the call returned (the same on a CPU)."""

    device: list[float]
    host: list[float]


def quantiles(samples: Sequence[float]) -> Quantiles:
    ordered = sorted(samples)
    p20, p80 = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return Quantiles(p20, statistics.median(ordered), p80)


def fields(samples: Samples, device: torch.device) -> dict[str, float | None]:
    """The quantiles as milliseconds under the names that rows have; host time apart only where it differs."""
    p20, p50, p80 = quantiles(samples.device)
    host = quantiles(samples.host).p50 * 1e3 if device.type == "cuda" else None
    return {"p20_ms": p20 * 1e3, "p50_ms": p50 * 1e3, "p80_ms": p80 * 1e3, "host_ms": host}


def paired_ratio(times: Sequence[float], to: Sequence[float]) -> float:
    """Median of the ratios within each round: what drifts slower than a round drops out of it."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def interleave(
    calls: Mapping[str, Call], device: torch.device, rounds: int, progress: bool = False
) -> dict[str, Samples]:
    """Time every call once a round, in turn, with a bar on stderr if there is to be `progress`. They must be warm."""
    flush = torch.empty(FLUSH_BYTES[device.type], dtype=torch.int8, device=device)
    samples = {name: Samples([], []) for name in calls}
    names = list(calls)
    for number in track(range(rounds), "rounds", console=Console(stderr=True), disable=not progress):
        # Another one goes first each round, so that none always follows the same.
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            flush.fill_(number % 2)
            seconds = _cuda_seconds(calls[name]) if device.type == "cuda" else _cpu_seconds(calls[name])
            samples[name].device.append(seconds[0])
            samples[name].host.append(seconds[1])
    return samples


def _cpu_seconds(call: Call) -> tuple[float, float]:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, seconds


def _cuda_seconds(call: Call) -> tuple[float, float]:
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    begun = time.perf_counter()
    call()
    host = time.perf_counter() - begun
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, host


def captured(call: Call) -> Call:
    """The call as a CUDA graph. It must be warm; raises RuntimeError where it cannot be captured."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
