"""Who orthogonalizes: our algorithms and backends, torch as people write it, and the libraries that can be installed.

Peers get every fair advantage: matrices lie oriented (r <= s), in one contiguous batch, in the dtype that they prefer.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import _muon

from fused_lw.bench import environment
from fused_lw.bench.gate import EPS, Accuracy, Schedule
from fused_lw.bench.shapes import Batch
from fused_lw.kernels import NSRule, row_stride, schedule, scratch_nbytes, work
from fused_lw.kernels.device import ResolvedBackend, architecture, explain_backend, resolve_backend
from fused_lw.kernels.newton_schulz import Precision, Problem, executed_flops, prepare
from fused_lw.update import default_precision

JORDAN: Schedule = schedule("jordan", 5)
# The schedule that Dion's kernel has built in, from modded-nanogpt.
DION: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
OURS = "fused_lw"
COMPILED_SHAPES = 1000

Algorithm = Literal["auto", "standard", "gram"]


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to orthogonalize a batch.

    Attributes:
        make: takes the batch ([B, r, s] float32) and returns what is timed: it reads the batch, leaves it as it is,
            and returns the result [B, r, s] in any dtype.
        accuracy: the class it claims; `gate` holds it to that.
        flops: operations it executes for a batch; None where that is its own affair.
        backend: of ours; peers have none.
        is_choice: of ours, what users get without asking for an algorithm or a backend.
        unavailable: why it cannot run here, or None.
    """

    name: str
    make: Callable[[Tensor], Callable[[], Tensor]]
    accuracy: Accuracy
    dtype: str
    algorithm: Callable[[Batch], str]
    flops: Callable[[Batch], float] | None
    version: str
    schedule: Schedule = JORDAN
    backend: str | None = None
    is_choice: bool = False
    unavailable: str | None = None


def providers(device: torch.device) -> list[Provider]:
    """Everyone who could run on a device; those that cannot say why."""
    return [*_ours(device), *_torch(), *_libraries(device)]


def select(names: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The names asked for: those named, or where one names nobody, all that start with it. All if none are asked for.

    ValueError for one that fits nobody.
    """
    if wanted is None:
        return list(names)
    kept = []
    for name in wanted:
        fits = [known for known in names if known == name or (name not in names and known.startswith(name))]
        if not fits:
            raise ValueError(f"no provider {name!r}, only: {', '.join(names)}")
        kept += fits
    return [name for name in names if name in kept]


def plain_flops(batch: Batch) -> float:
    """Five steps of the standard iteration with full products: what a loop over torch matmuls executes."""
    return batch.size * 5.0 * (4 * batch.r**2 * batch.s + 2 * batch.r**3)


def plain_bytes(batch: Batch, dtype: str) -> float:
    """What those products read and write, each operand once: the standard against which GB/s are given."""
    wide, square = batch.r * batch.s, batch.r**2
    return batch.size * 5.0 * (wide + square + 2 * square + square + 2 * wide) * (4 if dtype == "fp32" else 2)


def _ours(device: torch.device) -> list[Provider]:
    own: Precision = default_precision(device)
    chosen = resolve_backend("auto", device)
    found = []
    backends: tuple[ResolvedBackend, ...] = ("triton", "torch")
    for backend in backends:
        reason = _obstacle(backend, device)
        choices: list[tuple[Precision, Algorithm]] = [(own, "auto"), (own, "standard"), (own, "gram")]
        # A second class of accuracy: what torch.optim.Muon computes in.
        choices.append(("bf16" if device.type == "cpu" else "fp16", "auto"))
        for precision, algorithm in choices[:1] if reason else choices:
            rule = NSRule(JORDAN, eps=EPS, algorithm=algorithm, precision=precision)
            parts = [OURS]
            parts += [backend] if backend != chosen else []
            parts += [precision] if precision != own else []
            parts += [algorithm] if algorithm != "auto" else []
            found.append(
                Provider(
                    " ".join(parts),
                    functools.partial(_make_ours, rule=rule, backend=backend),
                    "float32" if precision == "fp32" else "half",
                    precision,
                    functools.partial(_algorithm, rule, backend),
                    functools.partial(_our_flops, rule, backend, device),
                    importlib.metadata.version("fused-lw"),
                    backend=backend,
                    is_choice=backend == chosen and algorithm == "auto",
                    unavailable=reason,
                )
            )
    return found


def _obstacle(backend: ResolvedBackend, device: torch.device) -> str | None:
    if backend == "triton" and device.type == "cpu":
        return "Triton runs on GPUs; its interpreter on a CPU is for debugging"
    return None if backend == "torch" or resolve_backend("auto", device) == "triton" else explain_backend(device)


def _algorithm(rule: NSRule, backend: ResolvedBackend, batch: Batch) -> Literal["standard", "gram", "onchip"]:
    return rule.resolve_algorithm(batch.r, batch.s, backend)


def _our_flops(rule: NSRule, backend: ResolvedBackend, device: torch.device, batch: Batch) -> float:
    algorithm = _algorithm(rule, backend, batch)
    if backend == "triton":
        return work([(batch.size, batch.r, batch.s)], rule, architecture(device)).executed_flops
    assert algorithm != "onchip", "the torch backend has none"
    return batch.size * executed_flops(batch.r, batch.s, rule, algorithm, backend)


def _make_ours(source: Tensor, rule: NSRule, backend: ResolvedBackend) -> Callable[[], Tensor]:
    """As the optimizer runs it from its second step on: described once, with copy and norms every time."""
    batch, r, s = source.shape
    dtype = rule.workspace_dtype
    X = torch.zeros(batch, r, row_stride(s, dtype), dtype=dtype, device=source.device)[..., :s]
    sq_norm = torch.empty(batch, device=source.device)
    # An fp16 workspace is stored near 1: Gaussian matrices already are.
    scale = torch.ones_like(sq_norm) if dtype == torch.float16 else None
    nbytes = scratch_nbytes([(batch, r, s)], rule, backend=backend)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=source.device)
    orthogonalize = prepare([Problem(X, sq_norm, scale)], rule, backend=backend, scratch=scratch)

    def call() -> Tensor:
        X.copy_(source)
        torch.linalg.vector_norm(torch.linalg.vector_norm(source, dim=2), dim=1, out=sq_norm)
        sq_norm.square_()
        (result,) = orthogonalize()
        assert result is not None, "only problems with an update have none"
        return result

    return call


def _torch() -> list[Provider]:
    def provider(name: str, make: Callable[[Tensor], Callable[[], Tensor]], accuracy: Accuracy, dtype: str) -> Provider:
        return Provider(name, make, accuracy, dtype, lambda _: "standard", plain_flops, torch.__version__)

    return [
        provider("torch loop", _make_loop, "float32", "fp32"),
        provider("torch baddbmm", functools.partial(_make_batched, dtype=torch.float32), "float32", "fp32"),
        provider("torch compiled", functools.partial(_make_compiled, dtype=torch.float32), "float32", "fp32"),
        provider("torch.optim.Muon", _make_torch_muon, "half", "bf16"),
        provider("torch baddbmm bf16", functools.partial(_make_batched, dtype=torch.bfloat16), "half", "bf16"),
        provider("torch compiled bf16", functools.partial(_make_compiled, dtype=torch.bfloat16), "half", "bf16"),
    ]


def batched(X: Tensor) -> Tensor:  # [B, r, s] r <= s
    """The iteration as batched torch: three products a step, the two additions inside `baddbmm`."""
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(EPS)
    for a, b, c in JORDAN:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def _make_batched(source: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: batched(source.to(dtype))


def _make_compiled(source: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    # One function for all shapes and dtypes: beyond its limit torch would give up compiling, and say so once.
    torch._dynamo.config.recompile_limit = COMPILED_SHAPES
    compiled = torch.compile(lambda X: batched(X.to(dtype)), dynamic=False)
    return lambda: compiled(source)


def _make_loop(source: Tensor) -> Callable[[], Tensor]:
    def one(X: Tensor) -> Tensor:
        X = X / X.norm().clamp_min(EPS)
        for a, b, c in JORDAN:
            A = X @ X.mT
            X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
        return X

    return lambda: torch.stack([one(X) for X in source])


def _make_torch_muon(source: Tensor) -> Callable[[], Tensor]:
    iterate = _muon._zeropower_via_newtonschulz
    return lambda: torch.stack([iterate(X, JORDAN[0], len(JORDAN), EPS) for X in source])


def _libraries(device: torch.device) -> list[Provider]:
    """Optional peers: name, module and distribution to look for, how to call it."""
    known: tuple[tuple[str, str, str, Callable[[Tensor], Callable[[], Tensor]], str, Schedule], ...] = (
        ("gram-newton-schulz (quack)", "gram_newton_schulz", "gram-newton-schulz", _make_gram, "gram", JORDAN),
        ("Emerging-Optimizers", "emerging_optimizers", "emerging-optimizers", _make_emerging, "standard", JORDAN),
        ("Dion", "dion", "dion", _make_dion, "standard", DION),
    )
    found = []
    for name, module, distribution, make, algorithm, rule in known:
        version = environment.installed_version(module, distribution)
        reason = None
        if version is None:
            reason = f"not installed (the package {distribution})"
        elif device.type != "cuda":
            reason = "its kernels need a CUDA device"
        found.append(
            Provider(
                name,
                make,
                "half",
                "fp16" if make is _make_gram else "bf16",
                lambda _, algorithm=algorithm: algorithm,  # type: ignore[misc]
                None,
                version or "",
                rule,
                unavailable=reason,
            )
        )
    return found


def _make_gram(source: Tensor) -> Callable[[], Tensor]:
    from gram_newton_schulz import GramNewtonSchulz  # type: ignore[import-not-found]

    iterate = GramNewtonSchulz(ns_coefficients=[list(triple) for triple in JORDAN])
    # It normalizes a float32 input in place; of bf16 it makes a copy.
    X = source.bfloat16()
    return lambda: iterate(X)


def _make_emerging(source: Tensor) -> Callable[[], Tensor]:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import (  # type: ignore[import-not-found]
        newton_schulz,
    )

    def call() -> Tensor:
        # What makes it compute in bf16, with its triangular kernel.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return torch.stack([newton_schulz(X, len(JORDAN), "simple", use_syrk=True) for X in source])
        finally:
            torch.set_float32_matmul_precision(before)

    return call


def _make_dion(source: Tensor) -> Callable[[], Tensor]:
    from dion.newton_schulz_triton import newton_schulz_triton  # type: ignore[import-not-found]

    X = source.bfloat16()
    return lambda: newton_schulz_triton(X, epsilon=EPS)
