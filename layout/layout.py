"""The frozen answer of the planner: where every parameter lies, who owns it, and what each rank runs."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast, get_args

from fused_lw.layout.cost import CostModel, lower_bound, ns_cost
from fused_lw.layout.problem import ALIGNMENT, Assignment, Policy, round_up, shard_divisor
from fused_lw.layout.spec import ParamSpec, check_specs

FORMAT = 1  # of to_json
TABLE = "table:"  # cost_model of a layout planned on a measured table: this and the table's name


class Placement(NamedTuple):
    """Elements [start, end) of the whole buffer, in this bucket and shard."""

    start: int
    end: int
    bucket: int
    shard: int


class Bucket(NamedTuple):
    """Elements [start, end) of the whole buffer, of which `numel` belong to parameters and the rest is padding."""

    start: int
    end: int
    numel: int


class ShardPart(NamedTuple):
    """What a rank owns of one bucket: elements [start, end) of the whole buffer and the parameters in them."""

    bucket: int
    start: int
    end: int
    names: tuple[str, ...]  # in buffer order


class Group(NamedTuple):
    """The parameters of one full shape that a rank owns, over all buckets, to run as one Newton-Schulz batch.

    Groups with the same two dimensions the other way round follow one another and can share a batch.
    """

    shape: tuple[int, ...]  # full shape: rows gathered over GTP, without alignment rows
    names: tuple[str, ...]
    offsets: tuple[int, ...]  # of each in the whole buffer, in elements, rising
    stride: int | None  # between neighbours within a bucket; None where they are not at one constant stride


@dataclass(frozen=True)
class Layout:
    """A plan. Made by `plan`, checked by `validate`, equal on every rank where `digest` is equal.

    Offsets and sizes are in elements of the packed buffer. Costs are in the unit of the cost model: Megatron's
    proxy, floating-point operations, or nanoseconds.
    """

    params: tuple[ParamSpec, ...]  # forward order
    slots: tuple[Placement, ...]  # of each of params
    buckets: tuple[Bucket, ...]  # backprop order
    dp_size: int
    policy: str
    cost_model: str  # "megatron", "flops", or "table:" and the name of a CostTable
    high_nccl_busbw: bool
    shard_costs: tuple[int, ...]  # Newton-Schulz cost of each rank
    lower_bound: int  # no assignment of these parameters to ranks has a lower maximum of shard_costs

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Name -> placement, in forward order."""
        return MappingProxyType({spec.name: slot for spec, slot in zip(self.params, self.slots, strict=True)})

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.params)

    @property
    def buffer_numel(self) -> int:
        """Elements of the packed buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def padding(self) -> float:
        """Padding as a fraction of the parameters' elements."""
        return self.buffer_numel / self.numel - 1 if self.numel else 0.0

    @property
    def imbalance(self) -> float:
        """Maximum over mean of `shard_costs`; 1 is perfect."""
        total = sum(self.shard_costs)
        return max(self.shard_costs) * self.dp_size / total if total else 1.0

    @property
    def over_bound(self) -> float:
        """How much more than `lower_bound` the costliest shard costs, as a fraction; 0 is perfect."""
        return max(self.shard_costs) / self.lower_bound - 1 if self.lower_bound else 0.0

    @cached_property
    def launches(self) -> int:
        """Newton-Schulz batches on the rank that runs the most of them: a matrix and its transpose share one."""
        return max(len({self.params[i].oriented for part in parts for i in part}) for parts in self._owned)

    def shard(self, rank: int) -> tuple[ShardPart, ...]:
        """What `rank` owns, one part a bucket. Raises ValueError for a rank outside the layout."""
        return tuple(
            ShardPart(b, *self._shard_range(b, rank), tuple(self.params[i].name for i in part))
            for b, part in enumerate(self._owned[self._checked(rank)])
        )

    def groups(self, rank: int) -> tuple[Group, ...]:
        """The batches that `rank` runs. Raises ValueError for a rank outside the layout."""
        members: dict[tuple[int, ...], list[list[int]]] = {}
        for part in self._owned[self._checked(rank)]:
            opened: set[tuple[int, ...]] = set()
            for i in part:
                shape = self.params[i].full_shape
                runs = members.setdefault(shape, [])
                if shape not in opened:
                    runs.append([])
                    opened.add(shape)
                runs[-1].append(i)
        groups = []
        for shape in sorted(members, key=lambda shape: (self.params[members[shape][0][0]].oriented, shape)):
            runs = members[shape]
            steps = {
                self.slots[after].start - self.slots[before].start
                for run in runs
                for before, after in itertools.pairwise(run)
            }
            sizes = {round_up(self.params[i].numel, ALIGNMENT) for run in runs for i in run}
            order = [i for run in runs for i in run]
            groups.append(
                Group(
                    shape,
                    tuple(self.params[i].name for i in order),
                    tuple(self.slots[i].start for i in order),
                    # Neighbours that touch: one step, which is the padded size itself.
                    sizes.pop() if len(sizes) == 1 and steps <= sizes else None,
                )
            )
        return tuple(groups)

    def validate(self) -> None:
        """Raise a ValueError naming the first parameter, bucket or field that breaks a rule of the buffer.

        Costs are computed again, but for those of a measured table, which a layout does not hold.
        """
        self._validate_types()
        check_specs(self.params)
        if len(self.params) != len(self.slots):
            raise ValueError(f"{len(self.params)} parameters but {len(self.slots)} placements")
        last_bucket = 0
        for spec, slot in reversed(list(zip(self.params, self.slots, strict=True))):
            where = f"parameter {spec.name!r} of shape {spec.shape} at {tuple(slot)}"
            if not (0 <= slot.bucket < len(self.buckets) and 0 <= slot.shard < self.dp_size):
                raise ValueError(f"{where}: no such bucket or shard")
            start, end = self._shard_range(slot.bucket, slot.shard)
            if slot.end - slot.start != spec.numel:
                raise ValueError(f"{where}: expected {spec.numel} elements")
            if (slot.start - start) % ALIGNMENT:
                raise ValueError(f"{where}: does not start at a multiple of {ALIGNMENT} in its shard")
            if not start <= slot.start <= slot.end <= end:
                raise ValueError(f"{where}: crosses its shard, elements [{start}, {end})")
            if slot.bucket not in (last_bucket, last_bucket + 1):
                raise ValueError(f"{where}: bucket out of backprop order")
            last_bucket = slot.bucket
            if spec.shared_embedding and (slot.shard or self.buckets[slot.bucket].numel != spec.numel):
                raise ValueError(f"{where}: a shared embedding must be alone in its bucket, in shard 0")
        self._validate_buckets()
        in_order = sorted(zip(self.slots, self.params, strict=True), key=lambda pair: pair[0])
        for (before, _), (after, spec) in itertools.pairwise(in_order):
            if after.start < before.end:
                raise ValueError(f"parameter {spec.name!r} at {tuple(after)} overlaps {tuple(before)}")
        self._validate_costs()

    def _validate_types(self) -> None:
        """A layout read from a file or made by hand may hold anything."""
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy {self.policy!r} is not one of {', '.join(get_args(Policy))}")
        if type(self.high_nccl_busbw) is not bool:
            raise ValueError(f"high_nccl_busbw is {self.high_nccl_busbw!r}, expected True or False")
        numbers: list[tuple[str, Sequence[Any]]] = [("dp_size", (self.dp_size,)), ("lower_bound", (self.lower_bound,))]
        numbers.append(("shard_costs", self.shard_costs))
        numbers += [(f"bucket {b}", bucket) for b, bucket in enumerate(self.buckets)]
        numbers += [(f"placement {i}", slot) for i, slot in enumerate(self.slots)]
        for what, values in numbers:
            for value in values:
                if type(value) is not int:
                    raise ValueError(f"{what} holds {value!r}, expected an integer")

    def _validate_costs(self) -> None:
        model = self.cost_model
        if isinstance(model, str) and model.startswith(TABLE):
            if min(self.shard_costs) < 0 or not 0 <= self.lower_bound <= max(self.shard_costs):
                raise ValueError(
                    f"lower_bound {self.lower_bound} or a shard cost is below 0, or the bound over the largest of them"
                )
            return
        if model not in get_args(CostModel):
            raise ValueError(f"cost_model {model!r} is not one of {', '.join(get_args(CostModel))} or {TABLE}NAME")
        costs = [ns_cost(spec, cast(CostModel, model)) for spec in self.params]
        shard_costs = [0] * self.dp_size
        for slot, cost in zip(self.slots, costs, strict=True):
            shard_costs[slot.shard] += cost
        for rank, (cost, expected) in enumerate(zip(self.shard_costs, shard_costs, strict=True)):
            if cost != expected:
                raise ValueError(f"shard {rank} costs {expected} by the model {model!r}, not {cost}")
        if self.lower_bound != (bound := lower_bound(costs, self.dp_size)):
            raise ValueError(f"lower_bound is {bound} by the model {model!r}, not {self.lower_bound}")

    def _validate_buckets(self) -> None:
        if self.dp_size < 1 or len(self.shard_costs) != self.dp_size:
            raise ValueError(f"{len(self.shard_costs)} shard costs for dp_size {self.dp_size}")
        numels = [0] * len(self.buckets)
        tallest = [0] * len(self.buckets)
        for spec, slot in zip(self.params, self.slots, strict=True):
            numels[slot.bucket] += spec.numel
            start, _ = self._shard_range(slot.bucket, slot.shard)
            tallest[slot.bucket] = max(tallest[slot.bucket], slot.end - start)
        divisor = shard_divisor(self.dp_size, self.high_nccl_busbw)
        end = 0
        for b, bucket in enumerate(self.buckets):
            where = f"bucket {b} at {tuple(bucket)}"
            if bucket.start != end:
                raise ValueError(f"{where} does not start at {end}, where the one before it ends")
            if bucket.numel != numels[b] or not numels[b]:
                raise ValueError(f"{where}: its parameters have {numels[b]} elements")
            size = self.dp_size * round_up(tallest[b], divisor)
            if bucket.end - bucket.start != size:
                raise ValueError(f"{where} is not of {self.dp_size} shards that hold its tallest, {size} elements")
            end = bucket.end

    def to_json(self) -> str:
        """A canonical text: equal layouts give equal bytes on every platform."""
        fields = {
            "format": FORMAT,
            "params": [[p.name, p.shape, p.gtp_size, p.pad_rows, p.shared_embedding] for p in self.params],
            "slots": self.slots,
            "buckets": self.buckets,
            "dp_size": self.dp_size,
            "policy": self.policy,
            "cost_model": self.cost_model,
            "high_nccl_busbw": self.high_nccl_busbw,
            "shard_costs": self.shard_costs,
            "lower_bound": self.lower_bound,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote. Raises ValueError for another text or a layout that is not valid."""
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("format")
            if type(version) is not int or version != FORMAT:
                raise ValueError(f"its format is {version!r}, not {FORMAT}")
            fields["params"] = tuple(
                ParamSpec(name, shape, gtp_size, pad_rows, shared)
                for name, shape, gtp_size, pad_rows, shared in fields["params"]
            )
            fields["slots"] = tuple(Placement(*slot) for slot in fields["slots"])
            fields["buckets"] = tuple(Bucket(*bucket) for bucket in fields["buckets"])
            fields["shard_costs"] = tuple(fields["shard_costs"])
            layout = cls(**fields)
            layout.validate()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a layout of this version: {error}") from error
        return layout

    def digest(self) -> str:
        """SHA-256 of `to_json`: ranks compare it before they communicate."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _shard_range(self, bucket: int, shard: int) -> tuple[int, int]:
        start, end, _ = self.buckets[bucket]
        size = (end - start) // self.dp_size
        return start + shard * size, start + (shard + 1) * size

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.dp_size:
            raise ValueError(f"rank {rank} is not one of the layout's {self.dp_size}")
        return rank

    @cached_property
    def _owned(self) -> list[list[list[int]]]:
        """[rank][bucket] -> positions in params, in buffer order."""
        owned: list[list[list[int]]] = [[[] for _ in self.buckets] for _ in range(self.dp_size)]
        for i in sorted(range(len(self.slots)), key=lambda i: self.slots[i].start):
            owned[self.slots[i].shard][self.slots[i].bucket].append(i)
        return owned


def lay_out(
    params: Sequence[ParamSpec],  # forward order
    assignment: Assignment,
    divisor: int,
) -> tuple[tuple[Placement, ...], tuple[Bucket, ...]]:
    """Offsets of an assignment: items end to end in their shard, shards of one bucket equally tall."""
    slots: dict[int, Placement] = {}
    buckets: list[Bucket] = []
    start = 0
    for b, shards in enumerate(assignment):
        placed: list[tuple[int, int, int, int]] = []
        tallest = numel = 0
        for s, items in enumerate(shards):
            end = 0
            for item in items:
                begin = round_up(end, ALIGNMENT)
                end = begin + params[-1 - item].numel
                placed.append((item, begin, end, s))
                numel += end - begin
            tallest = max(tallest, end)
        size = round_up(tallest, divisor)
        for item, begin, end, s in placed:
            base = start + s * size
            slots[item] = Placement(base + begin, base + end, b, s)
        buckets.append(Bucket(start, start + size * len(shards), numel))
        start = buckets[-1].end
    return tuple(slots[i] for i in reversed(range(len(params)))), tuple(buckets)
