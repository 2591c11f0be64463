from itertools import chain

import pytest

from fused_lw.kernels import NSRule, schedule, work
from fused_lw.kernels.configs import KINDS, SHIPPED, family, is_valid, load_tuned, save_tuned
from fused_lw.kernels.merge import merge
from fused_lw.kernels.newton_schulz import meta_program
from fused_lw.layout import load_model, model_names, model_specs, plan

MIXED = NSRule(schedule("jordan", 5), precision="mixed")


def rule(algorithm: str) -> NSRule:
    return NSRule(schedule("jordan", 5), precision="mixed", algorithm=algorithm)


def test_flops_are_those_of_the_formulas():
    r, s = 256, 1024
    standard = work([(3, r, s)], rule("standard"))
    assert standard.useful_flops == 3 * (15 * r * r * s + 5 * r**3)
    assert standard.launches == 15
    gram = work([(3, r, s)], rule("gram"))
    assert gram.useful_flops == 3 * (9 * r * r * s + 11 * r**3)
    # 2 x 2 tiles of 128, of which symmetric products compute 3, and nothing at the edges.
    lower, whole = 3 * 2 * 128 * 128, 2 * r * r
    assert gram.executed_flops == 3 * (3 * lower * s + 11 * lower * r + 3 * whole * s)
    small = work([(7, 32, 500), (1, 64, 64)], MIXED)
    assert small.launches == 1
    assert small.nbytes == (7 * 32 * 500 + 64 * 64) * 2 * 3


def published_shapes() -> list[tuple[int, int]]:
    models = chain.from_iterable(load_model(name) for name in model_names())
    return sorted({tuple(sorted((m.rows, m.cols))) for m in models})


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("algorithm", ["auto", "standard", "gram"])
def test_little_is_executed_beyond_what_is_useful(arch, algorithm):
    too_much = {}
    for r, s in published_shapes():
        if r >= 512:
            counted = work([(1, r, s)], rule(algorithm), arch)
            ratio = counted.executed_flops / counted.useful_flops
            if ratio > (1.2 if r >= 1024 else 1.4):
                too_much[r, s] = round(ratio, 3)
    assert not too_much


def test_a_rank_of_nemotron_3_nano_runs_in_twenty_launches():
    dp, ep = 32, 16
    dense = plan(model_specs("nemotron-3-nano", kinds=("dense",)), dp_size=dp)
    experts = plan(model_specs("nemotron-3-nano", ep=ep, kinds=("expert",)), dp_size=dp // ep)
    for rank in range(dp):
        batches: dict[tuple[int, int], int] = {}
        for group in (*dense.groups(rank), *experts.groups(rank // ep)):
            r, s = sorted(group.shape)
            batches[r, s] = batches.get((r, s), 0) + len(group.names)
        assert work([(b, r, s) for (r, s), b in batches.items()], MIXED).launches <= 20


def test_launches_keep_the_order_of_every_program():
    programs = [
        meta_program((1, 100, 300), rule("gram"), "triton")[0],
        meta_program((2, 100, 100), rule("standard"), "triton")[0],
        meta_program((2, 120, 120), rule("standard"), "triton")[0],
    ]
    launched = [product for _, products in merge(programs) for product in products]
    for program in programs:
        own = [product for stage in program for product in stage]
        assert [id(p) for p in launched if any(p is q for q in own)] == [id(p) for p in own]
    assert len(launched) == sum(len(stage) for program in programs for stage in program)


@pytest.mark.parametrize("arch", list(SHIPPED))
def test_shipped_configurations_are_valid(arch):
    for (kind, itemsize), config in SHIPPED[arch].items():
        assert kind in KINDS
        assert is_valid(config, arch, kind, itemsize)


def test_architectures_in_between_run_the_older_ones_configurations():
    assert family("sm_89") == "sm_80"
    assert family("sm_121") == "sm_120"
    for unknown in ("sm_70", "gfx1100"):
        with pytest.raises(ValueError, match=unknown):
            family(unknown)


def test_tuned_tables_are_read_back_and_checked(tmp_path):
    path = tmp_path / "configs.json"
    table = {("general", 2): SHIPPED["sm_90"]["general", 2]}
    save_tuned(path, table, {"gpu": "none"})
    assert load_tuned(path, "sm_90") == table
    with pytest.raises(ValueError, match="not valid on sm_80"):
        load_tuned(path, "sm_80")
