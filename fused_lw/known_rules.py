"""The rules of optimizers that people train with, each read from the live object.

Names and defaults are those of the libraries as of August 2026. Where two libraries use one word for two things, the
formula counts.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_lw.kernels.newton_schulz import Precision
from fused_lw.muon import SCALES, match_rms_adamw_scale, original_scale
from fused_lw.rules import (
    Part,
    StepRule,
    names_in,
    ns_rule,
    register_rule,
    sqrt_longer_side,
    sqrt_rows_over_cols,
    times,
    title,
    unscaled,
)
from fused_lw.update import MatrixRule, Updater


@register_rule("torch.optim.Muon", "torch.optim._muon.Muon")
class TorchMuon(StepRule):
    """`torch.optim.Muon`."""

    name = "torch"
    options = frozenset(
        {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
    )

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule:
        _require(optimizer, group, *sorted(self.options))
        return MatrixRule(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
            scale=_choose(optimizer, "adjust_lr_fn", group["adjust_lr_fn"], SCALES),
            ns=ns_rule(tuple(group["ns_coefficients"]), group["ns_steps"], float(group["eps"])),
        )


@register_rule("muon.Muon", "muon.SingleDeviceMuon", "muon.MuonWithAuxAdam", "muon.SingleDeviceMuonWithAuxAdam")
class KellerJordan(StepRule):
    """github.com/KellerJordan/Muon. The classes for several devices give every rank every world-size-th matrix."""

    name = "kellerjordan"
    options = frozenset({"lr", "weight_decay", "momentum"})

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.single_device = type(optimizer).__name__.startswith("SingleDevice")
        self.aux = any("use_muon" in group for group in optimizer.param_groups)

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule | None:
        if self.aux:
            _require(optimizer, group, "use_muon")
            if not group["use_muon"]:
                return None
        _require(optimizer, group, "lr", "weight_decay", "momentum")
        for position, param in enumerate(group["params"]):
            if param.ndim == 4:
                raise ValueError(
                    f"{_called(group, position)} of shape {tuple(param.shape)}: {title(optimizer)} scales it "
                    "by the sides of the kernel, fused_lw by out / (in * kh * kw), so its update would change; build a "
                    "fused_lw.Muon or fused_lw.MuonWithAuxAdamW and choose its lr"
                )
        return MatrixRule(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            nesterov=True,
            scale=original_scale,
            ns=ns_rule("jordan", 5, 1e-7, "add"),
            higher_dims="batch",
        )

    def parts(self, optimizer: Optimizer) -> list[Part]:
        rank, world = self._rank_and_world()
        parts = []
        for part in super().parts(optimizer):
            names = part.names and part.names[rank::world]
            parts.append(Part(part.params[rank::world], part.rule, names))
        return parts

    def update(self, optimizer: Optimizer, parts: Sequence[Part], updater: Updater) -> None:
        super().update(optimizer, parts, updater)
        _, world = self._rank_and_world()
        if world == 1:
            return
        pending = [
            torch.distributed.broadcast(param, src=index % world, async_op=True)
            for part in super().parts(optimizer)
            for index, param in enumerate(part.params)
        ]
        for work in pending:
            work.wait()

    def _rank_and_world(self) -> tuple[int, int]:
        dist = torch.distributed
        if self.single_device or not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(), dist.get_world_size()


# Moonlight's Muon is an example file, which people copy: `like="moonlight"` names a copy.
@register_rule("toy_train.Muon", "examples.toy_train.Muon")
class Moonlight(StepRule):
    """github.com/MoonshotAI/Moonlight: Muon and AdamW in one group, told apart by a flag in the state."""

    name = "moonlight"
    options = frozenset({"lr", "wd", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"})
    ema = False
    state_flag = "use_muon"

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule:
        _require(optimizer, group, "lr", "wd", "momentum", "nesterov", "ns_steps")
        return MatrixRule(
            lr=float(group["lr"]),
            weight_decay=float(group["wd"]),
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
            scale=match_rms_adamw_scale,
            ns=ns_rule("jordan", group["ns_steps"], 1e-7, "add"),
            ema=False,
        )

    def parts(self, optimizer: Optimizer) -> list[Part]:
        parts = []
        for index, group in enumerate(optimizer.param_groups):
            mine = [self._uses_muon(optimizer, param) for param in group["params"]]
            params = list(itertools.compress(group["params"], mine))
            names = list(itertools.compress(names_in(group, index), mine))
            parts.append(Part(params, self.group_rule(optimizer, group), names))
        return parts

    def own_params(self, optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
        return [param for param in group["params"] if not self._uses_muon(optimizer, param)]

    @staticmethod
    def _uses_muon(optimizer: Optimizer, param: Tensor) -> bool:
        if "use_muon" not in optimizer.state.get(param, {}):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has no flag 'use_muon' in the state of "
                f"{title(optimizer)}: construct it with muon_params and adamw_params"
            )
        return bool(optimizer.state[param]["use_muon"])


_DION_SCALES = {"spectral_norm": sqrt_rows_over_cols, "rms_norm": match_rms_adamw_scale, None: unscaled}
_DION_SCHEDULES = {
    "polar_express": "polar_express_dion",
    "polar_express_triton": "polar_express_dion",
    "zeropower_via_newtonschulz5": "quintic",
    "newton_schulz_triton": "quintic",
}


@register_rule("dion.muon.Muon")
class Dion(StepRule):
    """github.com/microsoft/dion on one device; groups of AdamW and Lion keep their own code."""

    name = "dion"
    options = frozenset(
        {"lr", "mu", "beta1", "beta2", "weight_decay", "cautious_wd", "algorithm", "step", "epsilon", "nesterov"}
        | {"flatten", "adjust_lr", "num_heads", "split_sizes"}
    )
    ema = False
    state_key = "momentum"
    momentum_option = "mu"

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        if getattr(optimizer, "_distributed_mesh", None) is not None:
            raise ValueError(
                f"{title(optimizer)} was built with a distributed_mesh, over which it shares the matrices out: "
                "use fused_lw.LayerWiseMuon, or build it without a mesh"
            )
        function = getattr(optimizer, "_newton_schulz_func", None)
        called = getattr(function, "__name__", repr(function))
        self.schedule = _choose(optimizer, "newton_schulz_func", called, _DION_SCHEDULES)

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule | None:
        _require(optimizer, group, "algorithm")
        if group["algorithm"] != "muon":
            return None
        _require(optimizer, group, "lr", "mu", "weight_decay", "epsilon", "nesterov", "flatten", "adjust_lr")
        if group.get("cautious_wd") and group["weight_decay"]:
            raise ValueError(
                f"cautious_wd of {title(optimizer)} decays only where update and parameter have one sign, which has "
                "no counterpart here: switch it off, or leave the step as it is"
            )
        return MatrixRule(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=group["mu"],
            nesterov=bool(group["nesterov"]),
            scale=_choose(optimizer, "adjust_lr", group["adjust_lr"], _DION_SCALES),
            ns=ns_rule(self.schedule, 5, float(group["epsilon"]), "add"),
            ema=False,
            state_key=self.state_key,
            higher_dims="flatten" if group["flatten"] else "batch",
            split_rows=_dion_blocks(group),
        )

    def update(self, optimizer: Optimizer, parts: Sequence[Part], updater: Updater) -> None:
        super().update(optimizer, parts, updater)
        for group in optimizer.param_groups:
            if group["algorithm"] == "muon":
                group["step"] += 1  # as its own step would; its own code counts the other groups


def _dion_blocks(group: dict[str, Any]) -> tuple[int, ...] | None:
    """Sizes of the blocks of rows that are matrices of their own; every parameter of the group has the same rows."""
    if group.get("split_sizes") is not None:
        return tuple(group["split_sizes"])
    heads = group.get("num_heads") or 1
    if heads == 1:
        return None
    rows = {param.shape[0] for param in group["params"]}
    if len(rows) > 1 or min(rows) % heads:
        raise ValueError(
            f"num_heads={heads} needs parameters of one number of rows that it divides, got {sorted(rows)}"
        )
    return (rows.pop() // heads,) * heads


_EMERGING_SCALES = {
    "shape_scaling": original_scale,
    "spectral": sqrt_longer_side,
    "unit_rms_norm": sqrt_rows_over_cols,
}
_EMERGING_SCHEDULES = {
    "simple": "jordan",
    "quintic": "quintic",
    "polar_express": "polar_express_eo",
    "cans": "cans",
    "aol": "aol",
}
# "medium" is bf16; the two others ask for more than half precision gives.
_EMERGING_PRECISIONS: dict[str, Precision | None] = {"medium": None, "high": "fp32", "highest": "fp32"}


@register_rule("emerging_optimizers.orthogonalized_optimizers.muon.Muon")
class EmergingOptimizers(StepRule):
    """github.com/NVIDIA-NeMo/Emerging-Optimizers: most options are attributes, or live in a closure."""

    name = "emerging_optimizers"
    options = frozenset(
        {"lr", "momentum", "weight_decay", "momentum_beta", "use_nesterov", "nesterov", "weight_decay_method"}
        | {"use_decoupled_weight_decay", "use_decoupled_wd", "use_independent_wd"}
    )

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        hook = getattr(optimizer, "weight_update_hook", None)
        if hook is not None and type(hook).__name__ != "NoOpWeightUpdateHook":
            raise ValueError(
                f"{title(optimizer)} has the weight_update_hook {type(hook).__name__}, which changes single updates "
                "and has no counterpart here: build it without the hook, or leave the step as it is"
            )
        for name in ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace", "orthogonalize"):
            if name in vars(optimizer):
                raise ValueError(f"{name} was replaced on this {title(optimizer)}: no rule can be read from it")
        schedule = _choose(optimizer, "coefficient_type", _outside(optimizer, "coefficient_type"), _EMERGING_SCHEDULES)
        self.ns = ns_rule(schedule, int(_outside(optimizer, "num_ns_steps")), _emerging_eps())
        self.scale = _choose(optimizer, "scale_mode", _outside(optimizer, "scale_mode"), _EMERGING_SCALES)
        self.extra_scale_factor = float(_outside(optimizer, "extra_scale_factor"))
        self.precision = _choose(
            optimizer, "fp32_matmul_prec", getattr(optimizer, "fp32_matmul_prec", None), _EMERGING_PRECISIONS
        )
        self.nesterov = getattr(optimizer, "nesterov", getattr(optimizer, "use_nesterov", None))
        self.weight_decay_method = getattr(optimizer, "weight_decay_method", None)

    def group_rule(self, optimizer: Optimizer, group: dict[str, Any]) -> MatrixRule:
        _require(optimizer, group, "lr", "weight_decay")
        for position, param in enumerate(group["params"]):
            if param.dtype != torch.float32 or param.ndim != 2:
                raise ValueError(
                    f"{_called(group, position)} of shape {tuple(param.shape)} is {param.dtype}: "
                    f"{title(optimizer)} takes float32 matrices; keep float32 master weights, or use fused_lw.Muon"
                )
        if group["weight_decay"] and self._decay(optimizer, group) != "decoupled":
            raise ValueError(
                f"weight decay of {title(optimizer)} is {self._decay(optimizer, group)!r} and here it is decoupled and "
                "times lr: use weight_decay_method='decoupled', or leave the step as it is"
            )
        nesterov = self.nesterov if self.nesterov is not None else group.get("use_nesterov", group.get("nesterov"))
        momentum = group.get("momentum", group.get("momentum_beta"))
        if nesterov is None or momentum is None:
            raise ValueError(
                f"this version of {title(optimizer)} does not say its momentum and whether it is Nesterov's"
            )
        return MatrixRule(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            nesterov=bool(nesterov),
            scale=times(self.scale, self.extra_scale_factor),
            ns=self.ns,
            precision=self.precision,
        )

    def _decay(self, optimizer: Optimizer, group: dict[str, Any]) -> str:
        method = self.weight_decay_method or group.get("weight_decay_method")
        if method is not None:
            return str(method)
        decoupled = group.get("use_decoupled_weight_decay", group.get("use_decoupled_wd"))
        if decoupled is None:
            raise ValueError(f"this version of {title(optimizer)} does not say how it decays weights")
        return "independent" if group.get("use_independent_wd") else "decoupled" if decoupled else "l2"


def _emerging_eps() -> float:
    """The library fixes eps in the signature of its iteration; a live optimizer means that it has been imported."""
    module = sys.modules.get("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    function = getattr(module, "newton_schulz", None)
    default = inspect.signature(function).parameters["eps"].default if function else 1e-15
    return float(default)


def _outside(optimizer: Optimizer, name: str) -> Any:
    """An option that is not in the groups: an attribute, or a variable of the closure that orthogonalizes."""
    if hasattr(optimizer, name):
        return getattr(optimizer, name)
    function = getattr(optimizer, "scaled_orthogonalize_fn", None)
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name not in variables:
        raise ValueError(
            f"this version of {title(optimizer)} does not say its {name}: describe it with fused_lw.register_rule"
        )
    return variables[name]


def _require(optimizer: Optimizer, group: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if key not in group:
            raise ValueError(
                f"a parameter group of {title(optimizer)} has no {key!r}, so this is another version or another "
                "optimizer: name the one that it is a copy of with like=, or describe it with fused_lw.register_rule"
            )


def _called(group: dict[str, Any], position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else "a parameter"


def _choose(optimizer: Optimizer, option: str, value: Any, known: dict[Any, Any]) -> Any:
    if value not in known:
        raise ValueError(
            f"{option}={value!r} of {title(optimizer)} has no counterpart here, only "
            f"{', '.join(map(repr, known))}: change it, or describe it with fused_lw.register_rule"
        )
    return known[value]
