"""Measure alternatives to the shipped configurations on the present GPU: what `fused-lw tune` runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fused_lw.kernels import reference
from fused_lw.kernels.coefficients import schedule
from fused_lw.kernels.configs import SHIPPED, Kind, ProductConfig, family, is_valid
from fused_lw.kernels.products import General, InputNorm, OnChip, Product, Symmetric

# The kinds that are worth tuning: partial sums are a matter of memory speed alone.
TUNABLE: tuple[Kind, ...] = ("symmetric", "general", "onchip")

# Batches that are timed, (B, r, s): experts, attention, a large dense matrix; and heads or routers on chip.
SHAPES: dict[Kind, tuple[tuple[int, int, int], ...]] = {
    "symmetric": ((16, 1856, 2688), (4, 2688, 4096), (1, 4096, 14336)),
    "general": ((16, 1856, 2688), (4, 2688, 4096), (1, 4096, 14336)),
    "onchip": ((256, 64, 2048), (64, 32, 2880)),
}
# Each candidate differs from the shipped configuration in one of these.
_VARIATIONS: tuple[tuple[str, tuple[int | bool, ...]], ...] = (
    ("block_k", (32, 64, 128)),
    ("group", (4, 16)),
    ("num_warps", (4, 8)),
    ("num_stages", (2, 3, 4, 5)),
    ("programs_per_sm", (1, 2)),
    ("tma", (False, True)),
)
_TILES: dict[Kind, tuple[tuple[int, int], ...]] = {
    "symmetric": ((64, 64), (128, 128), (256, 256)),
    "general": ((64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256)),
    "onchip": ((64, 64), (64, 128)),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median milliseconds of one candidate over each of `SHAPES`, or why it did not run."""

    config: ProductConfig
    milliseconds: tuple[float, ...]
    failure: str | None = None

    @property
    def total(self) -> float:
        return sum(self.milliseconds) if self.failure is None else float("inf")


def candidates(arch: str, kind: Kind, itemsize: int) -> list[ProductConfig]:
    """The shipped configuration first, then every valid one that differs in one attribute."""
    shipped = SHIPPED[family(arch)][kind, itemsize]
    found = [shipped]
    for name, values in _VARIATIONS:
        if not (kind == "onchip" and name in ("block_k", "group")):
            found += [dataclasses.replace(shipped, **{name: value}) for value in values]  # type: ignore[arg-type]
    found += [dataclasses.replace(shipped, tile_m=m, tile_n=n) for m, n in _TILES[kind]]
    return list(dict.fromkeys(config for config in found if is_valid(config, arch, kind, itemsize)))


def product(kind: Kind, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Product:
    """A product of the kind over random matrices, r x s."""
    batch, r, _ = shape
    X = torch.randn(shape, device=device).to(dtype)
    norm = InputNorm(X.float().square().sum((1, 2)), None, 1e-7, "clamp", 1.0)
    if kind == "onchip":
        return OnChip(X, X.clone(), schedule("jordan", 5), norm)
    if kind == "symmetric":
        return Symmetric(X, X, torch.empty(batch, r, r, dtype=dtype, device=device), norm=norm)
    L = torch.randn(batch, r, r, device=device).to(dtype) / r**0.5
    return General(L, X, torch.empty_like(X), beta=3.0, norm=norm)


def _always(config: ProductConfig) -> Callable[[str, Kind, torch.dtype], ProductConfig]:
    return lambda arch, kind, operands: config


def is_right(kind: Kind, dtype: torch.dtype, config: ProductConfig, device: torch.device) -> bool:
    """True if a configuration agrees with the torch oracle on shapes that are no multiples of its tiles."""
    from fused_lw.kernels.triton_backend import describe, run_launches

    wide = 16 // dtype.itemsize
    shape = (2, 40, 21 * wide) if kind == "onchip" else (1, 17 * wide, 35 * wide)
    computed = product(kind, shape, dtype, device)
    expected = dataclasses.replace(computed, out=torch.empty_like(computed.out))
    run_launches(describe([[(computed,)]], _always(config)))
    reference.run(expected)
    error = (computed.out.float() - expected.out.float()).norm() / expected.out.float().norm()
    return bool(error < (1e-4 if dtype == torch.float32 else 2e-2))


def tune(arch: str, kind: Kind, dtype: torch.dtype, device: torch.device, rounds: int = 15) -> Iterator[Measurement]:
    """Measure every candidate that computes the right thing, the shipped one first.

    Rounds are interleaved, so that a clock that drifts meets all candidates alike; the L2 cache is cold.
    """
    from fused_lw.kernels.triton_backend import describe, run_launches

    runners: dict[ProductConfig, list[Callable[[], None]]] = {}
    products = [product(kind, shape, dtype, device) for shape in SHAPES[kind]]
    for config in candidates(arch, kind, dtype.itemsize):
        try:
            right = is_right(kind, dtype, config, device)
        except Exception as error:  # whatever compiler and driver say of a candidate, the others are still worth timing
            yield Measurement(config, (), f"{type(error).__name__}: {error}".splitlines()[0][:100])
            continue
        if not right:
            yield Measurement(config, (), "wrong result")
            continue
        launches = [describe([[(p,)]], _always(config)) for p in products]
        runners[config] = [functools.partial(run_launches, each) for each in launches]
    times = interleaved_milliseconds(list(itertools.chain.from_iterable(runners.values())), device, rounds)
    for i, config in enumerate(runners):
        yield Measurement(config, tuple(times[i * len(products) : (i + 1) * len(products)]))


def interleaved_milliseconds(
    functions: Sequence[Callable[[], object]], device: torch.device, rounds: int
) -> list[float]:
    """Median time of each function on a GPU, by events, after one call to warm up and with a cold L2 cache."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for function, taken in zip(functions, samples, strict=True):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    return [statistics.median(taken) for taken in samples]
