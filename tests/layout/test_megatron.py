"""policy="megatron" against layouts that Megatron-LM computed, and against a second formulation of its rules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fused_lw.layout import ParamSpec, plan
from tests.layout.reference import megatron_again

CASES = json.loads(Path(__file__).with_name("megatron_layouts.json").read_text())["cases"]


def specs_of(case: dict[str, Any]) -> list[ParamSpec]:
    return [
        ParamSpec(
            f"p{i}",
            tuple(param["shape"]),
            # Some stacked experts of the cases have one, which Megatron does not look at.
            gtp_size=param.get("gtp_size", 1) if len(param["shape"]) == 2 else 1,
            shared_embedding=param.get("shared_embedding", False),
        )
        for i, param in enumerate(case["params"])
    ]


def test_there_are_54_cases() -> None:
    assert len(CASES) == 54


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_published_layouts(case: dict[str, Any]) -> None:
    params = specs_of(case)
    layout = plan(
        params,
        dp_size=case["dp_size"],
        bucket_size=case["bucket_size"],
        policy="megatron",
        high_nccl_busbw=case.get("high_nccl_busbw", False),
    )
    layout.validate()
    expected = case["expected"]
    assert [list(layout.placements[spec.name][:3]) for spec in params] == expected["placements"]
    assert [[bucket.start, bucket.end] for bucket in layout.buckets] == expected["buckets"]
    assert [bucket.numel for bucket in layout.buckets] == expected["bucket_numel"]


def random_params(rng: random.Random) -> list[ParamSpec]:
    shapes: list[tuple[int, ...]] = [
        rng.choice(
            [(rng.randint(1, 300), rng.choice([16, 64, 100])), (rng.randint(1, 2000),), (3, rng.randint(1, 9), 8)]
        )
        for _ in range(rng.randint(1, 7))
    ]
    params = []
    for i in range(rng.randint(1, 40)):
        shape = rng.choice(shapes)
        gtp = rng.choice([1, 1, 1, 4, 64]) if len(shape) == 2 else 1
        params.append(ParamSpec(f"p{i}", shape, gtp_size=gtp, shared_embedding=rng.random() < 0.04))
    return params


@pytest.mark.parametrize("seed", range(120))
def test_second_formulation(seed: int) -> None:
    rng = random.Random(seed)
    params = random_params(rng)
    dp_size = rng.choice([1, 2, 3, 4, 6, 8, 16])
    bucket_size = rng.choice([None, 1, 500, 5000, 50000])
    slack = rng.choice([0.0, 0.3, 1.0, 20.0])
    wide = rng.random() < 0.1
    layout = plan(
        params, dp_size=dp_size, bucket_size=bucket_size, policy="megatron", numel_slack=slack, high_nccl_busbw=wide
    )
    placements, buckets = megatron_again(params, dp_size, bucket_size, slack, wide)
    assert {name: tuple(slot) for name, slot in layout.placements.items()} == placements
    assert [tuple(bucket) for bucket in layout.buckets] == buckets
    layout.validate()


@pytest.mark.parametrize("policy", ["megatron", "balanced", "numel"])
@pytest.mark.parametrize("bucket_size", [None, 4096])
def test_a_shared_embedding_is_in_shard_0_whatever_the_slack(policy: Any, bucket_size: int | None) -> None:
    # With this much slack the embedding fits into any shard, and shard 0 has more to do than the others.
    params = [ParamSpec("emb", (64, 64), shared_embedding=True), *(ParamSpec(f"w{i}", (64, 64)) for i in range(4))]
    for dp_size in (2, 3):
        layout = plan(params, dp_size=dp_size, bucket_size=bucket_size, numel_slack=dp_size - 1.0, policy=policy)
        layout.validate()
        assert layout.placements["emb"].shard == 0


def test_costs_beyond_64_bits() -> None:
    # 6.4 * 10**19 a matrix would wrap in 64-bit integers and send everything to one shard.
    huge = [ParamSpec(f"p{i}", (4, 4), gtp_size=10**18) for i in range(8)]
    huge += [ParamSpec(f"q{i}", (3, 5), gtp_size=10**18) for i in range(8)]
    layout = plan(huge, dp_size=4, policy="megatron")
    assert layout.imbalance == pytest.approx(1.0)
    assert plan(huge, dp_size=4).imbalance == pytest.approx(1.0)
