"""Rows as tables for a terminal, and what they say in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fused_lw.bench import gate
from fused_lw.bench.environment import Row

COMPARED = (
    "compared within classes of error against float64 ("
    + ", ".join(f"{name} up to {bound:g}" for name, bound in gate.BOUNDS.items())
    + "), by the median of the ratios within each round:"
)
# Up to this much over the best peer a time counts as equal.
TOLERANCE = 1.05


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A table for each thing measured, then who was left out and why, then ours against the best peers."""
    console.print(about(rows))
    shown = [row for row in ordered(rows) if row["status"] != "unavailable"]
    for _, group in groupby(shown, key=heading):
        console.print(_table(list(group)))
    for reason in dict.fromkeys(f"{r['provider']}: {r['reason']}" for r in rows if r["status"] == "unavailable"):
        console.print(f"not measured: {reason}")
    said = verdicts(rows)
    if said:
        console.print(COMPARED)
    for line in said:
        console.print(f"- {line}")


def about(rows: Sequence[Row]) -> str:
    """The machine of these rows, and the code that was measured."""
    revisions = ", ".join(dict.fromkeys(f"{row['revision']} of {row['date']}" for row in rows))
    return f"{machine(rows[0])}, torch {rows[0]['torch']}, revision {revisions}"


def machine(row: Row) -> str:
    """What a time depends on besides the code."""
    if row["device_type"] == "cuda":
        return f"{row['device']}, driver {row['driver']}"
    units = "with" if row["bf16_units"] else "without"
    return f"{row['device']}, {row['threads']} threads, {units} bf16 units"


def subject(row: Row) -> str:
    """What a row measures: a shape and its batch, or a model's step."""
    mode = "" if row["mode"] == "eager" else f", {row['mode']}"
    what = f"{row['benchmark']} {row['stage']}" if row.get("stage") else row["benchmark"]
    if row.get("shape"):
        return "{} {}x{}*{}{}".format(what, *row["shape"], row["batch"], mode)
    scale = f", dimensions / {row['scale_down']}" if row.get("scale_down", 1) != 1 else ""
    return f"{what} {row['model']}, {row['batch']} matrices{scale}{mode}"


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By what they measure, then accuracy class, then time; those without a time last."""

    def key(row: Row) -> tuple[Any, ...]:
        where = (row["benchmark"], row.get("shape") or [], row["batch"], row.get("stage") or "", row["mode"])
        whose = (str(row.get("model")), row.get("scale_down", 1), row["accuracy"])
        return *where, *whose, row["status"] != "measured", row.get("p50_ms", 0.0)

    return sorted(rows, key=key)


# heading -> (key of the row, how it is written)
_COLUMNS: dict[str, tuple[str, str]] = {
    "algorithm": ("algorithm", "{}"),
    "error": ("error", "{:.0e}"),
    "p20 ms": ("p20_ms", "{:.4g}"),
    "p50 ms": ("p50_ms", "{:.4g}"),
    "p80 ms": ("p80_ms", "{:.4g}"),
    "host ms": ("host_ms", "{:.3g}"),
    "TFLOP/s": ("tflops_executed", "{:.2g}"),
    "GB/s": ("copy_gb_per_s", "{:.3g}"),
    "of roof": ("roofline_fraction", "{:.0%}"),
    "launches": ("triton_launches", "{}"),
    "imbalance": ("imbalance", "{:.3f}"),
    "padding": ("padding", "{:.1%}"),
    "buckets": ("buckets", "{}"),
    "batches": ("batches", "{}"),
}


def heading(row: Row) -> str:
    """Of the table that a row belongs in: what is measured, and the accuracy class."""
    return f"{subject(row)}, {row['accuracy']} class"


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Headings, then a line per row; only the columns that these rows have."""
    columns = {h: c for h, c in _COLUMNS.items() if any(row.get(c[0]) is not None for row in rows)}
    lines = [["provider", *columns]]
    for row in rows:
        written = ["" if row.get(key) is None else form.format(row[key]) for key, form in columns.values()]
        name = row["provider"] if row["status"] == "measured" else f"{row['provider']} (wrong)"
        lines.append([name, *written])
    return lines


def _table(rows: Sequence[Row]) -> Table:
    headings, *lines = cells(rows)
    table = Table(title=heading(rows[0]), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in headings:
        table.add_column(name, justify="left" if name == "provider" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    reasons = [f"{row['provider']} is wrong: {row['reason']}" for row in rows if row["status"] == "wrong"]
    table.caption = "\n".join(reasons) or None
    return table


def verdicts(rows: Iterable[Row]) -> list[str]:
    """What was compared with what, a sentence for each: ours against the best peer of the same accuracy class."""
    said = []
    for row in ordered(rows):
        ratio = row.get("ratio_to_best_peer")
        if ratio is not None:
            word = "faster" if ratio < 1 else "within 5%" if ratio <= TOLERANCE else "SLOWER"
            said.append(
                f"{subject(row)}, {row['accuracy']} class: {row['provider']} takes {ratio:.2f} of the time of "
                f"{row['best_peer']}, its best peer there ({word})"
            )
    return said


def exit_status(rows: Iterable[Row]) -> int:
    """0, or 1 where nothing was measured or somebody is wrong."""
    states = {row["status"] for row in rows}
    return 0 if "measured" in states and "wrong" not in states else 1
