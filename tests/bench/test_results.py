"""The committed results, and that the README quotes them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_lw.bench import environment, report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return environment.read([RESULTS / "cpu.jsonl"])


def test_readme_quotes_the_steps_and_the_shapes(rows):
    ours = [row for row in rows if row.get("ratio_to_best_peer") is not None]
    steps = {(row["model"], row["scale_down"], row["dtype"]): row for row in ours if row["benchmark"] == "step"}
    for name, model, scale_down in (("GPT-2 124M", "gpt2-124m", 1), ("Qwen3 8B, dimensions / 8", "qwen3-8b", 8)):
        fp32, bf16 = (steps[model, scale_down, dtype] for dtype in ("fp32", "bf16"))
        assert (fp32["best_peer"], bf16["best_peer"]) == ("float32 loop", "torch.optim.Muon")
        quoted = (
            f"| {name} | {fp32['ratio_to_best_peer']:.2f} of a float32 loop "
            f"| {bf16['ratio_to_best_peer']:.2f} of `torch.optim.Muon` |"
        )
        assert quoted in README
    shapes = [row["ratio_to_best_peer"] for row in ours if row["benchmark"] == "ns"]
    assert f"takes more than {max(shapes):.2f} of its best peer" in README


def test_readme_quotes_the_cpu_without_bf16_units(rows):
    milliseconds = {row["provider"]: row["p50_ms"] for row in rows if row.get("bf16_units") is False}
    assert f"{milliseconds['torch.optim.Muon'] / milliseconds['fused_lw']:.0f} times as fast" in README


def test_the_tables_are_those_of_the_rows(rows):
    assert (RESULTS / "cpu.md").read_text(encoding="utf-8") == report.markdown(rows)
