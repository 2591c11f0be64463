"""A step over parameter groups, whoever owns them: find the gradients, check them, make momenta, update.

Everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

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
            before = updater.grad_dtypes.get(param, param.grad.dtype)
            if param.grad.dtype != before:
                raise ValueError(
                    f"{name} of shape {tuple(param.shape)} has a {param.grad.dtype} gradient, which was {before} before"
                )
            view = _view(name, param, rule)
            _check_state(name, param, state.get(param, {}), rule)
            check_scratch(
                f"{name} of shape {tuple(param.shape)}",
                view,
                rule.ns_on(param.device),
                backend=resolved,
                bound=updater.max_scratch_bytes,
            )
            found.append((name, param, view, index))
    _check_overlap(found, updater)
    for _, param, _, _ in found:
        assert param.grad is not None
        updater.grad_dtypes[param] = param.grad.dtype
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
    if _overlaps_itself(param):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} with strides {param.stride()} overlaps itself: elements share memory"
        )
    if rule.stochastic and param.dtype == torch.float16:
        raise ValueError(f"{name} is float16: stochastic rounding is for bfloat16 parameters")
    _view(name, param, rule)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory. From the inside out, a stride must reach past all that lies within."""
    reach = 0
    for stride, size in sorted((d, n) for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _check_grad(name: str, param: Tensor, grad: Tensor, backend: str) -> None:
    where = f"{name} of shape {tuple(param.shape)}"
    if hasattr(param, "device_mesh"):
        raise ValueError(f"{where} is a DTensor, of which this rank has a part: use fused_lw.LayerWiseMuon")
    if grad.layout != torch.strided:
        raise ValueError(f"{where} has a sparse gradient ({grad.layout}): Muon takes dense ones")
    if grad.dtype not in _DTYPES:
        raise ValueError(f"{where} has a {grad.dtype} gradient: Muon takes real floating point")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(f"{where} on {param.device} has a gradient {tuple(grad.shape)} on {grad.device}")
    if backend == "triton" and torch.float64 in (grad.dtype, param.dtype):
        raise ValueError(f"{where} is float64, which the Triton backend does not take: use backend='torch'")


def _check_state(name: str, param: Tensor, state: dict[str, Any], rule: MatrixRule) -> None:
    for key in (rule.state_key, "master_param"):
        held = state.get(key)
        if held is None or (held.shape == param.shape and held.device == param.device):
            continue
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} on {param.device} has a {key} "
            f"of shape {tuple(held.shape)} on {held.device}"
        )


def _check_overlap(found: Sequence[tuple[str, Tensor, MatrixView, int]], updater: Updater) -> None:
    """Raise a ValueError that names two parameters that share memory. Looked at only when a parameter moved."""
    spans = [_Span.of(name, param) for name, param, _, _ in found if param.numel()]
    if spans == updater.checked_spans:
        return
    open_spans: list[_Span] = []  # those that reach past the start of the next one
    for span in sorted(spans):
        open_spans = [earlier for earlier in open_spans if earlier.end > span.start]
        for earlier in open_spans:
            if not earlier.interleaves(span):
                raise ValueError(
                    f"{earlier.name} and {span.name} overlap: they share memory, so neither can be updated alone"
                )
        open_spans.append(span)
    updater.checked_spans = spans


class _Span(NamedTuple):
    """The bytes from a parameter's first element to its last, and how it steps through them."""

    start: int
    end: int
    name: str
    device: str
    pitch: int  # bytes from row to row
    width: int  # bytes of a row, from its first element to its last

    @classmethod
    def of(cls, name: str, param: Tensor) -> _Span:
        itemsize = param.element_size()
        strides = sorted(((d, n) for n, d in zip(param.shape, param.stride(), strict=True) if n > 1), reverse=True)
        extent = sum((n - 1) * d for d, n in strides)
        pitch, rows = strides[0] if strides else (1, 1)
        start = param.data_ptr()
        end = start + (extent + 1) * itemsize
        width = (extent - (rows - 1) * pitch + 1) * itemsize
        return cls(start, end, name, str(param.device), pitch * itemsize, width)

    def interleaves(self, other: _Span) -> bool:
        """Whether the rows of one lie in the gaps of the other, as two slices of columns of one buffer do."""
        if self.device != other.device:
            return True
        offset = (other.start - self.start) % self.pitch
        return self.pitch == other.pitch and self.width <= offset and offset + other.width <= self.pitch


def _view(name: str, param: Tensor, rule: MatrixRule) -> MatrixView:
    try:
        return view_as_matrices(param, rule.higher_dims, rule.split_rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


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
