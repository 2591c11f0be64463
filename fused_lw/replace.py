"""Run fused_lw's step inside an optimizer that already exists: its groups, its state, its checkpoints.

The optimizer's class is exchanged for a subclass of it that overrides `step`; nothing else of the object changes, so
`isinstance`, schedulers, hooks and checkpoints go on as before. A copy of the object has that class too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from fused_lw.kernels.device import BACKENDS, Backend
from fused_lw.kernels.newton_schulz import ALGORITHMS, Precision
from fused_lw.muon import Algorithm, keep_saved_dtypes
from fused_lw.rules import Part, StepRule, rule_named, rule_of, title
from fused_lw.update import Updater

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

PRECISIONS = (None, "fp32", "bf16", "fp16", "mixed")


def replace_step(
    optimizer: OptimizerT,
    *,
    like: str | None = None,
    backend: Backend = "auto",
    algorithm: Algorithm = "auto",
    precision: Precision | None = None,
    max_scratch_bytes: int | None = None,
) -> OptimizerT:
    """Make `optimizer.step()` update its matrices by fused_lw, by the rule that the optimizer already follows.

    The rule is read from the object: options outside its groups now, those in its groups at every step. State tensors
    and parameter groups stay the optimizer's own, as does the stepping of groups that are not Muon's. Updates agree
    with the original's within rounding; a parameter without a gradient is skipped, and gradients are only read.

    Args:
        optimizer: a `torch.optim.Muon`, one of KellerJordan's, Moonlight's, Dion's (without a mesh), Emerging-
            Optimizers' `Muon`, Megatron's `TensorParallelMuon` (without tensor parallelism), or any class that
            `register_rule` was told about. It may have been stepped before.
        like: for a copy of such a class under another name: "torch", "kellerjordan", "moonlight", "dion",
            "emerging_optimizers" or "megatron".
        backend, algorithm, precision, max_scratch_bytes: as `fused_lw.Muon` takes them.

    Returns:
        The same object. `restore_step` undoes the replacement.

    Raises:
        ValueError: a class, an option or a parameter that has no counterpart; the message names it and says what to
            do, and the optimizer is as it was.
        TypeError: something that is not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"replace_step takes a torch optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Replaced):
        raise ValueError(f"the step of this {title(optimizer)} is replaced already: call restore_step first")
    for name, value, choices in (
        ("backend", backend, BACKENDS),
        ("algorithm", algorithm, ALGORITHMS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the method step of this {title(optimizer)} was replaced by {own_step!r}, which would be lost: "
            "replace the step before that"
        )
    rule = (rule_of(optimizer) if like is None else rule_named(like))(optimizer)
    rule.check(optimizer)
    # A scheduler that was made before keeps the original step in an attribute of the instance.
    vars(optimizer).pop("step", None)
    settings = _Settings(rule, backend, algorithm, precision, max_scratch_bytes, own_step)
    vars(optimizer)["_fused_lw"] = settings
    optimizer.__class__ = _replaced_class(type(optimizer))  # type: ignore[assignment]
    return optimizer


def restore_step(optimizer: OptimizerT) -> OptimizerT:
    """Give an optimizer its own step back. The same object is returned.

    Raises:
        ValueError: an optimizer whose step was not replaced.
    """
    if not isinstance(optimizer, _Replaced):
        raise ValueError(f"the step of this {type(optimizer).__name__} was not replaced")
    settings: _Settings = vars(optimizer).pop("_fused_lw")
    optimizer.__class__ = optimizer._original  # type: ignore[assignment]
    if settings.scheduled_step is not None:
        vars(optimizer)["step"] = settings.scheduled_step
    return optimizer


def rule_in(optimizer: Optimizer) -> StepRule | None:
    """The rule by which a replaced step goes, or None for an optimizer whose step was not replaced."""
    return optimizer._fused_lw.rule if isinstance(optimizer, _Replaced) else None


def own_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """A class's `step` without the hooks that torch puts around it, for a caller that runs inside such hooks."""
    step: Any = cls.step
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


@dataclass
class _Settings:
    rule: StepRule
    backend: Backend
    algorithm: Algorithm
    precision: Precision | None
    max_scratch_bytes: int | None
    scheduled_step: Callable[..., Any] | None = None
    updater: Updater = field(init=False)

    def __post_init__(self) -> None:
        self.updater = Updater(self.backend, self.max_scratch_bytes)

    def for_copy(self) -> _Settings:
        """Without what belongs to this object: scratch memory, and its scheduler's wrapper."""
        return replace(self, scheduled_step=None)

    # An updater knows tensors by their identity, so pickles leave it out and make a new one.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "updater"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def parts(self, optimizer: Optimizer) -> list[Part]:
        parts = []
        for part in self.rule.parts(optimizer):
            rule = part.rule
            if self.precision is not None:
                rule = replace(rule, precision=self.precision)
            if self.algorithm != "auto":
                rule = replace(rule, ns=replace(rule.ns, algorithm=self.algorithm))
            parts.append(part._replace(rule=rule))
        return parts


class _Replaced(Optimizer):
    """What the subclass of an optimizer's class overrides."""

    _original: type[Optimizer]
    _fused_lw: _Settings

    @Optimizer.profile_hook_step  # hooks and a profiler range, which torch gives every step
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # schedulers ask whether a step was made
        settings = self._fused_lw
        settings.rule.update(self, settings.parts(self), settings.updater)
        with self._only_own_params():
            if self.param_groups:
                own_step(self._original)(self)
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it does itself what a scheduler's wrapper does

    @contextmanager
    def _only_own_params(self) -> Iterator[None]:
        """For the time of the original step, show it the parameters that fused_lw has not updated."""
        groups = self.param_groups
        kept = [(group, group["params"]) for group in groups]
        own = [self._fused_lw.rule.own_params(self, group) for group in groups]
        try:
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
            self.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            self.param_groups = groups
            for group, params in kept:
                group["params"] = params

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._fused_lw.rule.check(self)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_saved_dtypes(self, state_dict, self._fused_lw.rule.state_key)

    # Copies. `Optimizer.__getstate__` keeps the groups and the state only; what a rule needs from elsewhere it has in
    # its own attributes, but the code of other groups may need the optimizer's.

    def __getstate__(self) -> dict[str, Any]:
        attributes = {}
        if any(self._fused_lw.rule.own_params(self, group) for group in self.param_groups):
            attributes = {name: value for name, value in vars(self).items() if name not in _torch_attributes()}
        return {**attributes, **super().__getstate__(), "_fused_lw": self._fused_lw.for_copy()}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty_copy, (self._original,), self.__getstate__()


def _empty_copy(original: type[Optimizer]) -> Optimizer:
    cls = _replaced_class(original)
    return cls.__new__(cls)


_classes: dict[Any, type[Optimizer]] = {}


def _replaced_class(original: type[Optimizer]) -> type[Optimizer]:
    if original not in _classes:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        _classes[original] = type(original.__name__, (_Replaced, original), {**names, "_original": original})
    return _classes[original]


@functools.cache
def _torch_attributes() -> frozenset[str]:
    """Attributes that torch gives every optimizer, or that schedulers add."""
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    return frozenset(vars(plain)) | {"step", "_opt_called", "_fused_lw"}
