"""The demo: what it writes, and that its verdict can be a failure."""

from __future__ import annotations

import csv

import pytest
import torch

from fused_lw import demo
from fused_lw.cli import main
from fused_lw.muon import Muon


def run_demo(folder, *arguments: str) -> int:
    return main(["demo", "--compare-seconds", "0", "--train-seconds", "0", "--out", str(folder), *arguments])


def test_demo_compares_trains_and_writes(tmp_path, capsys):
    assert run_demo(tmp_path) == 0
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(len(rows))]
    first, last = float(rows[0]["validation_loss"]), float(rows[-1]["validation_loss"])
    assert last < demo.FALL * first
    assert float(rows[1]["torch_loss"]) == pytest.approx(float(rows[1]["fused_lw_loss"]), abs=1e-5)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "agree within rounding" in printed
    assert "ratio of optimizer-step times" in printed


def test_demo_fails_when_the_optimizers_disagree(tmp_path, monkeypatch, capsys):
    def another_rule(params, *, lr, **options):
        return Muon(params, lr=1.05 * lr, **options)

    monkeypatch.setattr(demo, "Muon", another_rule)
    assert run_demo(tmp_path) == 1
    assert "disagree beyond rounding" in capsys.readouterr().out


def test_demo_fails_when_the_loss_does_not_fall(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "MUON_OPTIONS", {"lr": 1e-9})
    monkeypatch.setattr(demo, "ADAMW_OPTIONS", {"lr": 1e-9})
    monkeypatch.setattr(demo.Comparison, "outcome", lambda self: _agreeing(self))
    assert run_demo(tmp_path) == 1
    assert "did not fall" in capsys.readouterr().out


def _agreeing(comparison: demo.Comparison) -> demo.Outcome:
    losses = [run.losses[: comparison.steps] for run in comparison.runs]
    return demo.Outcome(losses, [1.0] * 3, 1.0, 0.0, 0.0, [0.0, 0.0], agree=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "foo"], "device 'foo' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--device", f"cuda:{torch.cuda.device_count() + 7}"], "cannot be used"),
        (["--out", "{tmp_path}/file"], "file"),
        (["--out", "{tmp_path}/file/below"], "file/below"),
        (["--out", "{tmp_path}/taken"], "loss.csv"),
    ],
    ids=["no device", "no values", "no such GPU", "a file", "below a file", "name taken by a folder"],
)
def test_demo_refuses_before_it_trains(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "loss.csv").mkdir(parents=True)
    monkeypatch.setattr(demo, "Comparison", None)
    assert run_demo(tmp_path / "out", *(text.format(tmp_path=tmp_path) for text in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fused-lw demo: ")
    assert message in printed.err


def test_model_has_the_size_it_says():
    size = sum(param.numel() for param in demo.ByteGPT().parameters())
    assert 1e6 < size < 5e6
    text = demo.Text.read(torch.device("cpu"))
    assert len(text.train) > 5 * len(text.validation) > 500_000
    assert next(text.batches(0)).shape == (demo.BATCH, demo.CONTEXT + 1)
    assert torch.equal(next(text.batches(0)), next(text.batches(0)))
