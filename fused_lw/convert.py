"""Carry Muon's state from one optimizer to another: the momentum's convention and its key in the state differ."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from fused_lw.aux_adamw import MuonWithAuxAdamW
from fused_lw.kernels.newton_schulz import ALGORITHMS
from fused_lw.muon import Muon
from fused_lw.replace import rule_in
from fused_lw.rules import StepRule, rule_named, rule_names, rule_of


class _Format(NamedTuple):
    ema: bool  # m <- mu m + (1 - mu) g, otherwise m <- mu m + g
    key: str  # of the momentum in a parameter's state
    option: str  # of its coefficient in a group
    flag: str | None = None  # key in a parameter's state that says whether it is Muon's


_OURS = _Format(True, "momentum_buffer", "momentum")
# Dion's groups say by this option what steps them; in ours it chooses between the forms of the iteration.
_MUON_ALGORITHMS = ("muon", *ALGORITHMS)


def convert_state(
    source: Optimizer | Mapping[str, Any], to: str | Optimizer, *, came_from: str | None = None
) -> dict[str, Any]:
    """A state dict whose momenta mean in another optimizer what they mean in `source`.

    A momentum that is a sum of gradients is 1 / (1 - mu) times one that is their average, and libraries keep it under
    different keys: loaded without conversion it would outweigh new gradients, or be lost. The conversion is exact
    where mu has been constant. Anything else in the state is passed on as it is.

    Args:
        source: an optimizer, or its `state_dict()`.
        to: the optimizer that will load the result: the result then has its options, and parameters are matched by
            name where both have names, otherwise by position. Or what kind it is, "fused_lw" or one of
            `fused_lw.rules.rule_names()`: the result then has the options of `source`.
        came_from: what kind of optimizer a state dict is of.

    Returns:
        A new state dict; `source` is left as it is.

    Raises:
        ValueError: a kind that is not known or not given, parameters that do not match, or mu outside [0, 1).

    Example:
        >>> ours.load_state_dict(convert_state(torch.load("dion.pt"), to=ours, came_from="dion"))
    """
    given: Mapping[str, Any]
    if isinstance(source, Optimizer):
        given, from_format = source.state_dict(), _format_of(source)
    elif came_from is None:
        raise ValueError(f"say what kind of optimizer the state dict is of: came_from='fused_lw' or {_kinds()}")
    else:
        given, from_format = source, _named(came_from)
    to_format = _format_of(to) if isinstance(to, Optimizer) else _named(to)

    state = {key: dict(entries) for key, entries in given["state"].items()}
    for group in given["param_groups"]:
        steps_muon = group.get("use_muon", True) and group.get("algorithm", "muon") in _MUON_ALGORITHMS
        for param in group["params"]:
            entries = state.get(param, {})
            is_muon = entries.pop(from_format.flag, steps_muon) if from_format.flag else steps_muon
            if is_muon and from_format.key in entries:
                momentum = entries.pop(from_format.key)
                entries[to_format.key] = momentum * _factor(from_format, to_format, group)
            if to_format.flag:
                state[param] = {to_format.flag: bool(is_muon), **entries}
            elif param in state and not entries:  # it held the flag only; torch asks "is there a state?"
                del state[param]
    if not isinstance(to, Optimizer):
        return {**given, "state": state, "param_groups": [dict(group) for group in given["param_groups"]]}
    return _for_groups_of(to, given["param_groups"], state, to_format)


def _for_groups_of(
    target: Optimizer, groups: list[dict[str, Any]], state: dict[Hashable, dict[str, Any]], target_format: _Format
) -> dict[str, Any]:
    """Under the numbers that the target gives its parameters, with its options and flags."""
    empty = target.state_dict()
    theirs, ours = list(_named_params(groups)), list(_named_params(empty["param_groups"]))
    if len(theirs) != len(ours):
        raise ValueError(f"the state is of {len(theirs)} parameters and {type(target).__name__} has {len(ours)}")
    if all(name is not None for name, _ in theirs + ours):
        numbers = dict(theirs)
        missing = [name for name, _ in ours if name not in numbers]
        if missing:
            raise ValueError(f"the state has no parameter called {missing[0]!r}")
        theirs = [(name, numbers[name]) for name, _ in ours]
    params = itertools.chain.from_iterable(group["params"] for group in target.param_groups)
    converted = {}
    for param, (name, number), (_, old) in zip(params, ours, theirs, strict=True):
        entries = state.get(old)
        if entries is None:
            continue
        if target_format.flag and target_format.flag in (own := empty["state"].get(number, {})):
            entries = {**entries, target_format.flag: own[target_format.flag]}
        momentum = entries.get(target_format.key)
        if isinstance(momentum, Tensor) and momentum.shape != param.shape:
            raise ValueError(
                f"{name or f'parameter {number}'} has shape {tuple(param.shape)} and its momentum "
                f"{tuple(momentum.shape)}: the two optimizers hold their parameters in different orders; build both "
                "from named parameters"
            )
        converted[number] = entries
    return {**empty, "state": converted}


def _named_params(groups: list[dict[str, Any]]) -> Iterator[tuple[str | None, Any]]:
    for group in groups:
        yield from zip(group.get("param_names") or itertools.repeat(None), group["params"], strict=False)


def _factor(source: _Format, target: _Format, group: Mapping[str, Any]) -> float:
    if source.ema == target.ema:
        return 1.0
    mu = next((group[key] for key in (source.option, target.option, "momentum_beta") if key in group), None)
    if mu is None or not 0 <= mu < 1:
        raise ValueError(f"a momentum of mu={mu} has no counterpart: expected {source.option!r} in [0, 1) in its group")
    average: float = 1 - mu
    return 1 / average if source.ema else average


def _format_of(optimizer: Optimizer) -> _Format:
    if isinstance(optimizer, Muon | MuonWithAuxAdamW):
        return _OURS
    rule = rule_in(optimizer)
    return _format(type(rule) if rule is not None else rule_of(optimizer))


def _named(kind: str) -> _Format:
    if kind == "fused_lw":
        return _OURS
    if kind not in rule_names():
        raise ValueError(f"unknown kind of optimizer {kind!r}, expected 'fused_lw' or {_kinds()}")
    return _format(rule_named(kind))


def _format(rule: type[StepRule]) -> _Format:
    return _Format(rule.ema, rule.state_key, rule.momentum_option, rule.state_flag)


def _kinds() -> str:
    return ", ".join(map(repr, rule_names()))
