"""fused-lw doctor: what it says of this machine and of a model."""

from __future__ import annotations

import pytest
import torch

from fused_lw.cli import main
from fused_lw.doctor import SHAPES, _reason
from fused_lw.kernels import NSRule, schedule


def test_doctor_says_what_each_shape_runs_on_and_why(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "backend torch: Triton" in printed
    for name, (rows, cols) in SHAPES.items():
        (line,) = (line for line in printed.splitlines() if name in line)
        assert f"{min(rows, cols)} x {max(rows, cols)}" in line
        assert "r³ flops" in line


def test_reasons_agree_with_the_algorithm_that_runs():
    rule = NSRule(schedule("jordan", 5), precision="mixed")
    assert _reason(rule, 64, 2048, "triton").startswith("short side up to 64")
    assert _reason(rule, 1024, 4096, "triton").startswith("saves")
    assert "gram would cost" in _reason(rule, 1024, 1024, "triton")


def test_doctor_divides_a_model(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--model", "fused_lw.demo:ByteGPT"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[1]: line for line in printed.splitlines() if "│" in line}
    assert "Muon" in rows["blocks.0.qkv.weight"]
    for name in ("tokens.weight", "head.weight", "norm.weight"):
        assert "AdamW" in rows[name]
    assert "Muon steps 16 parameters with 1.8 M elements" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "fused_lw.demo"], "expected package.module:factory"),
        (["--model", "fused_lw.demo:NoSuchThing"], "cannot be imported"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_doctor_says_what_is_wrong_with_its_arguments(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().out.split())
