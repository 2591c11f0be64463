"""Megatron-Core: its layer-wise optimizer with fused_lw's layout, and its `TensorParallelMuon` with fused_lw's step.

    import fused_lw.megatron
    fused_lw.megatron.install()  # before Megatron builds the model and its optimizer

Megatron-Core is imported by `install` only.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fused_lw.layout import Layout, Policy, plan
from fused_lw.replace import replace_step, restore_step
from fused_lw.routing import param_spec

_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
_PARAM_LAYOUT = "megatron.core.optimizer.param_layout"
_MUON = ("megatron.core.optimizer.emerging_optimizers", "megatron.core.optimizer.muon")
_METHOD = "_compute_per_buffer_param_layout"
_ARGUMENTS = ["params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"]

# What uninstall calls, last first.
_undo: list[Callable[[], None]] = []


def install(policy: Policy = "balanced", *, layout: bool = True, step: bool = True, **step_options: Any) -> None:
    """Make Megatron-Core plan layer-wise buffers by `fused_lw.layout.plan` and step Muon by fused_lw.

    Call it before the model is wrapped and the optimizer built; optimizers that exist already get the new step at
    their next step.

    Args:
        policy: of the layout.
        layout: replace `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`.
        step: replace `TensorParallelMuon.step`. An optimizer with an option that has no counterpart raises at its
            first step, naming the option (`fused_lw.replace_step`).
        step_options: as `fused_lw.replace_step` takes them.

    Raises:
        ImportError: Megatron-Core is not there.
        RuntimeError: this version of it lacks what would be replaced (the message says what, and which argument
            leaves it out), or `install` was called before. Nothing is replaced then.
    """
    if _undo:
        raise RuntimeError("fused_lw.megatron is installed already: call uninstall first")
    undo = []
    layer_wise = _class(_LAYER_WISE, "LayerWiseDistributedOptimizer") if layout else None
    muon = _muon_class() if step else None
    if layer_wise is not None:
        layout_class = _layout_class(layer_wise)
        undo.append(_set(layer_wise, _METHOD, staticmethod(_planner(layout_class, policy))))
    if muon is not None:
        undo.append(_set_step(muon, step_options))
    _undo.extend(undo)


def uninstall() -> None:
    """Give Megatron-Core its own code back, optimizers that were stepped included."""
    while _undo:
        _undo.pop()()


def plan_params(
    params: Sequence[Tensor],
    *,
    dp_size: int,
    bucket_size: int | None,
    policy: Policy = "balanced",
    high_nccl_busbw: bool = False,
) -> Layout:
    """Plan parameters of one of Megatron's buffers, in forward order, by their tags for GTP and shared embeddings."""
    specs = [
        param_spec(f"parameter {index}", param, shared=bool(getattr(param, "shared_embedding", False)))
        for index, param in enumerate(params)
    ]
    return plan(specs, dp_size=dp_size, bucket_size=bucket_size, policy=policy, high_nccl_busbw=high_nccl_busbw)


def _planner(layout_class: type, policy: Policy) -> Callable[..., Any]:
    fields = {field.name for field in dataclasses.fields(layout_class)}

    def compute_per_buffer_param_layout(
        params: Sequence[Tensor],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> Any:
        """Megatron's signature and result; the layout is fused_lw's."""
        layout = plan_params(
            params,
            dp_size=data_parallel_world_size,
            bucket_size=bucket_size,
            policy=policy,
            high_nccl_busbw=bool(getattr(ddp_config, "pad_buckets_for_high_nccl_busbw", False)),
        )
        in_buffer = sorted(zip(layout.slots, params, strict=True), key=lambda pair: pair[0].start)
        values = {
            "param_index_map": {param: (slot.start, slot.end, slot.bucket) for slot, param in in_buffer},
            "bucket_indices": [(bucket.start, bucket.end) for bucket in layout.buckets],
            "per_bucket_numel_unpadded": [bucket.numel for bucket in layout.buckets],
            "param_indices": [] if param_indices is None else param_indices,
            "num_optimizer_shards": data_parallel_world_size,
        }
        return layout_class(**{name: value for name, value in values.items() if name in fields})

    return compute_per_buffer_param_layout


def _layout_class(layer_wise: type) -> type:
    """`PerBufferParamLayout`, after a look at whether this version asks for a layout, and with our arguments."""
    leave_out = "install(layout=False) replaces the step only"
    method = getattr(layer_wise, _METHOD, None)
    if method is None:
        raise RuntimeError(
            f"LayerWiseDistributedOptimizer of Megatron-Core {_version()} has no {_METHOD}, so it cannot be given a "
            f"layout: {leave_out}"
        )
    arguments = list(inspect.signature(method).parameters)
    if arguments != _ARGUMENTS:
        raise RuntimeError(
            f"{_METHOD} of Megatron-Core {_version()} takes ({', '.join(arguments)}), expected "
            f"({', '.join(_ARGUMENTS)}): {leave_out}"
        )
    cls: type = _class(_PARAM_LAYOUT, "PerBufferParamLayout")
    needed = {"param_index_map", "bucket_indices", "per_bucket_numel_unpadded"}
    missing = needed - {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else needed
    if missing:
        raise RuntimeError(
            f"PerBufferParamLayout of Megatron-Core {_version()} has no {sorted(missing)[0]}: {leave_out}"
        )
    return cls


def _muon_class() -> type:
    _module("megatron.core")
    for name in _MUON:
        muon = getattr(_find(name), "TensorParallelMuon", None)
        if isinstance(muon, type) and issubclass(muon, Optimizer):
            return muon
    raise RuntimeError(
        f"Megatron-Core {_version()} has no TensorParallelMuon that is an optimizer (it needs Emerging-Optimizers): "
        "install(step=False) replaces the layout only"
    )


def _class(module: str, name: str) -> Any:
    found = getattr(_module(module), name, None)
    if found is None:
        raise RuntimeError(f"{module} of Megatron-Core {_version()} has no {name}")
    return found


def _module(name: str) -> ModuleType:
    module = _find(name)
    if module is None:
        raise ImportError(f"{name} is needed: install Megatron-Core, or a version that has it")
    return module


def _find(name: str) -> ModuleType | None:
    """The module, or None where it or a package of it is missing; not where something that it imports is."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _version() -> str:
    return str(getattr(importlib.import_module("megatron.core"), "__version__", "of unknown version"))


def _set(cls: type, name: str, value: Any) -> Callable[[], None]:
    """Set a class attribute and return what undoes it."""
    inherited = name not in vars(cls)
    before = vars(cls).get(name)
    setattr(cls, name, value)

    def undo() -> None:
        if inherited:
            delattr(cls, name)
        else:
            setattr(cls, name, before)

    return undo


def _set_step(muon: Any, options: dict[str, Any]) -> Callable[[], None]:
    original = muon.step
    stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def step(self: Any, closure: Any = None) -> Any:
        if type(self) is not muon:  # a subclass may do anything
            return original(self, closure)
        stepped.add(replace_step(self, like="megatron", **options))
        return self.step(closure)  # of the class that the object has now

    # The hooks of a torch optimizer run around the step that this one calls.
    step.hooked = True  # type: ignore[attr-defined]
    undo_class = _set(muon, "step", step)

    def undo() -> None:
        undo_class()
        for optimizer in stepped:
            if type(optimizer) is not muon:
                restore_step(optimizer)

    return undo
