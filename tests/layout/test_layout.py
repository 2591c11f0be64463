"""Layout: what it answers, what it refuses, and that it survives a round trip."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_lw.layout import Bucket, Layout, ParamSpec, Placement, plan
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
        pytest.param([W], {"cost": "guess"}, "unknown cost model 'guess'", id="cost"),
    ],
)
def test_bad_input(policy: Any, params: list[ParamSpec], arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(params, policy=policy, **{"dp_size": 2, **arguments})


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
    ],
)
def test_from_json_refuses(damage: Any) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(damage(two_buckets().to_json()))
