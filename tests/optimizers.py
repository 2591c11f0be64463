"""Optimizers of other libraries, each written here from its published rule, under its real class and module names.

They are what `replace_step` has to recognize, read and equal. Their iteration runs in `Iteration.dtype`: float32, so
that a comparison sees the rule and not bf16's rounding. `install` puts them where imports and pickles look for them.
"""

from __future__ import annotations

import math
import sys
import types

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fused_lw.kernels.coefficients import schedule

MODULES: dict[str, types.ModuleType] = {}


class Iteration:
    dtype = torch.float32


def install(monkeypatch) -> None:
    for name, module in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in MODULES:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)


def library(module: str):
    """Decorate a class or function that belongs to this module."""

    def place(thing):
        thing.__module__ = module
        setattr(MODULES.setdefault(module, types.ModuleType(module)), thing.__name__, thing)
        return thing

    return place


def orthogonal(G: Tensor, coefficients: str, steps: int, eps: float, *, add: bool, factor: float = 1.0) -> Tensor:
    """Newton-Schulz on [..., M, N], without any saving of work."""
    X = G.to(Iteration.dtype)
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    norm = X.norm(dim=(-2, -1), keepdim=True) * factor
    X = X / (norm + eps if add else norm.clamp(min=eps))
    for a, b, c in schedule(coefficients, steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return (X.mT if tall else X).to(torch.promote_types(torch.float32, Iteration.dtype))


def with_closure(step):
    @torch.no_grad()
    def wrapped(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(self)
        return loss

    return wrapped


# KellerJordan/Muon


def keller_jordan_update(p: Tensor, state: dict, group: dict) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p))
    m.lerp_(p.grad, 1 - group["momentum"])
    u = p.grad.lerp(m, group["momentum"])
    u = orthogonal(u, "jordan", 5, 1e-7, add=True) * max(1, p.shape[-2] / p.shape[-1]) ** 0.5
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(u, alpha=-group["lr"])


def keller_jordan_adam(p: Tensor, state: dict, group: dict) -> None:
    if not state:
        state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), step=0)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(p.grad, 1 - beta1)
    state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
    first = state["exp_avg"] / (1 - beta1 ** state["step"])
    second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(first / (second.sqrt() + group["eps"]), alpha=-group["lr"])


def keller_jordan_shared(group: dict, state: dict) -> None:
    """Every rank updates every world-size-th parameter and gets the others from their owners."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for index, p in enumerate(group["params"]):
        if index % world == rank:
            keller_jordan_update(p, state[p], group)
        if world > 1:
            dist.broadcast(p, src=index % world)


@library("muon")
class SingleDeviceMuon(Optimizer):
    def __init__(self, params, lr=0.02, weight_decay=0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @with_closure
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                keller_jordan_update(p, self.state[p], group)


@library("muon")
class Muon(SingleDeviceMuon):
    @with_closure
    def step(self):
        for group in self.param_groups:
            keller_jordan_shared(group, self.state)


@library("muon")
class SingleDeviceMuonWithAuxAdam(Optimizer):
    def __init__(self, param_groups):
        for group in param_groups:
            muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
            adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
            for key, value in (muon if group["use_muon"] else adam).items():
                group.setdefault(key, value)
        super().__init__(param_groups, {})

    @with_closure
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                (keller_jordan_update if group["use_muon"] else keller_jordan_adam)(p, self.state[p], group)


@library("muon")
class MuonWithAuxAdam(SingleDeviceMuonWithAuxAdam):
    @with_closure
    def step(self):
        for group in self.param_groups:
            if group["use_muon"]:
                group["params"][-1]  # the original pads its list with the last parameter, so it needs one
                keller_jordan_shared(group, self.state)
            else:
                for p in group["params"]:
                    keller_jordan_adam(p, self.state[p], group)


# Moonlight


@library("toy_train")
class MoonlightMuon(Optimizer):
    def __init__(
        self,
        lr=1e-3,
        wd=0.1,
        muon_params=None,
        momentum=0.95,
        nesterov=True,
        ns_steps=5,
        adamw_params=None,
        adamw_betas=(0.9, 0.95),
        adamw_eps=1e-8,
    ):
        defaults = {"lr": lr, "wd": wd, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        muon, adamw = list(muon_params), list(adamw_params or [])
        super().__init__(muon + adamw, {**defaults, "adamw_betas": adamw_betas, "adamw_eps": adamw_eps})
        for p in muon + adamw:
            self.state[p]["use_muon"] = any(p is q for q in muon)

    @with_closure
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["wd"])
                    (self._muon if self.state[p]["use_muon"] else self._adamw)(p, self.state[p], group)

    def _muon(self, p, state, group):
        m = state.setdefault("momentum_buffer", torch.zeros_like(p))
        m.mul_(group["momentum"]).add_(p.grad)
        u = p.grad.add(m, alpha=group["momentum"]) if group["nesterov"] else m
        u = orthogonal(u, "jordan", group["ns_steps"], 1e-7, add=True)
        p.add_(u, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _adamw(self, p, state, group):
        if "step" not in state:
            state.update(step=0, moment1=torch.zeros_like(p), moment2=torch.zeros_like(p))
        state["step"] += 1
        beta1, beta2 = group["adamw_betas"]
        state["moment1"].lerp_(p.grad, 1 - beta1)
        state["moment2"].lerp_(p.grad.square(), 1 - beta2)
        scale = (1 - beta1 ** state["step"]) / (1 - beta2 ** state["step"]) ** 0.5
        p.add_(state["moment1"] / (group["adamw_eps"] + state["moment2"].sqrt()), alpha=-group["lr"] / scale)


MoonlightMuon.__name__ = MoonlightMuon.__qualname__ = "Muon"
MODULES["toy_train"].Muon = MoonlightMuon


# Dion


@library("dion.polar_express")
def polar_express(G: Tensor, epsilon: float = 1e-7) -> Tensor:
    return orthogonal(G, "polar_express_dion", 5, float(epsilon), add=True, factor=1.02)


@library("dion.newton_schulz_triton")
def zeropower_via_newtonschulz5(G: Tensor, epsilon: float = 1e-7) -> Tensor:
    return orthogonal(G, "quintic", 5, float(epsilon), add=True)


@library("dion.muon")
class DionMuon(Optimizer):
    def __init__(
        self,
        params,
        distributed_mesh=None,
        lr=0.01,
        mu=0.95,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        cautious_wd=False,
        epsilon=1e-8,
        nesterov=False,
        adjust_lr="spectral_norm",
        flatten=False,
        use_polar_express=True,
        newton_schulz_func=None,
    ):
        options = {"lr": lr, "mu": mu, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
        options |= {"cautious_wd": cautious_wd, "algorithm": "muon", "step": 0, "epsilon": epsilon}
        super().__init__(params, {**options, "nesterov": nesterov, "flatten": flatten, "adjust_lr": adjust_lr})
        self._distributed_mesh = distributed_mesh
        self._algo_name = "muon"
        default = polar_express if use_polar_express else zeropower_via_newtonschulz5
        self._newton_schulz_func = newton_schulz_func or default

    @with_closure
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            update = {self._algo_name: self._muon, "adamw": self._adamw, "lion": self._lion}[group["algorithm"]]
            for p in group["params"]:
                if p.grad is not None:
                    update(p, self.state[p], group)

    def _muon(self, p, state, group):
        m = state.setdefault("momentum", torch.zeros_like(p))
        m.mul_(group["mu"]).add_(p.grad)
        u = m * group["mu"] + p.grad if group["nesterov"] else m
        blocks = group.get("split_sizes") or [len(p) // (group.get("num_heads") or 1)] * (group.get("num_heads") or 1)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        if p.ndim > 2:
            blocks = [len(p)]
        for part, block in zip(p.split(blocks), u.split(blocks), strict=True):
            matrix = block.flatten(1) if group["flatten"] else block
            rows, cols = matrix.shape[-2:]
            scales = {"spectral_norm": math.sqrt(rows / cols), "rms_norm": 0.2 * math.sqrt(max(rows, cols)), None: 1.0}
            factor = self._newton_schulz_func(matrix, epsilon=group["epsilon"]).reshape(part.shape)
            part.sub_(factor * (group["lr"] * scales[group["adjust_lr"]]))

    def _adamw(self, p, state, group):
        m = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - group["beta1"])
        v = state.setdefault("variance", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - group["beta2"])
        denom = v.sqrt() / (1 - group["beta2"] ** group["step"]) ** 0.5 + group["epsilon"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(m / denom * (group["lr"] / (1 - group["beta1"] ** group["step"])))

    def _lion(self, p, state, group):
        m = state.setdefault("momentum", torch.zeros_like(p))
        u = m.lerp(p.grad, 1 - group["beta1"]).sign_()
        m.lerp_(p.grad, 1 - group["beta2"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(u * group["lr"])


DionMuon.__name__ = DionMuon.__qualname__ = "Muon"
MODULES["dion.muon"].Muon = DionMuon


# Emerging-Optimizers and Megatron-Core

EMERGING = {"simple": "jordan", "quintic": "quintic", "polar_express": "polar_express_eo", "cans": "cans"}
SCALES = {
    "shape_scaling": lambda rows, cols: max(1, rows / cols) ** 0.5,
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
}


@library("emerging_optimizers.orthogonalized_optimizers.muon_utils")
def newton_schulz(x: Tensor, steps: int, coefficient_type: str = "quintic", eps: float = 1e-15) -> Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"Input tensor x must be in float32, got {x.dtype}")
    return orthogonal(x, EMERGING[coefficient_type], steps, eps, add=False)


@library("emerging_optimizers.weight_update_hooks.base")
class NoOpWeightUpdateHook:
    pass


@library("emerging_optimizers.orthogonalized_optimizers.orthogonalized_optimizer")
class OrthogonalizedOptimizer(Optimizer):
    def __init__(
        self,
        params,
        lr,
        momentum,
        *,
        nesterov,
        weight_decay,
        weight_decay_method,
        fp32_matmul_prec,
        scaled_orthogonalize_fn,
        weight_update_hook=None,
    ):
        self.nesterov = nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        self.weight_update_hook = weight_update_hook or NoOpWeightUpdateHook()
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                if self.weight_decay_method == "decoupled":
                    p.add_(p, alpha=-group["weight_decay"] * group["lr"])
                m.lerp_(p.grad, 1 - group["momentum"])
                u = p.grad.lerp(m, group["momentum"]) if self.nesterov else m
                p.add_(self.orthogonalize(p, u), alpha=-group["lr"])

    def orthogonalize(self, p, grad):
        return self.scaled_orthogonalize_fn(grad)


@library("emerging_optimizers.orthogonalized_optimizers.muon")
class EmergingMuon(OrthogonalizedOptimizer):
    def __init__(
        self,
        params,
        lr=3e-4,
        momentum=0.95,
        weight_decay=0.01,
        *,
        nesterov=False,
        weight_decay_method="decoupled",
        fp32_matmul_prec="medium",
        coefficient_type="quintic",
        num_ns_steps=5,
        scale_mode="spectral",
        extra_scale_factor=1.0,
        use_syrk=False,
        weight_update_hook=None,
    ):
        self.coefficient_type = coefficient_type
        self.num_ns_steps = num_ns_steps
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.use_syrk = use_syrk

        def scaled_orthogonalize_fn(grad):
            scale = SCALES[scale_mode](*grad.shape) * extra_scale_factor
            return newton_schulz(grad, num_ns_steps, coefficient_type) * scale

        super().__init__(
            params,
            lr,
            momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            weight_decay_method=weight_decay_method,
            fp32_matmul_prec=fp32_matmul_prec,
            scaled_orthogonalize_fn=scaled_orthogonalize_fn,
            weight_update_hook=weight_update_hook,
        )


EmergingMuon.__name__ = EmergingMuon.__qualname__ = "Muon"
MODULES["emerging_optimizers.orthogonalized_optimizers.muon"].Muon = EmergingMuon


@library("megatron.core.optimizer.emerging_optimizers")
class TensorParallelMuon(OrthogonalizedOptimizer):
    """Its options live in the closure only."""

    def __init__(
        self,
        params,
        lr=3e-4,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.01,
        use_decoupled_weight_decay=True,
        split_qkv=False,
        is_qkv_fn=None,
        qkv_split_shapes=None,
        fp32_matmul_prec="medium",
        coefficient_type="quintic",
        num_ns_steps=5,
        scale_mode="spectral",
        extra_scale_factor=1.0,
        pg_collection=None,
        tp_mode="duplicated",
    ):
        def scaled_orthogonalize_fn(grad, tp_group, partition_dim=None):
            factor = newton_schulz(grad, num_ns_steps, coefficient_type)
            return factor * SCALES[scale_mode](*grad.shape) * extra_scale_factor

        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = qkv_split_shapes
        super().__init__(
            params,
            lr,
            momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            weight_decay_method="decoupled" if use_decoupled_weight_decay else "l2",
            fp32_matmul_prec=fp32_matmul_prec,
            scaled_orthogonalize_fn=scaled_orthogonalize_fn,
        )

    def orthogonalize(self, p, grad):
        local_rows, rank = len(grad), 0
        group = self.pg_collection and self.pg_collection.gtp_remat
        if group is not None and getattr(p, "is_gtp_weight_remat", False):
            shards = [torch.empty_like(grad) for _ in range(group.size())]
            dist.all_gather(shards, grad.contiguous(), group)
            grad, rank = torch.cat(shards), group.rank()
        padding = getattr(p, "pad_length", 0)
        grad = grad[: len(grad) - padding]
        if self.split_qkv and self.is_qkv_fn(p):
            sizes = getattr(p, "qkv_split_shapes", None) or self.qkv_split_shapes
            grouped = grad.view(-1, sum(sizes), grad.shape[-1])
            parts = [part.reshape(-1, grad.shape[-1]) for part in grouped.split(list(sizes), dim=1)]
            parts = [self.scaled_orthogonalize_fn(part, None).view(len(grouped), -1, grad.shape[-1]) for part in parts]
            grad = torch.cat(parts, dim=1).reshape(grad.shape)
        else:
            grad = self.scaled_orthogonalize_fn(grad, None)
        grad = torch.nn.functional.pad(grad, (0, 0, 0, padding))
        return grad[rank * local_rows : (rank + 1) * local_rows]
