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
    models = {
        "GPT-2 124M": ("gpt2-124m", 1),
        "GPT-2 124M, dimensions / 8": ("gpt2-124m", 8),
        "Qwen3 8B, dimensions / 8": ("qwen3-8b", 8),
    }
    for name, key in models.items():
        found = [steps[(*key, dtype)] for dtype in ("fp32", "bf16")]
        quoted = (f"{row['ratio_to_best_peer']:.2f} of {row['best_peer']}" for row in found)
        assert f"| {name} | {' | '.join(quoted)} |" in README
    shapes = [row["ratio_to_best_peer"] for row in ours if row["benchmark"] == "ns"]
    assert f"takes at most {max(shapes):.2f} of the time of its best peer" in README


def test_readme_quotes_the_cpu_without_bf16_units(rows):
    milliseconds = {row["provider"]: row["p50_ms"] for row in rows if row.get("bf16_units") is False}
    assert f"{milliseconds['torch.optim.Muon'] / milliseconds['fused_lw']:.0f} times as long" in README


def test_the_tables_are_those_of_the_rows(rows):
    assert (RESULTS / "cpu.md").read_text(encoding="utf-8") == report.markdown(rows)
