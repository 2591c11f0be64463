"""Rows as tables for a terminal, and what they say in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fused_lw.bench.environment import Row

# Up to this much over the best peer a time counts as equal.
TOLERANCE = 1.05


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A table for each thing measured, then who was left out and why, then ours against the best peers."""
    console.print(about(rows))
    shown = [row for row in ordered(rows) if row["status"] != "unavailable"]
    for (name, accuracy), group in groupby(shown, key=lambda row: (subject(row), row["accuracy"])):
        console.print(_table(f"{name}, {accuracy} class", list(group)))
    for reason in dict.fromkeys(f"{r['provider']}: {r['reason']}" for r in rows if r["status"] == "unavailable"):
        console.print(f"not measured: {reason}")
    for line in verdicts(rows):
        console.print(line)


def about(rows: Sequence[Row]) -> str:
    """The machine and the code of these rows."""
    first = rows[0]
    threads = f", {first['threads']} threads" if "threads" in first else f", driver {first['driver']}"
    return f"{first['device']}{threads}, torch {first['torch']}, revision {first['revision']}, {first['date']}"


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


def _table(name: str, rows: Sequence[Row]) -> Table:
    """Only the columns that these rows have."""
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
    columns = {h: c for h, c in _COLUMNS.items() if any(row.get(c[0]) is not None for row in rows)}
    table.add_column("provider", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, form in columns.values()]
        table.add_row(row["provider"], *cells)
        if row["status"] == "wrong":
            table.caption = f"[red]{row['provider']} is wrong: {row['reason']}"
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
