"""Muon as torch.optim.Muon means it, stepped over all matrices at once."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fused_lw.kernels.coefficients import Coefficients, norm_factor, schedule
from fused_lw.kernels.device import BACKENDS, Backend
from fused_lw.kernels.newton_schulz import ALGORITHMS, NSRule, Precision
from fused_lw.matrices import HigherDims
from fused_lw.step import check_param, step_groups
from fused_lw.update import MatrixRule, Updater

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
    "algorithm": ALGORITHMS,
    "precision": (None, "fp32", "bf16", "fp16", "mixed"),
    "higher_dims": ("auto", "batch", "flatten"),
    "rounding": ("nearest", "stochastic"),
    "momentum_dtype": (None, torch.float32, torch.bfloat16, torch.float16),
}


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
        precision: of the iteration: "fp32", "bf16", "fp16", "mixed", or None for the device's default. On a CPU with
            bf16 units "bf16" is faster than the default, and as accurate as torch.optim.Muon.
        higher_dims: what a parameter of more than two dimensions is: "batch", stacked matrices (..., M, N) such
            as experts; "flatten", one matrix (out, in * kh * kw); "auto": three dimensions are a batch, more
            are a convolution.
        split_rows: sizes of the blocks of rows that are matrices of their own, as in fused QKV.
        momentum_dtype: dtype of new momentum buffers; None takes the gradient's, as torch does.
        master_weights: keep fp32 weights of bf16 and fp16 parameters (state key "master_param") and update those;
            the parameter is their rounded copy, so do not change it behind the optimizer's back.
        rounding: how bf16 parameters without master weights are rounded: "nearest", as torch does, or
            "stochastic", which keeps updates below half a unit in the last place on average.
        seed: of the stochastic rounding: a run with the same seed rounds the same way.
        capturable: never wait for the device and copy nothing to it once the first step is done, so that a step
            can be captured in a CUDA graph. A tensor lr or weight_decay must then be on the parameters' device;
            changed in place, it changes the replayed update.
        max_scratch_bytes: bound of the scratch memory per device; None takes 1 GiB on a CPU and a sixteenth of
            a GPU's memory.

    All but `backend`, `capturable` and `max_scratch_bytes` can be set per parameter group.

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
        master_weights: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        capturable: bool = False,
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
            "master_weights": master_weights,
            "rounding": rounding,
            "seed": seed,
            "capturable": capturable,
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
        for key in ("backend", "capturable", "max_scratch_bytes"):
            if param_group.get(key, self.defaults[key]) != self.defaults[key]:
                raise ValueError(f"{key} is one for the whole optimizer: it cannot be set per parameter group")
        group = {**self.defaults, **param_group}
        _check_options(group)
        rule = _rule(group)
        params = group["params"]
        if not isinstance(params, Tensor):
            params = list(params)
            param_group = {**param_group, "params": params}  # an iterator would be spent by looking at it
        for index, entry in enumerate([params] if isinstance(params, Tensor) else params):
            name, param = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(param, Tensor):
                raise TypeError(f"Muon takes tensors, not {type(param).__name__}")
            check_param(name or f"parameter {index} of group {len(self.param_groups)}", param, rule)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A checkpoint of torch.optim.Muon knows none of the extras.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but momenta and master weights keep their dtype instead of taking the parameter's."""
        super().load_state_dict(keep_live_options(self, state_dict, self.defaults))
        keep_saved_dtypes(self, state_dict, "momentum_buffer")
        keep_saved_dtypes(self, state_dict, "master_param")
        vars(self).pop("_updater", None)  # it holds the momenta that were replaced

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # A compiled training step breaks its graph here, instead of tracing through the packing.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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

        rules = begin_step(self.param_groups)
        if not hasattr(self, "_updater"):  # lost by deepcopy and pickle, which keep state and groups only
            self._updater = Updater(self.defaults["backend"], self.defaults["max_scratch_bytes"])
        step_groups(self.param_groups, rules, self.state, self._updater)
        end_step(self.param_groups)
        return loss


def begin_step(param_groups: Sequence[dict[str, Any]]) -> list[MatrixRule]:
    """The rule of each group of a `Muon`, as its options are now. Raises a ValueError for an option without meaning."""
    for group in param_groups:
        _check_options(group)
        if group["capturable"]:
            _check_devices(group)
        if group["rounding"] == "stochastic":
            _start_count(group)
    return [_rule(group) for group in param_groups]


def end_step(param_groups: Sequence[dict[str, Any]]) -> None:
    """Count a step that was done."""
    for group in param_groups:
        if group["rounding"] == "stochastic":
            group["steps_done"] += 1


def keep_live_options(optimizer: Optimizer, state_dict: dict[str, Any], options: Container[str]) -> dict[str, Any]:
    """The state dict with those `options` that its groups lack (torch.optim.Muon knows no extras) as they are now."""
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        return state_dict  # refused by torch
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    groups = [{**{key: live[key] for key in live if key in options}, **saved} for live, saved in pairs]
    return {**state_dict, "param_groups": groups}


def keep_saved_dtypes(optimizer: Optimizer, state_dict: dict[str, Any], key: str) -> None:
    """Undo, after `load_state_dict`, torch's cast of the momenta under `key` to their parameters' dtypes."""
    saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in zip(saved_ids, params, strict=True):
        saved = state_dict["state"].get(index, {}).get(key)
        if saved is not None and saved.dtype != param.dtype:
            optimizer.state[param][key] = saved.to(device=param.device, copy=True)


def _check_options(options: dict[str, Any]) -> None:
    """Raise for an option that has no meaning; the message names it."""
    for key in ("nesterov", "master_weights", "capturable"):
        if not isinstance(options[key], bool):
            raise TypeError(f"{key} must be True or False, not {options[key]!r}")
    if not isinstance(options["seed"], int):
        raise TypeError(f"seed must be an integer, not {options['seed']!r}")
    split = options["split_rows"]
    if split is not None and not (isinstance(split, Sequence) and all(isinstance(size, int) for size in split)):
        raise TypeError(f"split_rows must be a sequence of integers or None, not {split!r}")
    for key in ("lr", "weight_decay", "momentum", "eps"):
        if not isinstance(options[key], int | float | Tensor):
            raise TypeError(f"{key} must be a number, not {options[key]!r}")
        if isinstance(options[key], Tensor) and options[key].numel() != 1:
            raise ValueError(f"a tensor {key} must have one element, not shape {tuple(options[key].shape)}")
        if options["capturable"] and isinstance(options[key], Tensor):
            continue  # looking at it would wait for its device
        if not options[key] >= 0:
            raise ValueError(f"{key} must be at least 0, not {options[key]}")
    for key, choices in _CHOICES.items():
        if options[key] not in choices:
            raise ValueError(f"{key} must be one of {', '.join(map(repr, choices))}, not {options[key]!r}")
    bound = options["max_scratch_bytes"]
    if bound is not None and bound < 1:
        raise ValueError(f"max_scratch_bytes must be at least 1, not {bound}")
    schedule(_hashable(options["ns_coefficients"]), options["ns_steps"])


def _check_devices(group: dict[str, Any]) -> None:
    """A captured step cannot wait for a learning rate to come from another device."""
    for key in ("lr", "weight_decay"):
        for param in group["params"]:
            if isinstance(group[key], Tensor) and group[key].device != param.device:
                raise ValueError(
                    f"with capturable=True a tensor {key} must be on the parameters' device {param.device}, "
                    f"not {group[key].device}"
                )


def _start_count(group: dict[str, Any]) -> None:
    """Make the count of steps that stochastic rounding draws its noise from; on the device in a captured step."""
    count = group.setdefault("steps_done", 0)
    if group["capturable"] and not isinstance(count, Tensor) and group["params"]:
        group["steps_done"] = torch.tensor(count, dtype=torch.float64, device=group["params"][0].device)


def _rule(group: dict[str, Any]) -> MatrixRule:
    split = group["split_rows"]

    def number(value: float | Tensor) -> float | Tensor:
        # Reading a tensor waits for its device, so a captured step leaves it there.
        return value if group["capturable"] else float(value)

    return MatrixRule(
        lr=number(group["lr"]),
        weight_decay=number(group["weight_decay"]),
        momentum=float(group["momentum"]),
        nesterov=bool(group["nesterov"]),
        scale=SCALES[group["adjust_lr_fn"]],
        ns=_ns_rule(_hashable(group["ns_coefficients"]), group["ns_steps"], float(group["eps"]), group["algorithm"]),
        precision=group["precision"],
        momentum_dtype=group["momentum_dtype"],
        higher_dims=group["higher_dims"],
        split_rows=None if split is None else tuple(split),
        master_weights=group["master_weights"],
        stochastic=group["rounding"] == "stochastic",
        seed=group["seed"],
        steps_done=group.get("steps_done", 0),
    )


@functools.lru_cache(maxsize=64)
def _ns_rule(coefficients: Coefficients, steps: int, eps: float, algorithm: Algorithm) -> NSRule:
    return NSRule(schedule(coefficients, steps), eps=eps, norm_factor=norm_factor(coefficients), algorithm=algorithm)


def _hashable(coefficients: Any) -> Coefficients:
    """Tuples all the way down: a checkpoint that went through JSON has lists."""
    if isinstance(coefficients, str):
        return coefficients
    if not isinstance(coefficients, Sequence):
        raise TypeError(f"ns_coefficients must be a name, a triple or triples, not {coefficients!r}")
    hashable: Coefficients = tuple(tuple(c) if isinstance(c, Sequence) else c for c in coefficients)
    return hashable
