"""Parameter groups in which every parameter has a name and every trainable one of a model is found once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fused_lw.routing import split_params


def named_groups(
    params: nn.Module | Iterable[Any], model: nn.Module | None
) -> tuple[list[dict[str, Any]], nn.Module | None]:
    """Groups with (name, parameter) pairs and the key "use_muon", and the module that they belong to.

    Args:
        params: a module, which `split_params` divides; or parameters, (name, parameter) pairs, or groups of either.
            A group without "use_muon" is Muon's. Frozen parameters are left out.
        model: names parameters that come without a name; each of its trainable parameters must be in a group.

    Raises:
        ValueError: naming a parameter without name, in two groups, or of `model` and in no group.
        TypeError: for something that is not a parameter.
    """
    if isinstance(params, nn.Module):
        model = params if model is None else model
        groups: list[Any] = split_params(unwrapped(params)).groups()
    else:
        groups = list(params)
        if not groups:
            raise ValueError("LayerWiseMuon got no parameters")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
    model = None if model is None else unwrapped(model)
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    seen: set[int] = set()
    seen_names: set[str] = set()
    named = []
    for index, group in enumerate(groups):
        listed = group["params"]
        pairs = []
        for position, entry in enumerate([listed] if isinstance(listed, Tensor) else listed):
            name, param = entry if isinstance(entry, tuple) else (names.get(id(entry)), entry)
            if not isinstance(param, Tensor):
                raise TypeError(f"parameter {position} of group {index} is no tensor but {type(param).__name__}")
            if name is None:
                raise ValueError(
                    f"parameter {position} of group {index}, of shape {tuple(param.shape)}, has no name, by which "
                    "ranks and checkpoints know it: pass (name, parameter) pairs or model="
                )
            if id(param) in seen or name in seen_names:
                raise ValueError(f"{name} of shape {tuple(param.shape)} is in the groups twice")
            seen.add(id(param))
            seen_names.add(name)
            if param.requires_grad:
                pairs.append((name, param))
        if pairs:
            named.append({"use_muon": True, **group, "params": pairs})
    if model is not None:
        for name, param in model.named_parameters():
            if param.requires_grad and id(param) not in seen:
                raise ValueError(f"{name} of shape {tuple(param.shape)} is trainable but in no group")
    return named, model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose names are those of the single-process model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class Homes:
    """Where a model keeps its parameters, to notice when one is replaced by another object."""

    def __init__(self, model: nn.Module | None) -> None:
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in [] if model is None else model.modules():
            for name, param in module.named_parameters(recurse=False):
                self._homes.setdefault(id(param), []).append((module, name))

    def moved_out(self, param: Tensor) -> bool:
        """Whether a module that held `param` holds another parameter now."""
        return any(module._parameters.get(name) is not param for module, name in self._homes.get(id(param), ()))
