"""What the planner knows of a parameter: its name, its stored shape and the matrix Newton-Schulz runs on."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def integer(value: Any, what: str) -> int:
    """An int of anything that is one, numpy's included. Raises a TypeError that says what should have been one."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be an integer, got {value!r}")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a packed buffer. Numbers are in elements.

    `shape` is what this rank stores. With `gtp_size` > 1 the rows of a matrix are sharded over that many ranks, and
    the last `pad_rows` rows of the gathered matrix are alignment padding, which never enters Newton-Schulz. A
    `shared_embedding` (tied with the output head) sits alone in its bucket, in shard 0.

    Any integers in any sequence are taken, and kept as ints in a tuple. Raises a TypeError that names the parameter
    for anything else.
    """

    name: str
    shape: tuple[int, ...]
    gtp_size: int = 1
    pad_rows: int = 0
    shared_embedding: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a parameter must be a string, got {self.name!r}")
        where = f"parameter {self.name!r}"
        given: Any = self.shape
        # A string is a sequence too, of digits perhaps.
        if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
            raise TypeError(f"{where}: its shape must be a sequence of integers, got {given!r}")
        shape = tuple(integer(side, f"{where}: a side of its shape {given!r}") for side in given)
        if not isinstance(self.shared_embedding, bool):
            raise TypeError(f"{where}: shared_embedding must be True or False, got {self.shared_embedding!r}")
        object.__setattr__(self, "shape", shape)
        for field in ("gtp_size", "pad_rows"):
            object.__setattr__(self, field, integer(getattr(self, field), f"{where}: {field}"))

    @property
    def numel(self) -> int:
        """Elements stored, which is what the buffers hold."""
        return math.prod(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape the optimizer updates: a matrix with its rows gathered and unpadded, the rest as stored."""
        if len(self.shape) != 2:
            return self.shape
        return (self.shape[0] * self.gtp_size - self.pad_rows, self.shape[1])

    @property
    def matrices(self) -> int:
        """How many matrices Newton-Schulz sees: E for stacked experts (E, M, N), 0 for vectors and scalars."""
        return 0 if len(self.shape) < 2 else self.shape[0] if len(self.shape) == 3 else 1

    @property
    def oriented(self) -> tuple[int, int]:
        """Each such matrix as (r, s) with r <= s; convolutions are flattened to (out, in*kh*kw)."""
        full = self.full_shape
        if len(full) < 2:
            return (1, self.numel)
        rows, cols = full[1:] if len(full) == 3 else (full[0], math.prod(full[1:]))
        return (min(rows, cols), max(rows, cols))


def check_specs(params: Sequence[ParamSpec]) -> None:
    """Raise a ValueError that names the first parameter which no layout can hold."""
    seen: set[str] = set()
    for spec in params:
        if spec.name in seen:
            raise ValueError(f"parameter {spec.name!r} is listed twice")
        seen.add(spec.name)
        if min(spec.shape, default=1) < 1:
            raise ValueError(f"parameter {spec.name!r} of shape {spec.shape} has no elements")
        if spec.gtp_size < 1 or spec.pad_rows < 0:
            raise ValueError(
                f"parameter {spec.name!r}: gtp_size must be at least 1 and pad_rows at least 0, "
                f"got {spec.gtp_size} and {spec.pad_rows}"
            )
        if (spec.gtp_size > 1 or spec.pad_rows) and len(spec.shape) != 2:
            raise ValueError(
                f"parameter {spec.name!r} of shape {spec.shape}: gtp_size {spec.gtp_size} and pad_rows "
                f"{spec.pad_rows} are of matrices, which have two dimensions"
            )
        if spec.full_shape and spec.full_shape[0] < 1:
            raise ValueError(
                f"parameter {spec.name!r} of shape {spec.shape}: gtp_size {spec.gtp_size} and "
                f"pad_rows {spec.pad_rows} leave no row"
            )
