"""`fused-lw bench report`: tables, Markdown, pictures, and the regression check."""

from __future__ import annotations

import json
import random

import pytest

from fused_lw.bench import environment, regression, report
from fused_lw.cli import main

MACHINE = {
    "device": "a CPU",
    "device_type": "cpu",
    "threads": 2,
    "bf16_units": True,
    "torch": "2.13.0",
    "revision": "abc1234",
    "date": "2026-01-01",
}
PROVIDERS = {"fused_lw": "float32", "torch loop": "float32", "torch.optim.Muon": "half"}


def row(provider, shape, p50, spread=0.03, **more):
    return {
        **MACHINE,
        "benchmark": "ns",
        "provider": provider,
        "shape": list(shape),
        "batch": 4,
        "dtype": "fp32",
        "accuracy": PROVIDERS[provider],
        "algorithm": "standard",
        "mode": "eager",
        "status": "measured",
        "error": 1e-6,
        "p20_ms": p50 * (1 - spread),
        "p50_ms": p50,
        "p80_ms": p50 * (1 + spread),
        "tflops_executed": 0.1,
        "roofline_fraction": 0.5 if PROVIDERS[provider] == "float32" else None,
        **more,
    }


ROWS = [
    row(provider, shape, 10.0 + n + sum(shape) / 100)
    for n, provider in enumerate(PROVIDERS)
    for shape in ((64, 64), (768, 3072))
]


def scaled(rows, factor, noise=0.0):
    draw = random.Random(0)
    factors = [factor * (1 + draw.uniform(-noise, noise)) for _ in rows]
    times = ("p20_ms", "p50_ms", "p80_ms")
    return [{**r, **{name: r[name] * f for name in times}} for r, f in zip(rows, factors, strict=True)]


def write(path, rows):
    environment.append(path, rows)
    return str(path)


def verdicts(new):
    return [change.verdict for change in regression.compare(ROWS, new)]


def test_twenty_percent_slower_is_flagged_and_a_rerun_is_not():
    assert verdicts(scaled(ROWS, 1.2)) == ["slower"] * len(ROWS)
    assert verdicts(scaled(ROWS, 1.0, noise=0.04)) == ["same"] * len(ROWS)
    assert verdicts(scaled(ROWS, 1 / 1.2)) == ["faster"] * len(ROWS)


def test_a_difference_within_the_noise_of_either_run_is_none():
    noisy = [row("fused_lw", (64, 64), 10.0, spread=0.25)]
    slower = [row("fused_lw", (64, 64), 12.0, spread=0.02)]
    assert [c.verdict for c in regression.compare(noisy, slower)] == ["same"]
    assert [c.verdict for c in regression.compare(slower, noisy)] == ["same"]


def test_rows_are_matched_by_what_was_measured_and_on_what():
    elsewhere = [r | {"device": "another CPU"} for r in ROWS]
    with pytest.raises(ValueError, match="in common"):
        regression.compare(ROWS, elsewhere)
    fewer = [r for r in ROWS if r["provider"] != "fused_lw"]
    assert verdicts(fewer).count("not measured any more") == 2
    # A file that was appended to: the last row counts.
    assert "slower" not in verdicts(scaled(ROWS, 1.5) + ROWS)


def test_the_command_exits_with_1_for_a_slower_file_only(tmp_path, capsys):
    old = write(tmp_path / "old.jsonl", ROWS)
    rerun = write(tmp_path / "rerun.jsonl", scaled(ROWS, 1.0, noise=0.02))
    slower = write(tmp_path / "slower.jsonl", scaled(ROWS, 1.2))
    assert main(["bench", "report", rerun, "--against", old]) == 0
    assert main(["bench", "report", slower, "--against", old]) == 1
    assert "6 slower, 0 faster, 0 same" in capsys.readouterr().out


def test_markdown_has_every_measurement(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert main(["bench", "report", file, "--markdown", str(tmp_path / "out.md")]) == 0
    text = (tmp_path / "out.md").read_text()
    assert text.count("| fused_lw |") == 2
    assert "### ns 64x64*4, half class" in text
    assert "a CPU, 2 threads" in text


def test_pictures_are_drawn_of_what_is_there(tmp_path):
    profile = [
        row("fused_lw", (1, 1), 1.0) | {"benchmark": "profile", "shape": None, "model": "m", "rank": r, "stage": s}
        for r in (0, 1)
        for s in ("copy-in", "newton-schulz", "newton-schulz/symmetric_kernel", "step")
    ]
    step = [row(p, (1, 1), 5.0) | {"benchmark": "step", "shape": None, "model": "gpt2-124m"} for p in PROVIDERS]
    file = write(tmp_path / "rows.jsonl", ROWS + step + profile)
    assert main(["bench", "report", file, "--plots", str(tmp_path / "plots")]) == 0
    drawn = {path.name: path.read_bytes()[:8] for path in (tmp_path / "plots").iterdir()}
    assert drawn == dict.fromkeys(("times.png", "roofline.png", "steps.png", "breakdown.png"), b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no rows"), ("{}\n", "line 1"), ("not json\n", "line 1"), (json.dumps({"provider": "x"}), "benchmark")],
)
def test_a_file_that_is_none_is_an_error_that_says_where(text, message, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(text)
    assert main(["bench", "report", str(tmp_path / "bad.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert main(["bench", "report", str(tmp_path / "absent.jsonl")]) == 2


def test_machines_are_kept_apart():
    other = [r | {"device": "another CPU"} for r in ROWS]
    assert [len(group) for group in report.by_machine(ROWS + other)] == [len(ROWS), len(ROWS)]
