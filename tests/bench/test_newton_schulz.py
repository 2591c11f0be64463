"""`fused-lw bench ns`: the gate, the rows, the comparison within a class, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fused_lw.bench import gate, newton_schulz, peers, tables
from fused_lw.bench.roofline import Peak
from fused_lw.bench.shapes import Batch
from fused_lw.cli import main

CPU = torch.device("cpu")
PEAK = Peak("a machine", 1e11, 1e10, "for the test")
BATCH = Batch(3, 24, 40)
BY_NAME = {provider.name: provider for provider in peers.providers(CPU)}


def broken(**changes):
    """The loop with something wrong in its result."""

    def make(source):
        right = BY_NAME["torch loop"].make(source)
        return lambda: changes["wrong"](right())

    return replace(BY_NAME["torch loop"], name="broken", make=make)


def only_last_wrong(result):
    result[-1] *= 1.01
    return result


def not_a_number(result):
    result[0, 0, 0] = float("nan")
    return result


@pytest.mark.parametrize(
    "wrong",
    [torch.neg, only_last_wrong, not_a_number, lambda x: x.flip(0), lambda x: x.mT, lambda x: x.bfloat16()],
    ids=["sign", "one matrix by 1%", "nan", "order", "transposed", "half precision claimed as float32"],
)
def test_a_wrong_provider_gets_no_time(wrong):
    rows = newton_schulz.measure(BATCH, [broken(wrong=wrong), BY_NAME["torch baddbmm"]], CPU, 2, PEAK)
    by_name = {row["provider"]: row for row in rows}
    assert by_name["broken"]["status"] == "wrong"
    assert "p50_ms" not in by_name["broken"]
    assert by_name["torch baddbmm"]["status"] == "measured"
    assert tables.exit_status(rows) == 1


def test_a_provider_that_writes_its_input_or_raises_is_wrong_with_the_reason():
    def writes(source):
        return lambda: source.mul_(0.5)

    def raises(source):
        raise RuntimeError("no such instruction\nand a traceback")

    providers = [replace(BY_NAME["torch loop"], name=make.__name__, make=make) for make in (writes, raises)]
    rows = newton_schulz.measure(BATCH, providers, CPU, 2, PEAK)
    assert [row["reason"] for row in rows] == ["it changed its input", "RuntimeError: no such instruction"]


@pytest.mark.parametrize("name", [p.name for p in peers.providers(CPU) if not p.unavailable and "comp" not in p.name])
def test_every_provider_passes_the_gate_on_odd_shapes(name):
    source = torch.randn(3, 30, 45)
    _, error, reason = newton_schulz.admit(BY_NAME[name], source)
    assert reason is None
    assert error <= gate.BOUNDS[BY_NAME[name].accuracy]
    # The classes are what they are called: nobody in one could belong to the other.
    assert (error < 1e-4) == (BY_NAME[name].accuracy == "float32")


def test_compiled_providers_pass_the_gate():
    _, error, reason = newton_schulz.admit(BY_NAME["torch compiled"], torch.randn(2, 16, 24))
    assert reason is None
    assert error < 1e-4


def test_rows_say_what_was_measured():
    chosen = [p for p in peers.providers(CPU) if p.name in ("fused_lw", "fused_lw triton", "torch baddbmm", "Dion")]
    rows = {row["provider"]: row for row in newton_schulz.measure(BATCH, chosen, CPU, 3, PEAK)}
    assert rows["fused_lw triton"]["status"] == rows["Dion"]["status"] == "unavailable"
    assert "not installed" in rows["Dion"]["reason"]
    row = rows["torch baddbmm"]
    assert (row["shape"], row["batch"], row["dtype"], row["algorithm"]) == ([24, 40], 3, "fp32", "standard")
    assert row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
    flops = 3 * 5 * (4 * 24**2 * 40 + 2 * 24**3)
    assert row["tflops_executed"] == pytest.approx(flops / row["p50_ms"] / 1e9)
    assert row["roofline_fraction"] == pytest.approx(row["floor_ms"] / row["p50_ms"])
    assert rows["fused_lw"]["best_peer"] == "torch baddbmm"
    assert "ratio_to_best_peer" not in row


def test_ours_is_compared_within_its_accuracy_class_only():
    names = ("fused_lw", "fused_lw bf16", "torch loop", "torch.optim.Muon")
    rows = newton_schulz.measure(BATCH, [BY_NAME[name] for name in names], CPU, 2, PEAK)
    best = {row["provider"]: row.get("best_peer") for row in rows}
    assert best == {
        "fused_lw": "torch loop",
        "fused_lw bf16": "torch.optim.Muon",
        "torch loop": None,
        "torch.optim.Muon": None,
    }
    said = "\n".join(tables.verdicts(rows))
    assert "float32 class: fused_lw takes" in said
    assert "half class: fused_lw bf16 takes" in said


def test_an_algorithm_that_auto_takes_anyway_is_not_measured_twice():
    ours = [p for p in peers.providers(CPU) if p.backend == "torch" and p.dtype == "fp32"]
    algorithms = [p.algorithm(Batch(1, 512, 2048)) for p in newton_schulz.distinct(ours, Batch(1, 512, 2048))]
    assert sorted(algorithms) == ["gram", "standard"]


def test_the_command_measures_and_writes_rows(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    arguments = ["bench", "ns", "--shapes", "40x24*2,8x8", "--quick", "--peak", "measured", "--json", str(file)]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    measured = {row["provider"] for row in rows if row["status"] == "measured"}
    assert {"fused_lw", "torch loop", "torch baddbmm"} <= measured
    for field in ("version", "device", "driver", "date", "revision", "torch"):
        assert all(field in row for row in rows)
    printed = capsys.readouterr().out
    assert "ns 24x40*1" in printed
    assert "Dion: not installed" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "gpt2-124m"),
        (["--shapes", "64by64"], "2688x1856*4"),
        (["--shapes", "8x8", "--device", "cuda:63"], "--device cpu"),
        (["--shapes", "8x8", "--device", "tpu"], "tpu"),
        (["--shapes", "8x8", "--providers", "nobody"], "torch baddbmm"),
        (["--shapes", "8x8", "--peak", "datasheet"], "--peak measured"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, message, capsys):
    assert main(["bench", "ns", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_nothing_measured_is_a_failure():
    assert main(["bench", "ns", "--shapes", "8x8", "--providers", "Dion", "--rounds", "1"]) == 1
