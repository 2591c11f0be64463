"""What "balanced" promises, the facts it must reproduce, its speed, and that every process plans the same."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fused_lw.layout import CostTable, Layout, ParamSpec, load_model, model_specs, ns_cost, plan
from tests.layout.reference import check_adjacent, check_balanced
from tests.layout.test_megatron import CASES, specs_of

SHAPES = st.one_of(
    st.tuples(st.integers(1, 300), st.sampled_from([16, 64, 100])),
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([8, 64])),
)


@st.composite
def params_of(draw: st.DrawFn) -> list[ParamSpec]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    picks = draw(
        st.lists(st.tuples(st.sampled_from(shapes), st.sampled_from([1, 1, 4]), st.integers(0, 30)), max_size=40)
    )
    return [
        ParamSpec(f"p{i}", shape, gtp if len(shape) == 2 else 1, shared_embedding=n == 0)
        for i, (shape, gtp, n) in enumerate(picks)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    params=params_of(),
    dp_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    bucket_size=st.sampled_from([None, 1, 700, 5000, 40000]),
    slack=st.sampled_from([0.0, 0.3]),
    wide=st.sampled_from([False, False, False, True]),
)
def test_promises(params: list[ParamSpec], dp_size: int, bucket_size: int | None, slack: float, wide: bool) -> None:
    check_balanced(params, dp_size=dp_size, bucket_size=bucket_size, numel_slack=slack, high_nccl_busbw=wide)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_promises_on_published_cases(case: dict[str, object]) -> None:
    check_balanced(
        specs_of(case),
        dp_size=case["dp_size"],
        bucket_size=case["bucket_size"],
        high_nccl_busbw=case.get("high_nccl_busbw", False),
    )


@pytest.mark.parametrize("cost", ["flops", "table"])
@pytest.mark.parametrize("model", ["llama3-8b", "nemotron-3-nano"])
def test_promises_hold_for_every_cost(model: str, cost: str) -> None:
    params = model_specs(model, kinds=("dense",))
    shapes = {spec.oriented for spec in params}
    # Seconds that favour batches: one matrix takes five times its share of eight.
    seconds = {shape: {b: shape[0] ** 2 * shape[1] * 1e-14 * (4 + b) for b in (1, 8)} for shape in shapes}
    model_of_cost = CostTable(seconds) if cost == "table" else "flops"
    numel = sum(spec.numel for spec in params)
    for dp_size, bucket_size in itertools.product((4, 16), (None, numel // 6)):
        check_balanced(params, dp_size=dp_size, bucket_size=bucket_size, cost=model_of_cost)


def test_planning_on_measured_time_gathers_shapes() -> None:
    # A batch of any size up to 8 takes the time of one: the best plan has one shape a rank.
    table = CostTable({(64, 64): {1: 1e-3, 8: 1e-3}, (32, 128): {1: 1e-3, 8: 1e-3}})
    params = [ParamSpec(f"p{i}", (64, 64) if i % 4 < 2 else (32, 128)) for i in range(16)]
    layout = plan(params, dp_size=2, cost=table)
    assert layout.shard_costs == (1_000_000, 1_000_000)
    assert layout.launches == 1
    assert max(plan(params, dp_size=2, policy="megatron", cost=table).shard_costs) == 2_000_000


def test_numel_order_3_77_and_cost_order_1_33() -> None:
    params = specs_of(CASES[0])
    assert plan(params, dp_size=4, policy="numel").imbalance == pytest.approx(3.77, abs=0.0051)
    assert plan(params, dp_size=4, policy="megatron").imbalance == pytest.approx(1.33, abs=0.005)
    assert plan(params, dp_size=4).imbalance <= 1.34


def test_160_slots_become_128() -> None:
    params = model_specs("experts-128")
    slot = params[0].numel
    arguments = {"dp_size": 32, "bucket_size": 100 * slot}
    assert plan(params, policy="numel", **arguments).buffer_numel == 160 * slot
    for policy in ("megatron", "balanced"):
        layout = plan(params, policy=policy, **arguments)
        assert (layout.buffer_numel, len(layout.buckets), layout.padding) == (128 * slot, 1, 0.0)


def test_1408_becomes_1280() -> None:
    params = [ParamSpec(f"p{i}", (n,)) for i, n in enumerate(reversed([192, 192, 256, 128, 128, 192]))]
    assert plan(params, dp_size=2, bucket_size=448, policy="megatron").buffer_numel == 1408
    assert plan(params, dp_size=2, bucket_size=448).buffer_numel <= 1280


@pytest.mark.parametrize("policy", ["megatron", "balanced"])
def test_gtp_matrices_lie_on_different_shards(policy: str) -> None:
    params = specs_of(CASES[1])
    layout = plan(params, dp_size=4, bucket_size=65536, policy=policy)
    assert [spec.gtp_size for spec in params].count(64) == 4
    shards = [layout.placements[spec.name].shard for spec in params if spec.gtp_size == 64]
    assert sorted(shards) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["megatron", "numel", "balanced"])
def test_an_oversized_parameter_is_placed(policy: str) -> None:
    params = [ParamSpec("small", (4, 16)), ParamSpec("huge", (4096, 64)), ParamSpec("other", (4, 16))]
    layout = plan(params, dp_size=2, policy=policy)
    layout.validate()
    assert layout.placements["huge"].end - layout.placements["huge"].start == 4096 * 64


def test_layouts_of_models() -> None:
    # A first trial that packed for height alone had 0.7% and 1.6% here; Megatron's layouts have 28.0% and 41.2%.
    for model, dp_size, least in (("nemotron-3-super", 8, 0.279), ("ultra-half", 16, 0.411)):
        params = model_specs(model, ep=8, kinds=("dense",))
        ours, theirs = check_balanced(params, dp_size=dp_size, bucket_size=sum(p.numel for p in params) // 16)
        assert theirs.padding > least
        assert ours.padding < 0.02
        assert ours.imbalance < 1.02


def test_transposed_shapes_are_kept_apart_where_it_is_free() -> None:
    # Gate and up (8 x 32) and down (32 x 8) cost the same: each rank can have one of the two shapes.
    params = [ParamSpec(f"p{i}", (8, 32) if i % 3 else (32, 8)) for i in range(48)]
    layout = plan(params, dp_size=12)
    assert [len(layout.groups(rank)) for rank in range(12)].count(1) >= 11
    assert layout.padding == 0


def random_model(count: int, distinct: int) -> list[ParamSpec]:
    rng = random.Random(0)
    shapes = [(rng.randrange(128, 8192, 64), rng.randrange(128, 8192)) for _ in range(distinct)]
    return [ParamSpec(f"p{i}", rng.choice(shapes)) for i in range(count)]


def cpu_seconds(params: list[ParamSpec], **arguments: object) -> tuple[float, Layout]:
    """Of the faster of two runs: other processes on the machine slow one down."""
    seconds = []
    for _ in range(2):
        start = time.process_time()
        layout = plan(params, **arguments)
        seconds.append(time.process_time() - start)
    return min(seconds), layout


@pytest.mark.parametrize("divisor", [None, 16, 6])
def test_seventy_thousand_matrices_in_seconds(divisor: int | None) -> None:
    params = model_specs("kimi-k2")
    assert len(params) == 69668
    bucket_size = None if divisor is None else sum(p.numel for p in params) // divisor
    seconds, layout = cpu_seconds(params, dp_size=1024, bucket_size=bucket_size)
    assert seconds < 20
    check_adjacent(layout)
    assert layout.padding < 0.04
    assert max(layout.shard_costs) < 1.03 * layout.lower_bound


@pytest.mark.parametrize("distinct", [12, 5000], ids=["few-shapes", "all-different"])
@pytest.mark.parametrize("divisor", [None, 16, 6])
def test_a_thousand_matrices_in_a_second(divisor: int | None, distinct: int) -> None:
    params = random_model(1000, distinct)
    bucket_size = None if divisor is None else sum(p.numel for p in params) // divisor
    seconds, _ = cpu_seconds(params, dp_size=64, bucket_size=bucket_size)
    assert seconds < 1


@pytest.mark.parametrize("bucket_size", [None, 1])
def test_few_parameters_on_many_ranks_in_a_second(bucket_size: int | None) -> None:
    params = [ParamSpec(f"p{i}", (64, 64 * i)) for i in range(1, 4)]
    seconds, layout = cpu_seconds(params, dp_size=10**5, bucket_size=bucket_size)
    assert seconds < 1
    layout.validate()
    assert max(layout.shard_costs) == layout.lower_bound


def test_another_process_with_another_hash_seed_plans_the_same() -> None:
    code = (
        "from fused_lw.layout import model_specs, plan\n"
        "params = model_specs('nemotron-3-nano', ep=16)\n"
        "print(plan(params, dp_size=32, bucket_size=168526848).digest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    params = model_specs("nemotron-3-nano", ep=16)
    assert digests == {plan(params, dp_size=32, bucket_size=168526848).digest() + "\n"}


def test_models() -> None:
    for name, count in (("gpt2-124m", 48), ("deepseek-v3", 45090), ("kimi-k2", 69668)):
        matrices = load_model(name)
        assert len(matrices) == len({matrix.name for matrix in matrices}) == count
    local = Counter(matrix.kind for matrix in load_model("deepseek-v3", ep=8))
    assert local == {"dense": 546, "expert": 58 * 3 * 256 // 8}
    assert [tuple(matrix[1:]) for matrix in load_model("gpt2-124m")[:4]] == [
        (2304, 768, "dense"),
        (768, 768, "dense"),
        (3072, 768, "dense"),
        (768, 3072, "dense"),
    ]
    sharded = model_specs("gpt2-124m", gtp=100)[0]
    assert (sharded.shape, sharded.pad_rows, sharded.full_shape) == ((24, 768), 96, (2304, 768))
    assert ns_cost(sharded) == 2304 * 768**2


def test_models_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt5', expected one of: gpt2-124m, .*kimi-k2"):
        load_model("gpt5")
    with pytest.raises(ValueError, match="ep 7 does not divide its 128 experts"):
        load_model("qwen3-30b-a3b", ep=7)
