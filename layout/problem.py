"""A planning problem as the policies see it: backprop order, aligned sizes, costs; and what they answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fused_lw.layout.spec import ParamSpec

Policy = Literal["balanced", "megatron", "numel"]

# Every parameter starts at a multiple of this many elements (128 bytes of bf16) inside its shard.
ALIGNMENT = 64

# buckets -> shards -> items in buffer order; an item is a position in backprop order.
Assignment = list[list[list[int]]]


def round_up(value: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is at least `value`."""
    return -(-value // divisor) * divisor


def shard_divisor(dp_size: int, high_nccl_busbw: bool = False) -> int:
    """What the size of a shard is a multiple of, so that a bucket divides evenly into `dp_size` aligned shards."""
    end_divisor = math.lcm(dp_size, 128, 2**16 if high_nccl_busbw else 1)
    return math.lcm(ALIGNMENT, end_divisor // dp_size)


@dataclass(frozen=True, slots=True)
class Problem:
    """Items are in backprop order: item 0 is the last parameter of the model."""

    specs: tuple[ParamSpec, ...]
    numels: tuple[int, ...]
    costs: tuple[int, ...]  # of each item alone
    dp_size: int
    divisor: int  # shard divisor
    bucket_size: int | None
    numel_slack: float

    @classmethod
    def of(
        cls,
        params: Sequence[ParamSpec],  # forward order
        costs: Sequence[int],
        dp_size: int,
        bucket_size: int | None,
        numel_slack: float,
        high_nccl_busbw: bool,
    ) -> Problem:
        specs = tuple(reversed(params))
        return cls(
            specs,
            tuple(spec.numel for spec in specs),
            tuple(reversed(costs)),
            dp_size,
            shard_divisor(dp_size, high_nccl_busbw),
            bucket_size,
            numel_slack,
        )

    def height(self, shards: Sequence[Sequence[int]]) -> int:
        """Size of each shard of a bucket: the tallest one, items aligned, rounded up to the shard divisor."""
        tallest = max(sum(round_up(self.numels[i], ALIGNMENT) for i in shard) for shard in shards)
        return round_up(tallest, self.divisor)
