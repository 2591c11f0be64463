"""What Newton-Schulz costs: Megatron's proxy, the multiply-adds that will really run, or measured seconds.

Costs are integers (elements, floating-point operations or nanoseconds), so that every rank and every platform
computes the same plan.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from fused_lw.layout.spec import ParamSpec, integer

CostModel = Literal["megatron", "flops"]
NS_STEPS = 5


class CostTable:
    """Measured seconds of batched Newton-Schulz: oriented shape (r, s), r <= s, and batch -> seconds.

    Between two measured batches time is linear in the batch, rounded up to nanoseconds. Below the smallest one it
    stays that one's time (a smaller batch is not assumed to be faster than anything measured), above the largest it
    grows in proportion to the batch. A time lower than that of a smaller batch is noise and is raised to it. A shape
    that was not measured is an error: nothing is extrapolated from other shapes.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], Mapping[int, float]], name: str = "table") -> None:
        """Raise ValueError for a shape with rows > cols, a batch < 1 or a time that is not positive and finite."""
        self.name = name
        self._points: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for (r, s), times in seconds.items():
            if not 1 <= r <= s or not times:
                raise ValueError(f"cost table {name!r}: shape {r}x{s} needs 1 <= r <= s and a measured batch")
            batches = sorted(map(int, times))
            nanoseconds: list[int] = []
            for batch in batches:
                if batch < 1 or not 0 < times[batch] < math.inf:
                    raise ValueError(f"cost table {name!r}: {times[batch]} s for shape {r}x{s}, batch {batch}")
                nanoseconds.append(max(round(times[batch] * 1e9), *nanoseconds[-1:], 1))
            self._points[int(r), int(s)] = (batches, nanoseconds)

    @classmethod
    def from_json(cls, text: str, name: str = "table") -> CostTable:
        """Read {"rows": [{"shape": [r, s], "batch": B, "seconds": t}, ...]}; other keys are for people."""
        try:
            seconds: dict[tuple[int, int], dict[int, float]] = {}
            for row in json.loads(text)["rows"]:
                r, s = sorted(integer(side, "a side of a shape") for side in row["shape"])
                seconds.setdefault((r, s), {})[integer(row["batch"], "a batch")] = float(row["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cost table {name!r}: expected rows of shape, batch and seconds ({error!r})") from error
        return cls(seconds, name)

    def nanoseconds(self, shape: tuple[int, int], batch: int) -> int:
        """Time of one batch of `batch` matrices of oriented shape (r, s); 0 for an empty batch."""
        if shape not in self._points:
            raise ValueError(f"cost table {self.name!r} has no measurement of shape {shape[0]}x{shape[1]}")
        if batch == 0:
            return 0
        batches, times = self._points[shape]
        i = bisect_right(batches, batch)
        if i == 0:
            return times[0]
        if i == len(batches):
            return -(-times[-1] * batch // batches[-1])
        rise, run = times[i] - times[i - 1], batches[i] - batches[i - 1]
        return times[i - 1] - (-rise * (batch - batches[i - 1]) // run)

    def least_nanoseconds(self, shape: tuple[int, int], matrices: int) -> int:
        """A time that no split of these matrices into batches goes below: each at the cheapest measured batch."""
        self.nanoseconds(shape, 0)
        return min(matrices * time // batch for batch, time in zip(*self._points[shape], strict=True))


def ns_flops(r: int, s: int) -> int:
    """Operations of five Newton-Schulz steps on an r x s matrix, r <= s, by the cheaper of the two algorithms.

    A multiply-add counts 2; products of symmetric, commuting factors count half. Standard, per step: `A = XX'` r^2 s,
    `A^2` r^3, `BX` 2 r^2 s. Gram in 16 bits restarts before steps 2 and 4, so it has three segments, of 1, 2 and 2
    steps, with one `XX'` and one `QX` each: 9 r^2 s. In r^3 a segment of one step has the square in W; one of two has
    the squares in both W, the two products of R between them, and `QW`: 1 + 5 + 5.
    """
    standard = NS_STEPS * (3 * r * r * s + r**3)
    gram = 9 * r * r * s + 11 * r**3
    return min(standard, gram)


def check_cost_model(model: object) -> None:
    """Raise a ValueError for what is neither a `CostModel` nor a `CostTable`."""
    if not isinstance(model, CostTable) and model not in get_args(CostModel):
        raise ValueError(f"unknown cost model {model!r}, expected 'megatron', 'flops' or a CostTable")


def ns_cost(spec: ParamSpec, model: CostModel | CostTable = "megatron") -> int:
    """Cost of orthogonalizing one parameter alone.

    "megatron": max(M, N) * min(M, N)**2 of a matrix's full shape, the element count of anything else. "flops":
    `ns_flops` of each matrix, the element count of a vector. A `CostTable`: nanoseconds, 0 for a vector.
    """
    check_cost_model(model)
    r, s = spec.oriented
    if isinstance(model, CostTable):
        return model.nanoseconds((r, s), spec.matrices) if spec.matrices else 0
    if model == "megatron":
        return r * r * s if len(spec.shape) == 2 else spec.numel
    return spec.matrices * ns_flops(r, s) if spec.matrices else spec.numel


def batch_cost(specs: Sequence[ParamSpec], model: CostModel | CostTable) -> int:
    """Cost of a batch of parameters of one full shape: their sum, or the measured time of the batch."""
    if not specs:
        return 0
    if isinstance(model, CostTable):
        matrices = sum(spec.matrices for spec in specs)
        return model.nanoseconds(specs[0].oriented, matrices) if matrices else 0
    return sum(ns_cost(spec, model) for spec in specs)


def lower_bound(costs: Sequence[int], dp_size: int) -> int:
    """No assignment has a lower maximum: the mean, the costliest, and the pigeonhole over the costliest.

    Of any k * dp_size + 1 parameters some rank owns k + 1, which cost at least as much as their k + 1 cheapest.
    """
    if not costs:
        return 0
    falling = sorted(costs, reverse=True)
    pigeonhole = (sum(falling[k * dp_size - k : k * dp_size + 1]) for k in range((len(costs) - 1) // dp_size + 1))
    return max(-(-sum(costs) // dp_size), *pigeonhole)
