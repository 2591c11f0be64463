"""A step over parameter groups, whoever owns them: find the gradients, check them, make momenta, update.

Everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lw.kernels.device import resolve_backend
from fused_lw.matrices import MatrixView, view_as_matrices
from fused_lw.update import MatrixRule, Updater, Work, check_scratch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def step_groups(
    param_groups: Sequence[dict[str, Any]],
    rules: Sequence[MatrixRule],
    state: MutableMapping[Tensor, dict[str, Any]],
    updater: Updater,
) -> None:
    """Update every parameter of the groups that has a gradient. Arguments and errors are those of `collect_work`."""
    updater(collect_work(param_groups, rules, state, updater), rules)


def collect_work(
    param_groups: Sequence[dict[str, Any]],
    rules: Sequence[MatrixRule],
    state: MutableMapping[Tensor, dict[str, Any]],
    updater: Updater,
) -> list[Work]:
    """What `updater` has to do: every parameter of the groups that has a gradient, checked, with its momentum.

    Args:
        param_groups: a torch optimizer's; only "params" and, for messages, "param_names" are read.
        rules: one per group.
        state: the optimizer's; a parameter's momentum is kept under its rule's `state_key`.
        updater: kept by the caller from step to step.

    Raises:
        ValueError: a gradient that cannot be used, or a matrix larger than the scratch bound; the message names
            the parameter, and nothing has been changed.
    """
    found: list[tuple[str, Tensor, MatrixView, int]] = []
    for index, (group, rule) in enumerate(zip(param_groups, rules, strict=True)):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            name = names[position] if names else f"parameter {position} of group {index}"
            resolved = resolve_backend(updater.backend, param.device)
            _check_grad(name, param, param.grad, resolved)
            before = updater.grad_dtypes.get(id(param), param.grad.dtype)
            if param.grad.dtype != before:
                raise ValueError(
                    f"{name} of shape {tuple(param.shape)} has a {param.grad.dtype} gradient, which was {before} before"
                )
            view = _view(param, rule)
            check_scratch(
                f"{name} of shape {tuple(param.shape)}",
                view,
                rule.ns_on(param.device),
                backend=resolved,
                bound=updater.max_scratch_bytes,
            )
            found.append((name, param, view, index))
    _check_overlap(found, updater)
    updater.grad_dtypes.update((id(param), param.grad.dtype) for _, param, _, _ in found if param.grad is not None)
    return [
        Work(
            name,
            param,
            _gradient(param, view),
            _momentum(param, view, state[param], rules[index]),
            view,
            rules[index].ns_on(param.device),
            index,
            _master(param, state[param]) if rules[index].master_weights else None,
        )
        for name, param, view, index in found
    ]


def check_param(name: str, param: Tensor, rule: MatrixRule) -> None:
    """Raise a ValueError that names the parameter if it cannot be updated by `rule`."""
    if param.is_complex() or not param.is_floating_point():
        raise ValueError(f"{name} of shape {tuple(param.shape)} is {param.dtype}: Muon takes real floating point")
    if param.is_inference():
        raise ValueError(f"{name} of shape {tuple(param.shape)} was made in inference mode: it is read-only")
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(f"{name} of shape {tuple(param.shape)} is expanded: its elements share memory")
    if rule.stochastic and param.dtype == torch.float16:
        raise ValueError(f"{name} is float16: stochastic rounding is for bfloat16 parameters")
    try:
        _view(param, rule)
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


def _check_overlap(found: Sequence[tuple[str, Tensor, MatrixView, int]], updater: Updater) -> None:
    """Raise a ValueError that names two parameters that share memory. Looked at only when a parameter moved.

    Parameters with gaps between their elements may interleave without sharing any; they are taken at their word
    unless they begin at the same address.
    """
    spans = [(param.data_ptr(), name, param) for name, param, _, _ in found if param.numel()]
    addresses = [address for address, _, _ in spans]
    if addresses == updater.checked_addresses:
        return
    end, owner = 0, ""
    start = -1
    for address, name, param in sorted(spans, key=lambda span: span[:2]):
        dense = param.numel() == 1 + sum((n - 1) * d for n, d in zip(param.shape, param.stride(), strict=True))
        if address == start or (dense and address < end):
            raise ValueError(f"{owner} and {name} overlap: they share memory, so neither can be updated alone")
        start = address
        if dense:
            end, owner = address + param.numel() * param.element_size(), name
        else:
            owner = name
    updater.checked_addresses = addresses


def _view(param: Tensor, rule: MatrixRule) -> MatrixView:
    return view_as_matrices(param, rule.higher_dims, rule.split_rows)


def _gradient(param: Tensor, view: MatrixView) -> Tensor:
    grad = param.grad
    assert grad is not None
    return grad if view.collapses(grad) else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _momentum(param: Tensor, view: MatrixView, state: dict[str, Any], rule: MatrixRule) -> Tensor:
    momentum: Tensor | None = state.get(rule.state_key)
    if momentum is None:
        assert param.grad is not None
        dtype = rule.momentum_dtype or param.grad.dtype
        momentum = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    elif not view.collapses(momentum):  # loaded from a checkpoint with another memory format
        momentum = torch.empty_like(param, dtype=momentum.dtype).copy_(momentum)
    state[rule.state_key] = momentum
    return momentum


def _master(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    if param.dtype in (torch.float32, torch.float64):
        return None
    if "master_param" not in state:
        state["master_param"] = param.detach().float()
    master: Tensor = state["master_param"]
    return master
