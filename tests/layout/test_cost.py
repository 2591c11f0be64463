"""Costs: Megatron's proxy, operations of the algorithm that runs, measured tables."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fused_lw.kernels import NSRule, schedule
from fused_lw.kernels.work import work
from fused_lw.layout import CostTable, Layout, ParamSpec, ns_cost, ns_flops, plan


def test_megatron_costs() -> None:
    assert ns_cost(ParamSpec("w", (64, 256))) == 256 * 64**2
    assert ns_cost(ParamSpec("w", (256, 64))) == 256 * 64**2
    assert ns_cost(ParamSpec("w", (64, 256), gtp_size=64)) == 4096 * 256**2
    assert ns_cost(ParamSpec("w", (64, 256), gtp_size=64, pad_rows=96)) == 4000 * 256**2
    assert ns_cost(ParamSpec("w", (7,))) == 7
    assert ns_cost(ParamSpec("w", (3, 5, 7))) == 3 * 5 * 7


@pytest.mark.parametrize(("ratio", "cubes"), [(1, 20), (2, 29), (4, 47), (8, 83)])
def test_operations_in_cubes(ratio: int, cubes: int) -> None:
    # The cheaper of symmetric standard (20, 35, 65, 125) and Gram with two restarts (20, 29, 47, 83).
    assert ns_flops(64, 64 * ratio) == cubes * 64**3


@pytest.mark.parametrize(("r", "s"), [(96, 96), (96, 192), (128, 1000), (256, 2048)])
def test_operations_are_those_of_the_program_that_runs(r: int, s: int) -> None:
    rule = NSRule(schedule("jordan", 5), precision="mixed")
    assert work([(1, r, s)], rule).useful_flops == ns_flops(r, s)


def test_operations_of_other_parameters() -> None:
    assert ns_cost(ParamSpec("w", (3, 32, 64)), "flops") == 3 * ns_flops(32, 64)
    assert ns_cost(ParamSpec("w", (64, 4, 3, 3)), "flops") == ns_flops(36, 64)
    assert ns_cost(ParamSpec("w", (64,)), "flops") == 64


@pytest.mark.parametrize(("r", "s"), [(64, 64), (256, 320), (256, 512), (512, 7168), (2048, 7168), (4096, 4096)])
def test_the_kernels_choose_the_algorithm_that_is_counted(r: int, s: int) -> None:
    standard = 5 * (3 * r * r * s + r**3)
    chosen = NSRule(schedule("jordan", 5), precision="mixed").resolve_algorithm(r, s, "triton")
    assert (ns_flops(r, s) < standard) == (chosen == "gram")


def table() -> CostTable:
    return CostTable({(4, 8): {2: 10e-9, 4: 14e-9, 8: 12e-9}})


@pytest.mark.parametrize(
    ("batch", "nanoseconds"),
    [
        pytest.param(0, 0, id="empty"),
        pytest.param(1, 10, id="below-the-smallest-no-faster"),
        pytest.param(3, 12, id="between"),
        pytest.param(9, 16, id="rounded-up"),
        pytest.param(4, 14, id="measured"),
        pytest.param(6, 14, id="noise-is-raised"),
        pytest.param(8, 14, id="largest"),
        pytest.param(24, 42, id="beyond-in-proportion"),
    ],
)
def test_interpolation(batch: int, nanoseconds: int) -> None:
    assert table().nanoseconds((4, 8), batch) == nanoseconds


def test_costs_of_a_table() -> None:
    assert ns_cost(ParamSpec("w", (8, 4)), table()) == 10
    assert ns_cost(ParamSpec("w", (4, 8, 4)), table()) == 14
    assert ns_cost(ParamSpec("b", (8,)), table()) == 0
    text = json.dumps({"gpu": "any", "rows": [{"shape": [8, 4], "batch": 2, "seconds": 5e-9}]})
    assert CostTable.from_json(text).nanoseconds((4, 8), 4) == 10


def row(**changes: object) -> str:
    return json.dumps({"rows": [{"shape": [4, 8], "batch": 1, "seconds": 1e-3, **changes}]})


def test_numbers_of_numpy_become_pythons() -> None:
    of_numpy = CostTable({(np.int64(4), np.int64(8)): {np.int64(2): np.float64(10e-9)}})
    layout = plan([ParamSpec(f"w{i}", (4, 8)) for i in range(3)], dp_size=1, cost=of_numpy)
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.shard_costs == (15,)


def test_no_plan_costs_less_than_the_bound_of_a_table() -> None:
    # 35/3 ns of five matrices of each shape: rounded down twice on each of two ranks, less than half of all ten's.
    uneven = CostTable({(4, 4): {1: 3e-9, 3: 7e-9}, (4, 8): {1: 3e-9, 3: 7e-9}})
    for count in range(1, 24):
        params = [ParamSpec(f"w{i}", (4, 4 + 4 * (i // 2 % 2))) for i in range(count)]
        for dp_size in (1, 2, 3):
            plan(params, dp_size=dp_size, policy="megatron", cost=uneven).validate()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: CostTable({(8, 4): {1: 1.0}}), "8x4", id="not-oriented"),
        pytest.param(lambda: CostTable({(4, 8): {}}), "4x8", id="nothing-measured"),
        pytest.param(lambda: CostTable({(4, 8): {1: float("nan")}}), "nan s for shape 4x8", id="nan"),
        pytest.param(lambda: CostTable({(4, 8): {1: math.inf}}), "inf s for shape 4x8", id="infinite"),
        pytest.param(lambda: CostTable({(4, 8): {0: 1.0}}), "batch 0", id="batch-0"),
        pytest.param(lambda: CostTable.from_json(row(shape="48")), "side of a shape must be an integer", id="string"),
        pytest.param(lambda: CostTable.from_json(row(shape=[4.5, 8])), "must be an integer, got 4.5", id="float-side"),
        pytest.param(lambda: CostTable.from_json(row(batch=True)), "batch must be an integer, got True", id="bool"),
        pytest.param(lambda: CostTable.from_json('{"rows": [{"shape": [1, 2]}]}', "t.json"), "t.json", id="no-batch"),
        pytest.param(lambda: CostTable.from_json("[]", "t.json"), "t.json", id="list"),
        pytest.param(lambda: table().nanoseconds((4, 9), 1), "no measurement of shape 4x9", id="not-measured"),
        pytest.param(lambda: ns_cost(ParamSpec("w", (4, 4)), "time"), "unknown cost model 'time'", id="unknown"),  # type: ignore[arg-type]
    ],
)
def test_bad_costs(make: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()  # type: ignore[operator]
