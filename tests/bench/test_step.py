"""`fused-lw bench step`, `pack` and `layout`: gates, rows, commands."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fused_lw.bench import pack, roofline, step, step_peers
from fused_lw.bench.shapes import Batch
from fused_lw.cli import main
from fused_lw.muon import Muon

CPU = torch.device("cpu")
SHAPES = [(24, 16), (16, 24), (16, 16), (24, 16)]
BY_NAME = {provider.name: provider for provider in step_peers.step_providers(CPU)}
PEAK = roofline.Peak("a machine", 1e11, 1e10, "for the test")


def test_every_optimizer_moves_as_float64_does():
    providers = [p for p in BY_NAME.values() if "compiled" not in p.name]
    rows = step.measure(SHAPES, providers, CPU, 2)
    assert {row["provider"]: row["status"] for row in rows} == {p.name: "measured" for p in providers}
    assert all((row["error"] < 1e-4) == (row["accuracy"] == "float32") for row in rows)
    best = {row["provider"]: row.get("best_peer") for row in rows}
    assert best["fused_lw"] in ("float32 loop", "torch batched")
    assert best["fused_lw bf16"] in ("torch.optim.Muon", "torch batched bf16")


@pytest.mark.parametrize(
    "options", [{"weight_decay": 0.0}, {"nesterov": False}, {"momentum": 0.9}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_an_optimizer_with_another_rule_gets_no_time(options):
    def make(params, lr):
        return Muon(params, lr=lr, **options)

    (row,) = step.measure(SHAPES, [replace(BY_NAME["fused_lw"], make=make)], CPU, 2)
    assert row["status"] == "wrong"
    assert "p50_ms" not in row


def test_launches_do_not_grow_with_the_matrices_of_a_shape():
    assert step.gpu_launches([(768, 768)] * 40) == step.gpu_launches([(768, 768)])
    assert step.gpu_launches([(768, 768), (3072, 768), (2304, 768)]) < 3 * step.gpu_launches([(768, 3072)])


def test_the_step_command_compares_whole_steps(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--scale-down", "48", "--json", str(file), "--providers"]
    names = ["fused_lw", "fused_lw bf16", "float32 loop", "torch batched", "torch.optim.Muon"]
    assert main(["bench", "step", *arguments, *names]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["provider"] for row in rows} == set(names)
    printed = capsys.readouterr().out
    assert "Triton launches" in printed
    assert "float32 class: fused_lw takes" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], "qwen3-8b"),
        (["--first", "0"], "--first"),
        (["--device", "cuda:63"], "--device cpu"),
        (["--providers", "nobody"], "torch.optim.Muon"),
    ],
)
def test_bad_step_arguments_say_what_to_do(arguments, message, capsys):
    assert main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pack_measures_both_stages_of_everyone():
    rows = pack.measure(Batch(3, 20, 33), pack.PROVIDERS, CPU, 3, PEAK)
    assert {(row["stage"], row["provider"]) for row in rows if row["status"] == "measured"} == {
        (stage, name) for stage in ("copy-in", "copy-out") for name in pack.PROVIDERS
    }
    row = next(row for row in rows if row["stage"] == "copy-in")
    # float32 throughout: gradient read, momentum read and written, workspace written
    assert row["copy_gb_per_s"] == pytest.approx(3 * 20 * 33 * 16 / row["p50_ms"] / 1e6)


@pytest.mark.parametrize("what", ["momenta", "workspace", "sq_norm", "params"])
def test_pack_catches_whoever_leaves_other_numbers(what):
    def provider(buffers):
        copy_in, copy_out = pack.PROVIDERS["torch loop"](buffers)

        def wrong(call):
            call()
            found = getattr(buffers, what)
            (found[1] if isinstance(found, list) else found[1:]).mul_(1.001)

        return lambda: wrong(copy_in), lambda: wrong(copy_out)

    rows = pack.measure(Batch(2, 8, 12), {"wrong": provider}, CPU, 1, PEAK)
    broken = "copy-out" if what == "params" else "copy-in"
    assert "wrong" in [row["status"] for row in rows if row["stage"] == broken]


def test_pack_and_layout_commands_write_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert main(["bench", "pack", "--shapes", "16x24*2", "--rounds", "2", "--json", str(file)]) == 0
    assert main(["bench", "layout", "--model", "gpt2-124m", "--dp", "4", "--rounds", "2", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    policies = {row["provider"]: row["imbalance"] for row in rows if row["benchmark"] == "layout"}
    assert policies["balanced"] <= policies["megatron"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ns", "--shapes", "8x8", "--rounds", "0"],
        ["step", "--rounds", "-1"],
        ["step", "--threads", "0"],
        ["pack", "--shapes", "8x8", "--rounds", "0"],
        ["layout", "--model", "gpt2-124m", "--rounds", "0"],
        ["layout", "--model", "gpt2-124m", "--dp", "0"],
        ["layout", "--model", "gpt2-124m", "--bucket-size", "many"],
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    assert arguments[-2] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["ns", "--shapes", "8x8"], ["step"], ["pack", "--shapes", "8x8"], ["layout", "--model", "gpt2-124m"]]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("fused_lw.bench.timing.interleave", None)
    assert main(["bench", *arguments, "--json", str(tmp_path / "nowhere" / "rows.jsonl")]) == 2
    assert "--json" in capsys.readouterr().err
