"""The committed sweep: what it claims holds, and it is what the planner gives today."""

from __future__ import annotations

import csv
import math
from statistics import mean

import pytest

from fused_lw.bench.layouts import HARDWARE, RESULTS, Scenario, simulated_rows, sweep_cases, sweep_row


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with (RESULTS / "layouts.csv").open() as file:
        return list(csv.DictReader(file))


def with_at_least(rows: list[dict[str, str]], per_rank: int) -> list[dict[str, str]]:
    return [row for row in rows if int(row["matrices"]) >= per_rank * int(row["ranks"])]


def padding(rows: list[dict[str, str]], policy: str) -> float:
    return mean(float(row[f"{policy}_padding"]) for row in rows)


def test_every_case_is_there(rows: list[dict[str, str]]) -> None:
    cases = [(model, kind, len(specs), ranks, size) for model, kind, specs, ranks, size in sweep_cases()]
    assert [
        (r["model"], r["buffer"], int(r["matrices"]), int(r["ranks"]), int(r["bucket_size"] or 0)) for r in rows
    ] == [(*case[:4], case[4] or 0) for case in cases]


def test_guarantees_in_every_case(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert int(row["balanced_buffer"]) <= int(row["megatron_buffer"]), row
        assert int(row["balanced_max_cost"]) <= int(row["megatron_max_cost"]), row
        assert int(row["balanced_buckets"]) >= math.ceil(0.6 * int(row["megatron_buckets"])), row


@pytest.mark.parametrize("buffer", ["dense", "any"])
def test_padding(rows: list[dict[str, str]], buffer: str) -> None:
    some = [row for row in rows if buffer == "any" or row["buffer"] == buffer]
    four = with_at_least(some, 4)
    assert len(four) > 150
    assert padding(four, "balanced") <= padding(four, "megatron") / 4
    if buffer == "any":
        assert padding(with_at_least(rows, 8), "balanced") < 0.02
    else:
        # On dense buffers alone, Megatron's 19%: what is left is the price of never exceeding its maximum cost.
        assert padding(with_at_least(some, 8), "balanced") < 0.0225


def test_cost(rows: list[dict[str, str]]) -> None:
    assert mean(float(row["balanced_over_bound"]) for row in with_at_least(rows, 4)) <= 1.05
    within = [float(row["balanced_over_bound"]) <= 1.03 for row in with_at_least(rows, 8)]
    assert mean(within) >= 0.9


def test_launches(rows: list[dict[str, str]]) -> None:
    some = with_at_least(rows, 4)
    ours, theirs = (mean(int(row[f"{policy}_launches"]) for row in some) for policy in ("balanced", "megatron"))
    assert ours <= theirs


def test_the_planner_still_gives_these_rows(rows: list[dict[str, str]]) -> None:
    # Half of the cases of the small models, and one in 31 of all.
    cases = list(zip(sweep_cases(), rows, strict=True))
    small = [pair for pair in cases if len(pair[0][2]) <= 128]
    assert len(small) == 90
    for case, row in [*small[::2], *cases[5::31]]:
        assert {name: str(value) for name, value in sweep_row(*case).items()} == row


def test_simulated_times_follow_the_layout() -> None:
    numel, megatron, balanced = simulated_rows(Scenario("nemotron-3-super", "dense", "GB200", 16, 1, 8, 240_000_000))
    assert [row["policy"] for row in (numel, megatron, balanced)] == ["numel", "megatron", "balanced"]
    for slower in (numel, megatron):
        assert float(balanced["simulated_newton_schulz_ms"]) <= float(slower["simulated_newton_schulz_ms"])
        assert float(balanced["simulated_step_ms"]) < float(slower["simulated_step_ms"])
    assert all("data sheet" in hardware.source for hardware in HARDWARE.values())
