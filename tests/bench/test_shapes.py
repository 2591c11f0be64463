"""Which batches the benchmarks measure."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from fused_lw.bench import shapes
from fused_lw.bench.shapes import Batch
from fused_lw.layout import load_model, model_specs, plan


def test_a_list_is_oriented_and_merged():
    assert shapes.parse("2688x1856*4, 64x64,1856X2688") == [Batch(1, 64, 64), Batch(5, 1856, 2688)]


@pytest.mark.parametrize("text", ["", "64", "64x", "64x64*", "axb", "0x4", "4x4*0", "64x64,,", "-3x4"])
def test_a_malformed_list_is_an_error_that_shows_the_form(text):
    with pytest.raises(ValueError, match=r"2688x1856\*4|at least 1"):
        shapes.parse(text)


def test_one_rank_has_a_model_s_counts():
    counts = Counter((min(m.rows, m.cols), max(m.rows, m.cols)) for m in load_model("gpt2-124m"))
    assert shapes.of_model("gpt2-124m") == [Batch(n, *shape) for shape, n in sorted(counts.items())]


def test_of_several_ranks_it_is_the_most_loaded_one_with_its_experts():
    batches = shapes.of_model("moonlight-16b", dp=16, ep=8)
    dense = plan(model_specs("moonlight-16b", ep=8, kinds=("dense",)), dp_size=16)
    expert = plan(model_specs("moonlight-16b", ep=8, kinds=("expert",)), dp_size=2)
    cost = max(dense.shard_costs[rank] + expert.shard_costs[rank // 8] for rank in range(16))
    assert sum(b.size * b.s * b.r**2 for b in batches) == cost
    # 4,992 experts over 8 groups of 2 ranks
    assert next(b.size for b in batches if (b.r, b.s) == (1408, 2048)) == 4992 // 16


def test_scaling_down_merges_shapes_and_bounds_batches():
    assert shapes.cut([Batch(3, 64, 96), Batch(4, 65, 97)], 32, 5) == [Batch(5, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4x4", "--dp", "2"], "need --model"),
        (["--model", "no-such-model"], "gpt2-124m"),
        (["--model", "moonlight-16b", "--dp", "4", "--ep", "3"], "3"),
        (["--sweep", "--scale-down", "0"], "--scale-down"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(arguments, message):
    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        shapes.from_arguments(parser.parse_args(arguments))
