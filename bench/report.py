"""`fused-lw bench report`: result files as tables, Markdown and pictures, and against older ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fused_lw.bench import environment, plots, regression, tables
from fused_lw.bench.environment import Row
from fused_lw.bench.regression import Change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="results of the other benchmarks")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the tables as Markdown")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures (PNG) into this folder")
    parser.add_argument(
        "--against", nargs="+", type=Path, metavar="OLD.jsonl", help="exit with 1 if anything became slower than there"
    )


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    try:
        rows = environment.read(args.files)
        for group in by_machine(rows):
            tables.print_rows(console, group)
        if args.markdown is not None:
            args.markdown.write_text(markdown(rows), encoding="utf-8")
            console.print(f"tables written to {args.markdown}")
        if args.plots is not None:
            machines = by_machine(rows)
            for n, group in enumerate(machines):
                folder = args.plots if len(machines) == 1 else args.plots / str(n + 1)
                for path in plots.draw(group, folder):
                    console.print(f"picture written to {path}")
        if args.against is None:
            return 0
        changes = regression.compare(environment.read(args.against), rows)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"fused-lw bench report: {error}", file=sys.stderr)
        return 2
    return print_changes(console, changes)


def by_machine(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one machine and setting together, in the order in which these appear."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((tables.machine(row), row["torch"]), []).append(row)
    return list(groups.values())


def print_changes(console: Console, changes: Sequence[Change]) -> int:
    """The changes beyond noise as a table; 1 if something became slower or is not measured any more, else 0."""
    counts = {verdict: sum(c.verdict == verdict for c in changes) for verdict in ("slower", "faster", "same")}
    table = Table(title="against the older results: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    for heading in ("what", "provider", "new / old", "verdict"):
        table.add_column(heading)
    for change in changes:
        if change.verdict != "same":
            ratio = "" if change.ratio is None else f"{change.ratio:.2f}"
            table.add_row(change.what, change.provider, ratio, change.verdict)
    console.print(table)
    return int(any(change.verdict in ("slower", "not measured any more") for change in changes))


def markdown(rows: Sequence[Row]) -> str:
    """The same tables as Markdown, one section per machine."""
    parts = []
    for group in by_machine(rows):
        parts.append(f"## {tables.about(group)}\n")
        shown = [row for row in tables.ordered(group) if row["status"] != "unavailable"]
        for title, of_title in groupby(shown, key=tables.heading):
            header, *lines = tables.cells(list(of_title))
            parts.append(f"### {title}\n")
            parts += ["| " + " | ".join(header) + " |", "|-" + "|-:" * (len(header) - 1) + "|"]
            parts += ["| " + " | ".join(line) + " |" for line in lines]
            parts.append("")
        said = tables.verdicts(group)
        parts += [f"{tables.COMPARED[0].upper()}{tables.COMPARED[1:]}\n"] if said else []
        parts += [f"- {line}" for line in said]
        parts.append("")
    return "\n".join(parts)
