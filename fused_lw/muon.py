"""Muon as torch.optim.Muon means it, stepped over all matrices at once."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fused_lw.kernels.coefficients import Coefficients, norm_factor, schedule
from fused_lw.kernels.device import BACKENDS, Backend, resolve_backend
from fused_lw.kernels.newton_schulz import NSRule
from fused_lw.matrices import HigherDims, MatrixView, view_as_matrices
from fused_lw.update import Scratch, UpdateRule, Work, check_scratch, update

Precision = Literal["fp32", "bf16", "fp16", "mixed"]
Algorithm = Literal["auto", "standard", "gram"]


def original_scale(rows: int, cols: int) -> float:
    """sqrt(max(1, rows / cols)): Keller Jordan's, torch's "original"."""
    return math.sqrt(max(1.0, rows / cols))


def match_rms_adamw_scale(rows: int, cols: int) -> float:
    """0.2 sqrt(max(rows, cols)): Moonshot's, an update with the root mean square of AdamW's."""
    return 0.2 * math.sqrt(max(rows, cols))


SCALES: dict[str | None, Callable[[int, int], float]] = {
    None: original_scale,
    "original": original_scale,
    "match_rms_adamw": match_rms_adamw_scale,
}
_CHOICES: dict[str, Sequence[Any]] = {
    "adjust_lr_fn": tuple(SCALES),
    "backend": BACKENDS,
    "algorithm": ("auto", "standard", "gram"),
    "precision": (None, "fp32", "bf16", "fp16", "mixed"),
    "higher_dims": ("auto", "batch", "flatten"),
    "momentum_dtype": (None, torch.float32, torch.bfloat16, torch.float16),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Muon(Optimizer):
    r"""Muon, a drop-in for `torch.optim.Muon` whose step runs packed and batched.

    The step gathers the matrices of all parameter groups, packs those of one (oriented) shape into one batch
    while it updates their momenta (copy-in), orthogonalizes each batch by a Newton-Schulz iteration, and applies
    scale, learning rate and weight decay while it unpacks (copy-out). State (`momentum_buffer`), update rule and
    checkpoints are those of `torch.optim.Muon`; the arithmetic of the iteration is float32 on a CPU and, on a
    GPU, bf16 input with fp16 products ("mixed"), both closer to the exact polynomial than torch's bf16.

    Args:
        params: parameters of two dimensions or more, groups of them, or (name, parameter) pairs. Embeddings,
            heads, norms and biases belong to another optimizer.
        lr: learning rate, a float or a one-element tensor; read at every step.
        weight_decay: decoupled, multiplied by the unscaled learning rate.
        momentum: coefficient mu of the moving average m <- mu m + (1 - mu) g.
        nesterov: orthogonalize g + mu (m - g) instead of m.
        ns_coefficients: (a, b, c) of the iteration; or `ns_steps` triples; or the name of a published schedule
            (`fused_lw.kernels.coefficients.names()`).
        eps: smallest norm that a matrix is divided by.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: scale of the update, from rows and columns of its matrix: None and "original" are
            sqrt(max(1, rows / cols)), "match_rms_adamw" is 0.2 sqrt(max(rows, cols)).
        backend: "auto" runs the Triton kernels on GPUs that they support and torch elsewhere.
        algorithm: "standard", "gram" (iterates on the Gram matrix), or "auto": the cheaper one per shape.
        precision: of the iteration: "fp32", "bf16", "fp16", "mixed", or None for the device's default.
        higher_dims: what a parameter of more than two dimensions is: "batch", stacked matrices (..., M, N) such
            as experts; "flatten", one matrix (out, in * kh * kw); "auto": three dimensions are a batch, more
            are a convolution.
        split_rows: sizes of the blocks of rows that are matrices of their own, as in fused QKV.
        momentum_dtype: dtype of new momentum buffers; None takes the gradient's, as torch does.
        max_scratch_bytes: bound of the scratch memory per device; None takes 1 GiB on a CPU and a sixteenth of
            a GPU's memory.

    All but `backend` and `max_scratch_bytes` can be set per parameter group.

    Raises:
        ValueError, TypeError: at construction and in `add_param_group` for a parameter or an option that cannot
            be used, in `step` for a gradient that cannot; each names what it refuses and leaves everything as
            it was.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); "match_rms_adamw" is from
    Liu et al. 2025 (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        backend: Backend = "auto",
        algorithm: Algorithm = "auto",
        precision: Precision | None = None,
        higher_dims: HigherDims = "auto",
        split_rows: Sequence[int] | None = None,
        momentum_dtype: torch.dtype | None = None,
        max_scratch_bytes: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "backend": backend,
            "algorithm": algorithm,
            "precision": precision,
            "higher_dims": higher_dims,
            "split_rows": split_rows,
            "momentum_dtype": momentum_dtype,
            "max_scratch_bytes": max_scratch_bytes,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its options and that every parameter can be read as matrices."""
        for key in param_group.keys() - self.defaults.keys() - {"params", "initial_lr", "param_names"}:
            meant = difflib.get_close_matches(str(key), self.defaults, n=1, cutoff=0.85)
            if meant:
                raise ValueError(f"unknown option {key!r} of a parameter group: is {meant[0]!r} meant?")
        group = {**self.defaults, **param_group}
        _check_options(group)
        params = group["params"]
        if not isinstance(params, Tensor):
            params = list(params)
            param_group = {**param_group, "params": params}  # an iterator would be spent by looking at it
        for index, entry in enumerate([params] if isinstance(params, Tensor) else params):
            name, param = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(param, Tensor):
                raise TypeError(f"Muon takes tensors, not {type(param).__name__}")
            _check_param(name or f"parameter {index} of group {len(self.param_groups)}", param, group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A checkpoint of torch.optim.Muon knows none of the extras.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but a momentum keeps the dtype that it was saved in instead of taking the parameter's."""
        super().load_state_dict(state_dict)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(index, {}).get("momentum_buffer")
            if saved is not None and saved.dtype != param.dtype:
                self.state[param]["momentum_buffer"] = saved.to(device=param.device, copy=True)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Gradients are only read.

        Args:
            closure: recomputes the loss and the gradients; called once, before the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        backend: Backend = self.defaults["backend"]
        bound: int | None = self.defaults["max_scratch_bytes"]
        found = self._find_gradients(backend)
        check_scratch([item[:4] for item in found], backend=backend, bound=bound)
        work = [
            Work(name, param, self._gradient(param, view), self._momentum(param, view, group), view, ns, index)
            for name, param, view, ns, index, group in found
        ]
        if not hasattr(self, "_scratch"):  # lost by deepcopy and pickle, which keep state and groups only
            self._scratch = Scratch()
        rules = [_update_rule(group) for group in self.param_groups]
        update(work, rules, backend=backend, scratch=self._scratch, max_scratch_bytes=bound)
        return loss

    def _find_gradients(self, backend: Backend) -> list[tuple[str, Tensor, MatrixView, NSRule, int, dict[str, Any]]]:
        """The parameters that have a gradient, checked; nothing is changed."""
        found = []
        for index, group in enumerate(self.param_groups):
            _check_options(group)
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = names[position] if names else f"parameter {position} of group {index}"
                resolved = resolve_backend(backend, param.device)
                _check_grad(name, param, param.grad, resolved)
                view = _matrix_view(param, group)
                found.append((name, param, view, _ns_rule(group, param.device), index, group))
        return found

    def _momentum(self, param: Tensor, view: MatrixView, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        momentum: Tensor | None = state.get("momentum_buffer")
        if momentum is None:
            assert param.grad is not None
            dtype = group["momentum_dtype"] or param.grad.dtype
            momentum = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif not view.collapses(momentum):  # loaded from a checkpoint with another memory format
            momentum = torch.empty_like(param, dtype=momentum.dtype).copy_(momentum)
        state["momentum_buffer"] = momentum
        return momentum

    def _gradient(self, param: Tensor, view: MatrixView) -> Tensor:
        grad = param.grad
        assert grad is not None
        return grad if view.collapses(grad) else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _check_options(options: dict[str, Any]) -> None:
    """Raise for an option that has no meaning; the message names it."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor lr must have one element, not shape {tuple(lr.shape)}")
    for key in ("lr", "weight_decay", "momentum", "eps"):
        if not options[key] >= 0:
            raise ValueError(f"{key} must be at least 0, not {options[key]}")
    for key, choices in _CHOICES.items():
        if options[key] not in choices:
            raise ValueError(f"{key} must be one of {', '.join(map(repr, choices))}, not {options[key]!r}")
    bound = options["max_scratch_bytes"]
    if bound is not None and bound < 1:
        raise ValueError(f"max_scratch_bytes must be at least 1, not {bound}")
    schedule(_hashable(options["ns_coefficients"]), options["ns_steps"])


def _check_param(name: str, param: Tensor, group: dict[str, Any]) -> None:
    if param.is_complex() or not param.is_floating_point():
        raise ValueError(f"{name} of shape {tuple(param.shape)} is {param.dtype}: Muon takes real floating point")
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(f"{name} of shape {tuple(param.shape)} is expanded: its elements share memory")
    try:
        _matrix_view(param, group)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_grad(name: str, param: Tensor, grad: Tensor, backend: str) -> None:
    where = f"{name} of shape {tuple(param.shape)}"
    if grad.layout != torch.strided:
        raise ValueError(f"{where} has a sparse gradient ({grad.layout}): Muon takes dense ones")
    if grad.dtype not in _DTYPES:
        raise ValueError(f"{where} has a {grad.dtype} gradient: Muon takes real floating point")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(f"{where} on {param.device} has a gradient {tuple(grad.shape)} on {grad.device}")
    if backend == "triton" and torch.float64 in (grad.dtype, param.dtype):
        raise ValueError(f"{where} is float64, which the Triton backend does not take: use backend='torch'")


def _matrix_view(param: Tensor, group: dict[str, Any]) -> MatrixView:
    split = group["split_rows"]
    return view_as_matrices(param, group["higher_dims"], None if split is None else tuple(split))


def _hashable(coefficients: Any) -> Coefficients:
    """Tuples all the way down: a checkpoint that went through JSON has lists."""
    if isinstance(coefficients, str):
        return coefficients
    hashable: Coefficients = tuple(tuple(c) if isinstance(c, Sequence) else c for c in coefficients)
    return hashable


def default_precision(device: torch.device) -> Precision:
    """Half precision is as fast as a GPU computes; CPUs without half-precision units are hundreds of times slower."""
    return "mixed" if device.type == "cuda" else "fp32"


def _ns_rule(group: dict[str, Any], device: torch.device) -> NSRule:
    return _cached_ns_rule(
        _hashable(group["ns_coefficients"]),
        group["ns_steps"],
        float(group["eps"]),
        group["algorithm"],
        group["precision"] or default_precision(device),
    )


@functools.lru_cache(maxsize=64)
def _cached_ns_rule(
    coefficients: Coefficients, steps: int, eps: float, algorithm: Algorithm, precision: Precision
) -> NSRule:
    return NSRule(
        schedule(coefficients, steps),
        eps=eps,
        norm_factor=norm_factor(coefficients),
        algorithm=algorithm,
        precision=precision,
    )


def _update_rule(group: dict[str, Any]) -> UpdateRule:
    return UpdateRule(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        ema=True,
        nesterov=bool(group["nesterov"]),
        scale=SCALES[group["adjust_lr_fn"]],
    )
