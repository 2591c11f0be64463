"""fused-lw doctor: what it says of this machine and of a model."""

from __future__ import annotations

import sys

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


@pytest.mark.parametrize("present", [True, False])
def test_doctor_knows_what_a_cpu_multiplies_fast(present, capsys, monkeypatch):
    monkeypatch.setattr("fused_lw.doctor.cpu_has_bf16_units", lambda: present)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert ('precision="bf16"' in capsys.readouterr().out) == present


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


FACTORIES = """
import torch
from torch import nn

class Depths(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.up = nn.Linear(4, 8)

def broken():
    raise KeyError("no [config] here")

NUMBER = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "models_of_this_test.py").write_text(FACTORIES)
    (tmp_path / "unfinished_of_this_test.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    yield "models_of_this_test"
    sys.modules.pop("models_of_this_test", None)


def test_doctor_takes_a_model_of_this_folder_that_needs_values(factories, capsys):
    path = list(sys.path)
    assert main(["doctor", "--model", f"{factories}:Depths"]) == 0
    assert "Muon steps 1 parameters" in capsys.readouterr().out
    assert sys.path == path


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("models_of_this_test:broken", "'models_of_this_test:broken' failed: KeyError: 'no [config] here'"),
        ("models_of_this_test:NUMBER", "failed: TypeError: 'int' object is not callable"),
        ("unfinished_of_this_test:f", "cannot be imported: SyntaxError"),
    ],
)
def test_doctor_says_what_a_factory_did(where, message, factories, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--model", where]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "fused_lw.demo"], "expected package.module:factory"),
        (["--model", "fused_lw.demo:NoSuchThing"], "cannot be imported"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--device", f"cuda:{torch.cuda.device_count() + 7}"], "cannot be used"),
    ],
)
def test_doctor_says_what_is_wrong_with_its_arguments(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().out.split())
