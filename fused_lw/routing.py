"""Which parameters are matrices for Muon, and what the layout planner needs to know of them.

One classification (`classify`) serves the planner and the split between Muon and AdamW: tags that a trainer put on a
parameter come first, then the module that owns it, then its name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fused_lw.layout import ParamSpec

# "other": trainable, but not a matrix that Newton-Schulz should see, such as a depthwise convolution.
Role = Literal["matrix", "embedding", "head", "vector", "other"]

# Names of the module that holds an embedding or an output head, where modules are not at hand or are of no known type.
EMBEDDINGS = frozenset(
    {"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "token_embedding", "word_embeddings"}
    | {"position_embeddings", "position_embedding", "pos_embed", "pos_embedding", "wte", "wpe"}
    | {"cls_token", "mask_token", "register_tokens"}
)
HEADS = frozenset({"lm_head", "output_layer", "embed_out", "unembed", "unembedding"})
# Heads only at the top of a model: inside blocks these names are ordinary projections.
TOP_HEADS = frozenset({"head", "output", "classifier", "score"})
# Added by DistributedDataParallel, torch.compile, and models that wrap a backbone.
WRAPPERS = frozenset({"module", "model", "_orig_mod"})


class Routed(NamedTuple):
    """A trainable parameter and what it is."""

    name: str
    param: Tensor
    role: Role
    reason: str


def classify(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[Routed]:
    """The role of every trainable parameter, in definition order; a tied parameter comes once, under its first name.

    The tag `use_muon` decides where there is one; `is_embedding_or_output_parameter` and `shared_embedding` name
    embeddings. Without tags, embeddings and heads are known by their modules and names, norms and biases by having
    fewer than two dimensions.

    Raises:
        ValueError: naming the parameter, for one tagged `use_muon` that is not a matrix, or one not yet initialized.
        TypeError: for anything but a module or (name, parameter) pairs.
    """
    owners: dict[int, list[nn.Module]] = {}
    aliases: dict[int, list[str]] = {}
    named: list[tuple[str, Tensor]] = []
    if isinstance(model, nn.Module):
        for module in model.modules():
            for owned in module.parameters(recurse=False):
                owners.setdefault(id(owned), []).append(module)
        for name, owned in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(owned), []).append(name)
        named = [*model.named_parameters()]
    else:
        named = [_checked_pair(pair) for pair in model]
    routed = []
    seen: set[int] = set()
    for name, param in named:
        if not param.requires_grad or id(param) in seen:
            continue
        seen.add(id(param))
        if is_lazy(param):
            raise ValueError(f"parameter {name!r} is not initialized yet: run a forward pass first")
        role, reason = _role(aliases.get(id(param), [name]), param, owners.get(id(param), []))
        use_muon = getattr(param, "use_muon", None)
        if use_muon and param.ndim < 2:
            raise ValueError(f"parameter {name!r} of shape {tuple(param.shape)} is tagged use_muon but is not a matrix")
        if use_muon is not None:
            role = "matrix" if use_muon else role if role != "matrix" else "other"
            reason = f"tagged use_muon={bool(use_muon)}"
        routed.append(Routed(name, param, role, reason))
    return routed


def from_module(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[ParamSpec]:
    """Specs of the matrices of a model, or of (name, parameter) pairs, for `fused_lw.layout.plan`.

    Embeddings, heads, norms and biases are left out; an embedding tagged `shared_embedding` is placed, alone in its
    bucket, unless `use_muon` is False on it. The tags `is_gtp_weight_remat`, `gtp_remat_size` and `pad_length` say
    how rows are sharded over GTP and how many rows of the gathered matrix are padding.

    Raises:
        ValueError: naming the parameter, for what `classify` refuses, a dtype that is not floating point, no
            elements, GTP tags on something that is not 2-D or that leave no row, or a name given twice.
        TypeError: for anything but a module or (name, parameter) pairs.
    """
    specs = []
    names: set[str] = set()
    for name, param, role, _ in classify(model):
        shared = bool(getattr(param, "shared_embedding", False))
        if role != "matrix" and not (shared and getattr(param, "use_muon", True)):
            continue
        if name in names:
            raise ValueError(f"parameter {name!r} is given twice")
        names.add(name)
        specs.append(param_spec(name, param, shared))
    return specs


def param_spec(name: str, param: Tensor, shared: bool) -> ParamSpec:
    """What the layout planner needs to know of a parameter; raises a ValueError naming one that cannot be placed."""
    shape = tuple(param.shape)
    if not param.is_floating_point() or param.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} of shape {shape}: expected dense floating point, got {param.dtype}, {param.layout}"
        )
    if param.numel() == 0:
        raise ValueError(f"parameter {name!r} of shape {shape} has no elements")
    if not getattr(param, "is_gtp_weight_remat", False):
        return ParamSpec(name, shape, shared_embedding=shared)
    gtp_size, pad_rows = getattr(param, "gtp_remat_size", None), getattr(param, "pad_length", None)
    pad_rows = 0 if pad_rows is None else pad_rows  # as Megatron's step reads it
    if not isinstance(gtp_size, int) or gtp_size < 1 or param.ndim != 2:
        raise ValueError(
            f"parameter {name!r} of shape {shape} is tagged is_gtp_weight_remat: expected two dimensions and a "
            f"gtp_remat_size of at least 1, got {gtp_size!r}"
        )
    if not isinstance(pad_rows, int):
        raise ValueError(f"parameter {name!r} of shape {shape}: expected an integer pad_length, got {pad_rows!r}")
    spec = ParamSpec(name, shape, gtp_size, pad_rows, shared)
    if pad_rows < 0 or spec.full_shape[0] < 1:
        raise ValueError(
            f"parameter {name!r} of shape {shape}: pad_length {pad_rows} of {gtp_size} shards leaves no row"
        )
    return spec


@dataclass(frozen=True)
class ParamSplit:
    """The trainable parameters of a model, divided between Muon and AdamW. Tied parameters come once."""

    routed: tuple[Routed, ...]  # definition order

    @property
    def matrices(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of what Muon takes."""
        return [(name, param) for name, param, role, _ in self.routed if role == "matrix"]

    @property
    def others(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of embeddings, heads, norms, biases and the rest."""
        return [(name, param) for name, param, role, _ in self.routed if role != "matrix"]

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups with the key "use_muon", as `fused_lw.MuonWithAuxAdamW` takes them."""
        both = ((True, self.matrices), (False, self.others))
        return [{"params": params, "use_muon": use_muon} for use_muon, params in both if params]

    def table(self) -> Table:
        """One row a parameter: its name, shape, what steps it, and why."""
        table = Table()
        for heading in ("parameter", "shape", "stepped by", "role", "why"):
            table.add_column(heading)
        for name, param, role, reason in self.routed:
            shape = " x ".join(map(str, param.shape)) or "scalar"
            table.add_row(name, shape, "Muon" if role == "matrix" else "AdamW", role, reason)
        return table


def split_params(model: nn.Module | Iterable[tuple[str, Tensor]]) -> ParamSplit:
    """Divide the trainable parameters of a model, or of (name, parameter) pairs, between Muon and AdamW.

    Muon takes matrices: weights of two dimensions, stacked experts and convolutions, but no embeddings, heads, norms
    or biases. Every parameter comes with the reason. A tag `use_muon` on a parameter decides against all other
    signs. `fused-lw doctor --model package.module:factory` prints the division.

    Raises:
        ValueError, TypeError: as `classify`.
    """
    return ParamSplit(tuple(classify(model)))


def model_from(where: str) -> nn.Module:
    """The model that a factory makes: "package.module:factory", called without arguments.

    Modules are looked for in the current folder too. The model has no storage, unless its factory needs the values of
    tensors: then it is called again and builds the model for real.

    Raises:
        ValueError: for anything else, saying what was expected and what was found.
    """
    module, _, factory = where.partition(":")
    if not module or not factory:
        raise ValueError(f"expected package.module:factory, got {where!r}")
    folder = os.getcwd()
    added = [] if folder in sys.path else [folder]
    sys.path.extend(added)  # last: it must not hide what is installed
    try:
        try:
            make = getattr(importlib.import_module(module), factory)
        except Exception as error:  # the module is anybody's code
            raise ValueError(f"{where!r} cannot be imported: {_said(error)}") from error
        try:
            with torch.device("meta"):
                model = make()
        except Exception:  # the wrong device, or wrong on any
            try:
                model = make()
            except Exception as error:
                raise ValueError(f"{where!r} failed: {_said(error)}") from error
    finally:
        for folder in added:
            sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where!r} made a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _checked_pair(pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
        raise TypeError(f"expected a module or (name, parameter) pairs, got {type(pair).__name__}: {str(pair)[:80]}")
    return pair


def _role(names: list[str], param: Tensor, owners: list[nn.Module]) -> tuple[Role, str]:
    """What a parameter is by all but its tag `use_muon`, and why."""
    for tag in ("is_embedding_or_output_parameter", "shared_embedding"):
        if getattr(param, tag, False):
            return "embedding", f"tagged {tag}"
    for owner in owners:
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return "embedding", f"weight of {_article(owner)}"
    by_name = {_role_of_name(name): name for name in reversed(names)}
    if "embedding" in by_name:
        return "embedding", f"called {by_name['embedding']!r}"
    if param.ndim < 2:
        return "vector", f"{param.ndim} dimensions" if param.ndim != 1 else "1 dimension"
    if "head" in by_name:
        return "head", f"called {by_name['head']!r}"
    for owner in owners:
        # A 1-D convolution has three dimensions, which would be read as stacked matrices; a grouped one mixes few
        # channels, so its rows are no matrix to orthogonalize.
        if isinstance(owner, nn.modules.conv._ConvNd) and (owner.groups > 1 or param.ndim == 3):
            return (
                "other",
                f"weight of a grouped {_name(owner)}" if owner.groups > 1 else f"weight of {_article(owner)}",
            )
        if isinstance(owner, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
            return "vector", f"weight of {_article(owner)}"
    shape = "2 dimensions" if param.ndim == 2 else "stacked matrices" if param.ndim == 3 else "a convolution, flattened"
    return "matrix", f"{shape}, weight of {_article(owners[0])}" if owners else shape


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _article(module: nn.Module) -> str:
    return f"{'an' if _name(module)[:1] in 'AEIOU' else 'a'} {_name(module)}"


def _role_of_name(name: str) -> Role | None:
    """By the module that holds the parameter, or by the parameter itself where it is not called weight or bias."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts and parts[-1] in ("weight", "bias"):
        parts.pop()
    if not parts:
        return None
    if parts[-1] in EMBEDDINGS:
        return "embedding"
    if parts[-1] in HEADS or (len(parts) == 1 and parts[0] in TOP_HEADS):
        return "head"
    return None
