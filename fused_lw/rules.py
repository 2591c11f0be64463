"""How optimizers of other libraries step: what a rule is, and the registry that finds one by the optimizer's class."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from fused_lw.kernels.coefficients import Coefficients, norm_factor, schedule
from fused_lw.kernels.newton_schulz import NSRule
from fused_lw.step import check_param, step_groups
from fused_lw.update import MatrixRule, Updater

# What torch, schedulers and trainers put into a group, and what says nothing about the update.
NEUTRAL_OPTIONS = frozenset({"differentiable", "foreach"})


class Part(NamedTuple):
    """Parameters that one rule updates."""

    params: list[Tensor]
    rule: MatrixRule
    names: list[str] | None = None  # of each of params, for messages; without them its place among the parts is given

    def group(self) -> dict[str, Any]:
        return {"params": self.params} if self.names is None else {"params": self.params, "param_names": self.names}


def names_in(group: dict[str, Any], index: int) -> list[str]:
    """What messages call the parameters of the optimizer's group `index`: their names, or else their places."""
    names: list[str] | None = group.get("param_names")
    return names or [f"parameter {position} of group {index}" for position in range(len(group["params"]))]


class StepRule:
    """How one class of optimizers updates its matrices; subclass it and `register_rule` the subclass.

    An instance is made once, when a step is replaced, from the live optimizer. `__init__` refuses what has no
    counterpart here and keeps, in attributes that can be pickled, what the optimizer keeps outside its
    `param_groups`: copies of an optimizer lose that. `group_rule` is asked at every step, so that schedulers count.

    Attributes:
        name: what `like=` calls it.
        options: the keys that the optimizer's `defaults` may have; others are refused, since they could mean
            anything. None checks nothing.
        ema, state_key, momentum_option: the momentum's convention, its key in the state, and the group's key for its
            coefficient, for `convert_state`.
        state_flag: the key in a parameter's state that says whether Muon steps it, where that is kept there.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str] | None] = None
    ema: ClassVar[bool] = True
    state_key: ClassVar[str] = "momentum_buffer"
    momentum_option: ClassVar[str] = "momentum"
    state_flag: ClassVar[str | None] = None

    def __init__(self, optimizer: Optimizer) -> None:
        if self.options is not None:
            unknown = sorted(optimizer.defaults.keys() - self.options - NEUTRAL_OPTIONS)
            if unknown:
                raise ValueError(
                    f"{title(optimizer)} has the option {unknown[0]!r}, which the rule {self.name!r} does not know: "
                    "another version, or another optimizer; describe it with fused_lw.register_rule"
                )

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule | None:
        """The rule of a parameter group as it is now, or None for one that the optimizer's own code steps."""
        raise NotImplementedError

    def parts(self, optimizer: Optimizer) -> list[Part]:
        """What to update now. The default asks `group_rule` for every group."""
        parts = []
        for index, group in enumerate(optimizer.param_groups):
            rule = self.group_rule(optimizer, group)
            if rule is not None:
                parts.append(Part(group["params"], rule, names_in(group, index)))
        return parts

    def own_params(self, optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
        """Parameters of a group that the optimizer's own code steps."""
        return group["params"] if self.group_rule(optimizer, group) is None else []

    def update(self, optimizer: Optimizer, parts: Sequence[Part], updater: Updater) -> None:
        """Update `parts`, before the optimizer's own code steps the rest."""
        step_groups([part.group() for part in parts], [part.rule for part in parts], optimizer.state, updater)

    def check(self, optimizer: Optimizer) -> None:
        """Raise a ValueError, naming it, for a group or a parameter that cannot be stepped."""
        for index, part in enumerate(self.parts(optimizer)):
            for position, param in enumerate(part.params):
                name = part.names[position] if part.names else f"parameter {position} of part {index}"
                if hasattr(param, "device_mesh"):
                    raise ValueError(
                        f"{name} of shape {tuple(param.shape)} is a DTensor, of which this rank has a shard: "
                        "use fused_lw.LayerWiseMuon instead of replacing a step"
                    )
                check_param(name, param, part.rule)


_BY_CLASS: dict[str, type[StepRule]] = {}
_BY_NAME: dict[str, type[StepRule]] = {}


def register_rule(*classes: str) -> Callable[[type[StepRule]], type[StepRule]]:
    """Decorate a `StepRule` that reads optimizers of these classes, given as "module.Class".

    No import of the library is needed. A class registered again takes the new rule.

    Raises:
        TypeError: for anything but a subclass of `StepRule` with a `name`.
    """

    def register(rule: type[StepRule]) -> type[StepRule]:
        if not (isinstance(rule, type) and issubclass(rule, StepRule) and isinstance(getattr(rule, "name", None), str)):
            raise TypeError(f"register_rule takes a subclass of StepRule with a name, not {rule!r}")
        _BY_NAME[rule.name] = rule
        for name in classes:
            _BY_CLASS[name] = rule
        return rule

    return register


def rule_names() -> tuple[str, ...]:
    """What `like=` and `convert_state` know, in the order of registration."""
    _load_known()
    return tuple(_BY_NAME)


def rule_named(name: str) -> type[StepRule]:
    if name not in rule_names():
        raise ValueError(f"unknown rule {name!r}, expected one of {', '.join(rule_names())}")
    return _BY_NAME[name]


def rule_of(optimizer: Optimizer) -> type[StepRule]:
    """The rule of the optimizer's class.

    Raises:
        ValueError: for a class that nobody registered; the message says what to do.
    """
    _load_known()
    rule = _BY_CLASS.get(title(optimizer))
    if rule is None and title(optimizer).startswith("fused_lw."):
        raise ValueError(f"{title(optimizer)} steps by fused_lw already")
    if rule is None:
        inner = getattr(optimizer, "optimizer", None)
        hint = (
            "it wraps another optimizer: replace the step of that one, its attribute 'optimizer'"
            if isinstance(inner, Optimizer)
            else f"if it is a copy of one of these, say which with like=: {', '.join(rule_names())}; "
            "otherwise describe its rule with fused_lw.register_rule"
        )
        raise ValueError(f"the step of {title(optimizer)} is not known: {hint}")
    return rule


def title(optimizer: Optimizer) -> str:
    """The optimizer's class as "module.Class"."""
    cls = type(optimizer)
    return f"{cls.__module__}.{cls.__qualname__}"


def _load_known() -> None:
    from fused_lw import known_rules, megatron_step  # noqa: F401  they register themselves and import this module


@functools.lru_cache(maxsize=64)
def ns_rule(coefficients: Coefficients, steps: int, eps: float, eps_rule: Literal["clamp", "add"] = "clamp") -> NSRule:
    """The Newton-Schulz iteration of a schedule (`fused_lw.kernels.coefficients.names()`), as `NSRule` takes it."""
    return NSRule(schedule(coefficients, steps), eps=eps, eps_rule=eps_rule, norm_factor=norm_factor(coefficients))


# Scales of the update, from rows and columns. `fused_lw.muon` has torch's two.


def unscaled(rows: int, cols: int) -> float:
    return 1.0


def sqrt_rows_over_cols(rows: int, cols: int) -> float:
    """sqrt(rows / cols): "spectral_norm" of Dion, "unit_rms_norm" of Emerging-Optimizers."""
    return math.sqrt(rows / cols)


def sqrt_longer_side(rows: int, cols: int) -> float:
    """sqrt(max(rows, cols)): "spectral" of Emerging-Optimizers."""
    return math.sqrt(max(rows, cols))


# One function per factor: the engine describes a step anew when a scale changes, and compares them by identity.
@functools.lru_cache(maxsize=64)
def times(scale: Callable[[int, int], float], factor: float) -> Callable[[int, int], float]:
    return lambda rows, cols: factor * scale(rows, cols)
