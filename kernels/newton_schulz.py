"""Newton-Schulz orthogonalization of batches of matrices: the rule, the batched call, and the function for users.

Letters: B matrices of one shape, r rows, s columns (r <= s after orientation).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fused_lw.kernels import coefficients as _coefficients
from fused_lw.kernels import reference
from fused_lw.kernels.coefficients import Coefficients, Triple
from fused_lw.kernels.device import Backend, ResolvedBackend, cpu_has_bf16_units, resolve_backend
from fused_lw.kernels.iteration import (
    ONCHIP_MAX_ROWS,
    ONCHIP_MAX_STEPS,
    Algorithm,
    gram,
    onchip,
    passes,
    splits_of,
    standard,
)
from fused_lw.kernels.pack_reference import fp16_scale
from fused_lw.kernels.products import Arena, General, InputNorm, Stage, Symmetric, Update, row_stride

Precision = Literal["fp32", "bf16", "fp16", "mixed"]

ALGORITHMS = ("auto", "standard", "gram")

# precision -> dtype of the input X, of every later X, and of the squares. The squares of "bf16" are fp16, but for those
# that multiply X: they have no need of bf16's range, and a Gram iteration in bf16 is unusable.
# On a CPU with bf16 units the standard iteration has them in bf16 all the same: they multiply nothing else fast.
_DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.float16),
    "fp16": (torch.float16, torch.float16, torch.float16),
    "mixed": (torch.bfloat16, torch.float16, torch.float16),
}

# What a blocked symmetric product takes of a whole one on a CPU (measured at r = 768 to 1,536).
BLOCKED_TRIANGLE = 0.8
# On a CPU the many products of small squares cost more than their flops. Gram was seen to pay where its flops and these
# are at most this share of the standard iteration's; of blocked squares, a larger one.
TORCH_GRAM_OVERHEAD = 2.5e6
TORCH_GRAM_WORTH = 0.75
TORCH_GRAM_WORTH_BLOCKED = 0.9
# The torch backend works through a batch in chunks of about this size, which stay in a CPU's cache.
TORCH_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class NSRule:
    """How to orthogonalize; matrices that share an oriented shape and a rule run as one batch.

    Attributes:
        schedule: one (a, b, c) per step (`coefficients.schedule`).
        eps: bounds the norm that X is divided by.
        eps_rule: "clamp" divides by max(‖X‖, eps) as torch.optim.Muon does, "add" by ‖X‖ + eps as KellerJordan's.
        norm_factor: multiplies ‖X‖ (Frobenius) first.
        algorithm: "standard", "gram", or "auto": whichever does less work. Matrices of up to 64 rows run the Gram
            iteration in one launch on the Triton backend, unless it is "standard".
        precision: "mixed" takes X in bf16 and computes in fp16; "fp16" wants X scaled near 1 (`Problem.scale`).
    """

    schedule: tuple[Triple, ...]
    eps: float = 1e-7
    eps_rule: Literal["clamp", "add"] = "clamp"
    norm_factor: float = 1.0
    algorithm: Literal["auto", "standard", "gram"] = "auto"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError("schedule is empty: an NSRule needs at least one (a, b, c)")
        if self.eps_rule not in ("clamp", "add"):
            raise ValueError(f"eps_rule must be 'clamp' or 'add'; got {self.eps_rule!r}")
        if not self.eps >= 0:
            raise ValueError(f"eps must be at least 0; got {self.eps}")
        if not self.norm_factor > 0:
            raise ValueError(f"norm_factor must be positive; got {self.norm_factor}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {self.algorithm!r}")
        if self.precision not in _DTYPES:
            raise ValueError(f"precision must be one of {', '.join(_DTYPES)}; got {self.precision!r}")

    @property
    def workspace_dtype(self) -> torch.dtype:
        """The dtype that copy-in writes X in."""
        return _DTYPES[self.precision][0]

    @property
    def x_dtype(self) -> torch.dtype:
        """The dtype of every later X, the result included."""
        return _DTYPES[self.precision][1]

    def square_dtype(self, algorithm: Algorithm, backend: ResolvedBackend) -> torch.dtype:
        """The dtype of the squares, but for those that multiply X, which take X's."""
        if self.precision == "bf16" and algorithm == "standard" and backend == "torch" and cpu_has_bf16_units():
            return torch.bfloat16
        return _DTYPES[self.precision][2]

    def resolve_algorithm(self, r: int, s: int, backend: ResolvedBackend) -> Algorithm:
        """The algorithm that runs for r x s matrices; it depends on nothing else, so neither do a matrix's bits."""
        if self.algorithm == "standard":
            return "standard"
        small = r <= ONCHIP_MAX_ROWS and len(self.schedule) <= ONCHIP_MAX_STEPS
        if backend == "triton" and small and self.precision != "fp32":
            return "onchip"
        if self.algorithm != "auto":
            return self.algorithm
        if self.square_dtype("standard", backend) == torch.bfloat16:
            return "standard"
        return _cheaper_algorithm(r, s, self, backend)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A batch of matrices of one shape, as copy-in leaves them."""

    X: Tensor  # [B, r, s] r <= s, rows `row_stride(s, dtype)` apart, unnormalized, workspace dtype; destroyed
    sq_norm: Tensor  # [B] fp32, sum of squares of the true matrix
    scale: Tensor | None = None  # [B] fp32, power of two that X was multiplied by when stored; None means 1


def _program(
    X: Tensor, Y: Tensor, norm: InputNorm | None, rule: NSRule, arena: Arena, backend: ResolvedBackend
) -> tuple[list[Stage], Tensor]:
    """The stages that orthogonalize X, by way of Y, and the tensor that holds the result after them."""
    algorithm = rule.resolve_algorithm(X.shape[1], X.shape[2], backend)
    if algorithm == "onchip":
        assert norm is not None, "the on-chip kernel normalizes"
        return onchip(X, norm, rule.schedule, Y.dtype)
    build = gram if algorithm == "gram" else standard
    splits = splits_of(X.shape[1], X.shape[2]) if backend == "triton" else 1
    return build(X, Y, norm, rule.schedule, rule.square_dtype(algorithm, backend), arena, splits)


def _take_y(X: Tensor, rule: NSRule, arena: Arena, backend: ResolvedBackend) -> Tensor:
    """What an iteration needs beside X, of X's shape, in the dtype that it computes X in."""
    batch, r, s = X.shape
    if rule.resolve_algorithm(r, s, backend) == "onchip":
        return X.view(rule.x_dtype)
    return arena.take(batch, r, s, rule.x_dtype)


def meta_program(shape: tuple[int, int, int], rule: NSRule, backend: ResolvedBackend) -> tuple[list[Stage], Arena]:
    """The program for a shape, built on tensors without storage: to count its work or its scratch."""
    batch, r, s = shape
    dtype = rule.workspace_dtype
    X = torch.empty(batch, r, row_stride(s, dtype), dtype=dtype, device="meta")[..., :s]
    norm = InputNorm(torch.empty(batch, device="meta"), None, rule.eps, rule.eps_rule, rule.norm_factor)
    arena = Arena(None)
    return _program(X, _take_y(X, rule, arena, backend), norm, rule, arena, backend)[0], arena


@functools.lru_cache(maxsize=1024)
def _cheaper_algorithm(r: int, s: int, rule: NSRule, backend: ResolvedBackend) -> Algorithm:
    gram, standard = (executed_flops(r, s, rule, algorithm, backend) for algorithm in ("gram", "standard"))
    if backend == "triton":
        return "gram" if gram < standard else "standard"
    worth = TORCH_GRAM_WORTH if r < reference.BLOCKED_MIN_ROWS[torch.float32] else TORCH_GRAM_WORTH_BLOCKED
    return "gram" if gram + TORCH_GRAM_OVERHEAD < worth * standard else "standard"


def executed_flops(
    r: int, s: int, rule: NSRule, algorithm: Literal["standard", "gram"], backend: ResolvedBackend
) -> float:
    """Flops of one r x s matrix by an algorithm: the Triton kernels compute one triangle of a symmetric product,
    torch all of it or, in blocks, little more than half.
    """
    if backend == "triton":
        triangle = 0.5
    else:
        native = rule.square_dtype(algorithm, backend) == torch.bfloat16
        blocked = reference.BLOCKED_MIN_ROWS[torch.bfloat16 if native else torch.float32]
        triangle = 1.0 if r < blocked else BLOCKED_TRIANGLE
    stages, _ = meta_program((1, r, s), dataclasses.replace(rule, algorithm=algorithm), backend)
    products = list(itertools.chain.from_iterable(stages))
    symmetric = sum(2.0 * r * r * p.P.shape[2] for p in products if isinstance(p, Symmetric))
    general = sum(2.0 * r * r * s for p in products if isinstance(p, General))
    return triangle * symmetric + general


def scratch_nbytes(shapes: Sequence[tuple[int, int, int]], rule: NSRule, *, backend: ResolvedBackend) -> int:
    """Bytes of scratch that `orthogonalize` needs for problems of these shapes (B, r, s).

    The torch backend works on one chunk of one problem at a time, so it needs the largest; the Triton backend
    works on all problems at once and needs the sum.
    """
    if backend == "torch":
        sizes = [_arena_nbytes((_torch_chunk(shape, rule), *shape[1:]), rule, backend) for shape in shapes]
        return max(sizes, default=0)
    return sum(_arena_nbytes(shape, rule, backend) for shape in shapes)


@functools.lru_cache(maxsize=4096)
def _arena_nbytes(shape: tuple[int, int, int], rule: NSRule, backend: ResolvedBackend) -> int:
    return meta_program(shape, rule, backend)[1].nbytes


@functools.lru_cache(maxsize=4096)
def _torch_chunk(shape: tuple[int, int, int], rule: NSRule) -> int:
    batch, r, s = shape
    one = (
        _arena_nbytes((1, r, s), rule, "torch")
        + r * row_stride(s, rule.workspace_dtype) * rule.workspace_dtype.itemsize
    )
    return max(1, min(batch, TORCH_CHUNK_BYTES // one))


def orthogonalize(
    problems: Sequence[Problem],
    rule: NSRule,
    *,
    backend: ResolvedBackend,
    scratch: Tensor,  # [n] uint8, n >= scratch_nbytes(shapes, rule, backend=backend), 256-byte aligned
) -> list[Tensor]:
    """Run the Newton-Schulz iteration on every problem.

    Returns one [B, r, s] tensor a problem, in the dtype that the rule computes X in, lying in the problem's X or
    in scratch; X is destroyed. Temporaries lie in scratch (torch adds a few the size of one chunk's squares).
    A matrix's result does not depend on which others are in the call.

    Raises:
        ValueError: an X of the wrong dtype or layout, or too little scratch.
    """
    results = prepare(problems, rule, backend=backend, scratch=scratch)()
    return [result for result in results if result is not None]


def prepare(
    problems: Sequence[Problem],
    rule: NSRule,
    *,
    backend: ResolvedBackend,
    scratch: Tensor,  # [n] uint8, as `orthogonalize` takes it
    updates: Sequence[Update | None] | None = None,
) -> Callable[[], list[Tensor | None]]:
    """Check and describe what `orthogonalize` would run, once.

    Each call of what is returned orthogonalizes what then lies in the problems' X and returns the results, always
    the same tensors; it copies nothing to the device and waits for nothing. A problem with an update (Triton only)
    ends by updating its parameters and has no result, unless it runs on chip, whose kernel only stores.
    """
    shapes = [_check_problem(i, problem, rule) for i, problem in enumerate(problems)]
    needed = scratch_nbytes(shapes, rule, backend=backend)
    if scratch.dtype != torch.uint8 or scratch.ndim != 1 or scratch.numel() < needed:
        raise ValueError(
            f"scratch must be a 1-D uint8 tensor of at least {needed} bytes; got {scratch.dtype} {tuple(scratch.shape)}"
        )
    if backend == "torch":
        return _prepare_torch(problems, shapes, rule, scratch)
    # Imported here: these modules need Triton, which is not everywhere.
    from fused_lw.kernels.triton_backend import describe, run_launches

    arena = Arena(scratch)
    programs: list[list[Stage]] = []
    results: list[Tensor | None] = []
    for problem, update in zip(problems, updates or [None] * len(problems), strict=True):
        Y = _take_y(problem.X, rule, arena, "triton")
        stages, result = _program(problem.X, Y, _input_norm(problem, rule), rule, arena, "triton")
        *_, (last,) = stages
        if update is not None and isinstance(last, General):
            stages[-1] = (replace(last, update=update),)
            results.append(None)
        else:
            results.append(result)
        programs.append(stages)
    launches = describe(programs)

    def run_triton() -> list[Tensor | None]:
        run_launches(launches)
        return results

    return run_triton


def _input_norm(problem: Problem, rule: NSRule, chunk: slice = slice(None)) -> InputNorm:
    scale = None if problem.scale is None else problem.scale[chunk]
    return InputNorm(problem.sq_norm[chunk], scale, rule.eps, rule.eps_rule, rule.norm_factor)


def _prepare_torch(
    problems: Sequence[Problem], shapes: Sequence[tuple[int, int, int]], rule: NSRule, scratch: Tensor
) -> Callable[[], list[Tensor | None]]:
    """One chunk of one problem after the other, all in the same scratch, each leaving its result in problem.X."""
    calls: list[reference.Call] = []
    for problem, shape in zip(problems, shapes, strict=True):
        batch, size = shape[0], _torch_chunk(shape, rule)
        for start in range(0, batch, size):
            chunk = slice(start, min(start + size, batch))
            calls += _chunk_calls(problem.X[chunk], _input_norm(problem, rule, chunk), rule, scratch)
    results: list[Tensor | None] = [problem.X.view(rule.x_dtype) for problem in problems]

    def run() -> list[Tensor | None]:
        for call in calls:
            call()
        return results

    return run


def _chunk_calls(X: Tensor, norm: InputNorm, rule: NSRule, scratch: Tensor) -> list[reference.Call]:
    """What orthogonalizes X in place."""
    arena = Arena(scratch)
    Y = _take_y(X, rule, arena, "torch")
    algorithm = rule.resolve_algorithm(X.shape[1], X.shape[2], "torch")
    square_dtype = rule.square_dtype(algorithm, "torch")
    if rule.precision == "fp32" or square_dtype == torch.bfloat16:
        # No product has to be scaled, or round once more, when X is divided by its norm first. It starts where it has
        # to for the last product to lie in X.
        begin, other = (X, Y) if passes(algorithm, rule.schedule, square_dtype) % 2 == 0 else (Y, X)
        stages, result = _program(begin, other, None, rule, arena, "torch")
        calls: list[reference.Call] = [reference.normalization(X, norm, begin)]
    else:
        stages, result = _program(X, Y, norm, rule, arena, "torch")
        calls = []
    calls += itertools.chain.from_iterable(map(reference.calls, itertools.chain.from_iterable(stages)))
    home = X.view(result.dtype)
    if result.data_ptr() != home.data_ptr():
        calls.append(functools.partial(home.copy_, result))
    return calls


def _check_problem(i: int, problem: Problem, rule: NSRule) -> tuple[int, int, int]:
    X = problem.X
    if X.ndim != 3 or 0 in X.shape or X.shape[1] > X.shape[2]:
        raise ValueError(f"problems[{i}].X must be [B, r, s] with r <= s and not empty; got {tuple(X.shape)}")
    if X.dtype != rule.workspace_dtype:
        raise ValueError(f"problems[{i}].X must be {rule.workspace_dtype} for {rule.precision!r}; got {X.dtype}")
    batch, r, s = X.shape
    stride = row_stride(s, X.dtype)
    if X.stride(2) != 1 or X.stride(1) != stride or (batch > 1 and X.stride(0) != r * stride):
        raise ValueError(
            f"problems[{i}].X must have strides {(r * stride, stride, 1)}, rows padded to 16 bytes; got {X.stride()}"
        )
    for name, vector in (("sq_norm", problem.sq_norm), ("scale", problem.scale)):
        if vector is not None and (vector.shape != (batch,) or vector.dtype != torch.float32):
            raise ValueError(
                f"problems[{i}].{name} must be float32 of shape ({batch},); got {vector.dtype} {tuple(vector.shape)}"
            )
    return batch, r, s


def newton_schulz(
    X: Tensor,  # [..., M, N] floating point, any strides
    *,
    coefficients: Coefficients = "jordan",
    steps: int = 5,
    eps: float = 1e-7,
    algorithm: Literal["auto", "standard", "gram"] = "auto",
    dtype: torch.dtype | Literal["mixed"] | None = None,
    backend: Backend = "auto",
    out: Tensor | None = None,  # [..., M, N] floating point, any strides; may be X
) -> Tensor:
    """Orthogonalize every matrix of X by a Newton-Schulz iteration: U V^T of its SVD, roughly, for Muon.

    Args:
        X: matrices of any size, batched over the leading dimensions.
        coefficients: a schedule's name (`coefficients.names()`), one (a, b, c), or one triple per step.
        steps: number of steps.
        eps: X is divided by max(‖X‖, eps), Frobenius.
        algorithm: "standard", "gram" (works on X X^T only, cheaper on long matrices), or "auto".
        dtype: what to compute in: float32, float16, bfloat16, or "mixed" (input rounded to bf16, the rest fp16).
            None is "mixed" on the Triton backend and float32 on torch's.
        backend: "triton", "torch", or "auto" (`device.resolve_backend`).
        out: where to put the result.

    Returns:
        A tensor of X's shape and dtype (or `out`). A zero matrix gives zeros; Inf or NaN fill their own matrix only.

    Raises:
        TypeError: X or out is complex or an integer tensor.
        ValueError: X is empty or has fewer than two dimensions, `out` does not fit, a bad schedule or option.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers", 2024; Gram form: gram-newton-schulz.
    """
    _check_matrix("X", X)
    if out is None:
        out = torch.empty_like(X)
    else:
        _check_matrix("out", out)
        if out.shape != X.shape or out.device != X.device:
            raise ValueError(
                f"out must be like X, {tuple(X.shape)} on {X.device}; got {tuple(out.shape)} on {out.device}"
            )
    chosen = resolve_backend(backend, X.device)
    rule = NSRule(
        schedule=_coefficients.schedule(coefficients, steps),
        eps=eps,
        norm_factor=_coefficients.norm_factor(coefficients),
        algorithm=algorithm,
        precision=_precision(dtype, chosen),
    )
    matrices = X.detach().reshape(-1, *X.shape[-2:])
    tall = X.shape[-2] > X.shape[-1]
    problem = _pack(matrices.mT if tall else matrices, rule)
    batch, r, s = problem.X.shape
    nbytes = scratch_nbytes([(batch, r, s)], rule, backend=chosen)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=X.device)
    (result,) = orthogonalize([problem], rule, backend=chosen, scratch=scratch)
    out.detach().copy_((result.mT if tall else result).reshape(X.shape))
    return out


def _precision(dtype: torch.dtype | str | None, backend: ResolvedBackend) -> Precision:
    by_name: dict[torch.dtype | str, Precision] = {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        "mixed": "mixed",
    }
    if dtype is None:
        return "mixed" if backend == "triton" else "fp32"
    if dtype not in by_name:
        raise ValueError(f"dtype must be torch.float32, float16, bfloat16, 'mixed' or None; got {dtype!r}")
    return by_name[dtype]


def _pack(
    matrices: Tensor,  # [B, r, s] any strides
    rule: NSRule,
) -> Problem:
    """What copy-in does in the optimizer: pad the rows, cast, and take the norms in a fixed order."""
    batch, r, s = matrices.shape
    dtype = rule.workspace_dtype
    X = torch.empty(batch, r, row_stride(s, dtype), dtype=dtype, device=matrices.device)[..., :s]
    if rule.precision != "fp16":
        X.copy_(matrices)
        return Problem(X, _sq_norms(X))
    exact = matrices.float().contiguous()
    sq_norm = _sq_norms(exact)
    scale = fp16_scale(sq_norm, r * s)
    X.copy_(exact * scale.view(-1, 1, 1))
    return Problem(X, sq_norm, scale)


def _sq_norms(X: Tensor) -> Tensor:
    """[B] One reduction a matrix: over a batch, or other strides, the order of the sum could be another."""
    return torch.stack([reference.frobenius_norm(matrix) for matrix in X]).square_()


def _check_matrix(name: str, X: Tensor) -> None:
    if not X.is_floating_point():
        raise TypeError(f"{name} must be a real floating point tensor; got {X.dtype}")
    if X.ndim < 2:
        raise ValueError(f"{name} must be [..., M, N]; got shape {tuple(X.shape)}")
    if X.numel() == 0:
        raise ValueError(f"{name} is empty: shape {tuple(X.shape)}")
