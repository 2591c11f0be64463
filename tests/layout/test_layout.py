"""Layout: what it answers, what it refuses, and that it survives a round trip."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_lw.layout import Bucket, CostTable, Layout, ParamSpec, Placement, plan
from tests.layout.test_balanced import params_of

POLICIES = ("balanced", "megatron", "numel")
layouts = st.builds(
    plan,
    params_of(),
    dp_size=st.sampled_from([1, 2, 3, 8]),
    bucket_size=st.sampled_from([None, 1, 700, 5000]),
    policy=st.sampled_from(POLICIES),
    high_nccl_busbw=st.sampled_from([False, False, True]),
)


@settings(max_examples=120, deadline=None)
@given(layout=layouts)
def test_rules_of_the_buffer(layout: Layout) -> None:
    layout.validate()
    slots = sorted(layout.placements.values())
    assert all(before.end <= after.start for before, after in itertools.pairwise(slots))
    for name, slot in layout.placements.items():
        part = layout.shard(slot.shard)[slot.bucket]
        assert part.start <= slot.start < slot.end <= part.end
        assert (slot.start - part.start) % 64 == 0
        assert name in part.names
    in_backprop_order = [layout.placements[spec.name].bucket for spec in reversed(layout.params)]
    assert in_backprop_order == sorted(in_backprop_order)
    assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.end for bucket in layout.buckets[:-1])][
        : len(layout.buckets)
    ]
    for spec in layout.params:
        if spec.shared_embedding:
            slot = layout.placements[spec.name]
            assert slot.shard == 0
            assert layout.buckets[slot.bucket].numel == spec.numel


@settings(max_examples=60, deadline=None)
@given(layout=layouts)
def test_groups_cover_each_rank_once(layout: Layout) -> None:
    specs = {spec.name: spec for spec in layout.params}
    for rank in range(layout.dp_size):
        owned = [name for part in layout.shard(rank) for name in part.names]
        groups = layout.groups(rank)
        assert sorted(name for group in groups for name in group.names) == sorted(owned)
        assert len({group.shape for group in groups}) == len(groups)
        assert len({specs[name].oriented for name in owned}) <= layout.launches
        for group in groups:
            assert {specs[name].full_shape for name in group.names} == {group.shape}
            assert list(group.offsets) == [layout.placements[name].start for name in group.names]
            assert list(group.offsets) == sorted(group.offsets)
            stored = {specs[name].numel for name in group.names}
            if layout.policy == "balanced" and len(stored) == 1:
                assert group.stride == -(-stored.pop() // 64) * 64
            if group.stride is not None:
                buckets = [layout.placements[name].bucket for name in group.names]
                for i in range(1, len(buckets)):
                    if buckets[i] == buckets[i - 1]:
                        assert group.offsets[i] - group.offsets[i - 1] == group.stride


@settings(max_examples=60, deadline=None)
@given(layout=layouts)
def test_round_trip(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.digest() == layout.digest()


def test_answers() -> None:
    params = [ParamSpec("a", (8, 16)), ParamSpec("b", (16, 8)), ParamSpec("c", (3,)), ParamSpec("d", (8, 16))]
    layout = plan(params, dp_size=2)
    assert (layout.numel, layout.buffer_numel) == (387, 512)
    assert layout.padding == pytest.approx(512 / 387 - 1)
    assert layout.buckets == (Bucket(0, 512, 387),)
    assert sum(layout.shard_costs) == 3 * 8 * 8 * 16 + 3
    assert layout.lower_bound == 2 * 8 * 8 * 16
    assert layout.imbalance == pytest.approx(2 * max(layout.shard_costs) / sum(layout.shard_costs))
    assert layout.over_bound == pytest.approx(max(layout.shard_costs) / 2048 - 1)
    assert layout.launches == 2
    assert list(layout.placements) == ["a", "b", "c", "d"]
    assert layout.digest() != plan(params, dp_size=1).digest()
    with pytest.raises(TypeError):
        layout.placements["a"] = layout.placements["b"]  # type: ignore[index]
    with pytest.raises(ValueError, match="rank 2 is not one of the layout's 2"):
        layout.groups(2)


@pytest.mark.parametrize("policy", POLICIES)
def test_empty(policy: Any) -> None:
    layout = plan([], dp_size=4, bucket_size=100, policy=policy)
    layout.validate()
    assert (layout.numel, layout.buffer_numel, layout.padding, layout.imbalance, layout.launches) == (0, 0, 0, 1, 0)
    assert layout.over_bound == 0
    assert layout.buckets == ()
    assert layout.groups(3) == ()
    assert Layout.from_json(layout.to_json()) == layout


W = ParamSpec("w", (4, 16))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("params", "arguments", "reason"),
    [
        pytest.param([ParamSpec("none", (0, 4))], {}, r"'none' of shape \(0, 4\) has no elements", id="no-elements"),
        pytest.param([W, W], {}, "'w' is listed twice", id="duplicate"),
        pytest.param([W], {"dp_size": 0}, "dp_size must be at least 1, got 0", id="dp-size"),
        pytest.param([W], {"bucket_size": 0}, "bucket_size must be at least 1 or None, got 0", id="bucket-size"),
        pytest.param([W], {"numel_slack": -0.1}, "numel_slack must be at least 0", id="slack"),
        pytest.param([W], {"numel_slack": math.nan}, "numel_slack must be at least 0, got nan", id="slack-nan"),
        pytest.param([ParamSpec("g", (4, 16), gtp_size=0)], {}, "'g': gtp_size must be at least 1", id="gtp-0"),
        pytest.param([ParamSpec("g", (4, 16), 2, 8)], {}, "'g' of shape .* leave no row", id="gtp-no-row"),
        pytest.param([ParamSpec("g", (2, 4, 16), 16)], {}, r"'g' of shape \(2, 4, 16\): gtp_size 16", id="gtp-3-d"),
        pytest.param([ParamSpec("g", (16,), 16)], {}, r"'g' of shape \(16,\): gtp_size 16", id="gtp-1-d"),
        pytest.param([ParamSpec("w", (-4, -4))], {}, r"'w' of shape \(-4, -4\) has no elements", id="negative"),
        pytest.param([W], {"cost": "guess"}, "unknown cost model 'guess'", id="cost"),
        pytest.param([], {"cost": "guess"}, "unknown cost model 'guess'", id="cost-of-nothing"),
    ],
)
def test_bad_input(policy: Any, params: list[ParamSpec], arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(params, policy=policy, **{"dp_size": 2, **arguments})


@pytest.mark.parametrize("number", [int, np.int64, np.uint8], ids=lambda number: number.__name__)
@pytest.mark.parametrize("sequence", [tuple, list, np.array], ids=lambda sequence: sequence.__name__)
def test_any_integers_in_any_sequence(sequence: Any, number: Any) -> None:
    spec = ParamSpec("w", sequence([number(4), number(16)]), number(2), number(1))
    assert spec == ParamSpec("w", (4, 16), 2, 1)
    assert hash(spec) == hash(ParamSpec("w", (4, 16), 2, 1))
    layout = plan([spec], dp_size=number(2), bucket_size=number(3), high_nccl_busbw=np.bool_(False))
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: ParamSpec("w", (4.5, 4.0)), "'w': a side of its shape .* got 4.5", id="float-side"),
        pytest.param(lambda: ParamSpec("w", "64"), "'w': its shape must be a sequence of integers, got '64'", id="str"),
        pytest.param(lambda: ParamSpec("w", 64), "'w': its shape must be a sequence of integers, got 64", id="int"),
        pytest.param(lambda: ParamSpec("w", (4, "4")), "'w': a side of its shape", id="string-side"),
        pytest.param(lambda: ParamSpec("w", (4, True)), "'w': a side of its shape", id="bool-side"),
        pytest.param(lambda: ParamSpec("w", (4, 4), 1.5), "'w': gtp_size must be an integer, got 1.5", id="gtp"),
        pytest.param(lambda: ParamSpec("w", (4, 4), "2"), "'w': gtp_size must be an integer, got '2'", id="gtp-str"),
        pytest.param(lambda: ParamSpec("w", (4, 4), 1, None), "'w': pad_rows must be an integer, got None", id="pad"),
        pytest.param(lambda: ParamSpec("w", (4, 4), shared_embedding=1), "'w': shared_embedding", id="embedding"),
        pytest.param(lambda: ParamSpec(None, (4, 4)), "name of a parameter must be a string", id="name"),
        pytest.param(lambda: plan([W], dp_size=2.0), "dp_size must be an integer, got 2.0", id="dp-size"),
        pytest.param(lambda: plan([W], dp_size=2, bucket_size=1e6), "bucket_size must be an integer", id="bucket-size"),
    ],
)
def test_what_is_no_integer_is_named(make: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        make()


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best', expected one of balanced, megatron, numel"):
        plan([W], dp_size=2, policy="best")  # type: ignore[arg-type]


def two_buckets() -> Layout:
    params = [ParamSpec(f"p{i}", (4, 32)) for i in range(8)]
    layout = plan([*params, ParamSpec("tied", (4, 32), shared_embedding=True)], dp_size=2, bucket_size=512)
    assert len(layout.buckets) == 3
    return layout


def with_slot(layout: Layout, name: str, **changes: int) -> Layout:
    slots = [
        slot._replace(**changes) if spec.name == name else slot
        for spec, slot in zip(layout.params, layout.slots, strict=True)
    ]
    return dataclasses.replace(layout, slots=tuple(slots))


def swapped(layout: Layout, a: str, b: str) -> Layout:
    there, here = layout.placements[a], layout.placements[b]
    return with_slot(with_slot(layout, a, **here._asdict()), b, **there._asdict())


def shifted(layout: Layout, name: str, by: int) -> Layout:
    slot: Placement = layout.placements[name]
    return with_slot(layout, name, start=slot.start + by, end=slot.end + by)


def with_bucket(layout: Layout, b: int, **changes: int) -> Layout:
    buckets = list(layout.buckets)
    buckets[b] = buckets[b]._replace(**changes)
    return dataclasses.replace(layout, buckets=tuple(buckets))


def with_more(layout: Layout, bucket: Bucket) -> Layout:
    return dataclasses.replace(layout, buckets=(*layout.buckets, bucket))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(lambda x: with_slot(x, "p3", end=x.placements["p3"].end + 64), "'p3'.*expected 128", id="size"),
        pytest.param(lambda x: shifted(x, "p3", 32), "'p3'.*multiple of 64", id="alignment"),
        pytest.param(lambda x: shifted(x, "p3", 2048), "'p3'.*crosses its shard", id="shard"),
        pytest.param(lambda x: with_slot(x, "p3", shard=2), "'p3'.*no such bucket or shard", id="no-shard"),
        pytest.param(lambda x: with_slot(x, "p3", bucket=-1), "'p3'.*no such bucket or shard", id="no-bucket"),
        pytest.param(lambda x: swapped(x, "p0", "p7"), "'p7'.*backprop order", id="order"),
        pytest.param(lambda x: swapped(x, "p7", "tied"), "'tied'.*alone in its bucket", id="embedding-not-alone"),
        pytest.param(lambda x: with_slot(x, "p0", **x.placements["p1"]._asdict()), "'p1'.*overlaps", id="overlap"),
        pytest.param(lambda x: with_bucket(x, 1, numel=3), "bucket 1 .*elements", id="bucket-numel"),
        pytest.param(lambda x: with_more(x, Bucket(1344, 1600, 0)), "bucket 3 .*not start at 1280", id="gap"),
        pytest.param(lambda x: with_more(x, Bucket(1280, 1536, 0)), "bucket 3 .*have 0 elements", id="empty-bucket"),
        pytest.param(lambda x: dataclasses.replace(x, slots=x.slots[1:]), "9 parameters but 8", id="lengths"),
        pytest.param(lambda x: dataclasses.replace(x, shard_costs=(1,)), "1 shard costs", id="costs"),
        pytest.param(lambda x: dataclasses.replace(x, params=(*x.params[:8], x.params[0])), "'p0'", id="duplicate"),
    ],
)
def test_validate_names_what_is_broken(broken: Any, reason: str) -> None:
    layout = two_buckets()
    layout.validate()
    with pytest.raises(ValueError, match=reason):
        broken(layout).validate()


def test_validate_wants_the_tallest_shard_to_fill_its_bucket() -> None:
    layout = plan([W], dp_size=2)
    with pytest.raises(ValueError, match=r"bucket 0 .* is not of 2 shards that hold its tallest, 128 elements"):
        with_bucket(layout, 0, end=256).validate()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: "[]", id="list"),
        pytest.param(lambda text: text[:-5], id="cut-off"),
        pytest.param(lambda text: json.dumps({**json.loads(text), "format": 99}), id="format"),
        pytest.param(lambda text: json.dumps({**json.loads(text), "more": 1}), id="unknown-field"),
        pytest.param(lambda text: json.dumps({**json.loads(text), "slots": []}), id="no-slots"),
        pytest.param(lambda text: "[" * 100_000, id="nested-too-deeply"),
    ],
)
def test_from_json_refuses(damage: Any) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(damage(two_buckets().to_json()))


def everywhere(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part of a JSON value, with the way to it."""
    yield path, value
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from everywhere(part, (*path, key))


def changed(fields: Any, path: tuple[Any, ...], value: Any) -> str:
    *way, last = path
    copied = part = copy.deepcopy(fields)
    for key in way:
        part = part[key]
    part[last] = value
    return json.dumps(copied)


@pytest.mark.parametrize("cost", ["megatron", "flops"])
def test_from_json_refuses_any_change_of_one_field(cost: Any) -> None:
    layout = plan([*two_buckets().params, ParamSpec("gtp", (2, 8), 4, 3)], dp_size=2, bucket_size=512, cost=cost)
    fields = json.loads(layout.to_json())
    tried = 0
    for path, value in list(everywhere(fields))[1:]:
        others = [None, True, 1.5, -1, "x", [], {}, [1, 2], math.nan, math.inf, 10**30]
        if isinstance(value, bool | str):
            others.append(not value)
        else:
            others += [value + 1, float(value)] if isinstance(value, int) else [value[:-1], value + value[-1:]]
        for other in others:
            if type(other) is type(value) and other == value:
                continue
            # Another name, or no shared embedding where there was one, is another layout, and a good one.
            if ((path[0], *path[2:]), type(other)) in ((("params", 0), str), (("params", 4), bool)):
                continue
            with pytest.raises(ValueError):
                Layout.from_json(changed(fields, path, other))
                pytest.fail(f"{path}: {value!r} changed to {other!r}")
            tried += 1
    assert tried > 900


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"shard_costs": [1, -1]}, "below 0", id="negative"),
        pytest.param({"lower_bound": 10**12}, "the bound over the largest", id="bound"),
        pytest.param({"cost_model": "times.json"}, "cost_model 'times.json' is not one of", id="name-alone"),
    ],
)
def test_from_json_checks_what_it_can_of_a_measured_plan(changes: dict[str, Any], reason: str) -> None:
    layout = plan([W], dp_size=2, cost=CostTable({(4, 16): {1: 1e-6}}, name="times.json"))
    assert layout.cost_model == "table:times.json"
    fields = json.loads(layout.to_json())
    with pytest.raises(ValueError, match=reason):
        Layout.from_json(json.dumps({**fields, **changes}))
