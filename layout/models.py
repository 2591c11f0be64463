"""The matrices of published models, for planning and benchmarks without their weights."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fused_lw.layout.spec import ParamSpec

KINDS = ("dense", "expert")


class Matrix(NamedTuple):
    """One weight matrix: `rows` outputs by `cols` inputs; an "expert" lies in the expert-data-parallel buffer."""

    name: str
    rows: int
    cols: int
    kind: str


@cache
def _models() -> dict[str, Any]:
    text = resources.files("fused_lw.layout").joinpath("models.json").read_text(encoding="utf-8")
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def model_names() -> list[str]:
    """The names that `load_model` takes."""
    return list(_models())


def model_source(name: str) -> str:
    """Where the shapes of a model come from."""
    source: str = _entry(name)["source"]
    return source


def load_model(name: str, *, ep: int = 1) -> list[Matrix]:
    """All matrices of a model that Muon updates, in forward order, as one of `ep` expert-parallel ranks has them.

    Names are "layers.<block>.<parameter>", and for several copies "layers.<block>.<parameter>.<copy>". Raises
    ValueError for an unknown name (listing the known ones) and for an `ep` that does not divide the experts.
    """
    if ep < 1:
        raise ValueError(f"ep must be at least 1, got {ep}")
    matrices: list[Matrix] = []
    layer = 0
    for repeat, params in _entry(name)["blocks"]:
        for *_, copies, kind in params:
            if kind == "expert" and copies % ep:
                raise ValueError(f"model {name!r}: ep {ep} does not divide its {copies} experts")
        for _ in range(repeat):
            for param, rows, cols, copies, kind in params:
                full = f"layers.{layer}.{param}"
                local = copies // ep if kind == "expert" else copies
                if copies == 1:
                    matrices.append(Matrix(full, rows, cols, kind))
                else:
                    matrices.extend([Matrix(f"{full}.{i}", rows, cols, kind) for i in range(local)])
            layer += 1
    return matrices


def model_specs(name: str, *, ep: int = 1, gtp: int = 1, kinds: tuple[str, ...] = KINDS) -> list[ParamSpec]:
    """The matrices of the given kinds as specs; `gtp` shards the rows of dense matrices (experts stay whole).

    Raises what `load_model` raises, and ValueError for `gtp` < 1 or a kind that is not "dense" or "expert".
    """
    if gtp < 1:
        raise ValueError(f"gtp must be at least 1, got {gtp}")
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kinds {sorted(unknown)}, expected some of {list(KINDS)}")
    specs = []
    for matrix in load_model(name, ep=ep):
        if matrix.kind not in kinds:
            continue
        shards = gtp if matrix.kind == "dense" else 1
        rows = -(-matrix.rows // shards)
        specs.append(ParamSpec(matrix.name, (rows, matrix.cols), shards, rows * shards - matrix.rows))
    return specs


def _entry(name: str) -> Any:
    models = _models()
    if name not in models:
        raise ValueError(f"unknown model {name!r}, expected one of: {', '.join(models)}")
    return models[name]
