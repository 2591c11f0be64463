"""Pictures of results: time against shape, fraction of the roofline, and what a step consists of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fused_lw.bench import tables
from fused_lw.bench.environment import Row
from fused_lw.bench.stages import COLLECTIVES

# Colours that colour-blind readers tell apart (Okabe and Ito), ours first.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the pictures that these rows suffice for, as PNG; the files written. Needs matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"plots need matplotlib: pip install 'fused-lw[bench]' ({error})") from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if row["status"] == "measured"]
    ns = [row for row in measured if row["benchmark"] == "ns"]
    written = []
    if ns:
        written.append(_by_shape(ns, "p50_ms", "milliseconds (median, p20 to p80)", folder / "times.png", log=True))
    with_floor = [row for row in ns if row["roofline_fraction"] is not None]
    if with_floor:
        label = "fraction of the roofline"
        written.append(_by_shape(with_floor, "roofline_fraction", label, folder / "roofline.png"))
    steps = [row for row in measured if row["benchmark"] == "step"]
    if steps:
        written.append(_steps(steps, folder / "steps.png"))
    profiles = [row for row in measured if row["benchmark"] == "profile"]
    if profiles:
        written.append(_breakdown(profiles, folder / "breakdown.png"))
    return written


def _by_shape(rows: Sequence[Row], key: str, label: str, path: Path, log: bool = False) -> Path:
    """One panel per accuracy class: shapes side by side, one mark per provider."""
    import matplotlib.pyplot as plt

    classes = sorted({row["accuracy"] for row in rows})
    shapes = list(dict.fromkeys(_shape(row) for row in tables.ordered(rows)))
    figure, axes = plt.subplots(
        len(classes),
        1,
        figsize=(max(7.0, 1.5 + 0.9 * len(shapes)), 1.0 + 3.2 * len(classes)),
        squeeze=False,
        layout="constrained",
    )
    for axis, accuracy in zip(axes[:, 0], classes, strict=True):
        of_class = [row for row in rows if row["accuracy"] == accuracy]
        providers = _ours_first(row["provider"] for row in of_class)
        for n, provider in enumerate(providers):
            found = [row for row in of_class if row["provider"] == provider]
            x = [shapes.index(_shape(row)) + 0.7 * ((n + 0.5) / len(providers) - 0.5) for row in found]
            y = [row[key] for row in found]
            spread = None
            if key == "p50_ms":
                spread = [[r["p50_ms"] - r["p20_ms"] for r in found], [r["p80_ms"] - r["p50_ms"] for r in found]]
            colour = _COLOURS[n % len(_COLOURS)]
            axis.errorbar(x, y, yerr=spread, fmt="o", ms=5, capsize=2, color=colour, label=provider)
        axis.set_xticks(
            range(len(shapes)),
            shapes,
            rotation=30 if len(shapes) > 4 else 0,
            ha="right" if len(shapes) > 4 else "center",
        )
        axis.set_xlim(-0.5, len(shapes) - 0.5)
        for boundary in range(1, len(shapes)):
            axis.axvline(boundary - 0.5, color="0.85", lw=0.8)
        if log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.set_title(f"Newton-Schulz, {accuracy} class", loc="left")
        axis.grid(axis="y", color="0.9")
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _save(figure, rows, path)


def _steps(rows: Sequence[Row], path: Path) -> Path:
    """Bars: one step of each optimizer; a panel per model, accuracy classes one below the other."""
    import matplotlib.pyplot as plt

    panels: dict[str, list[Row]] = {}
    for row in tables.ordered(rows):
        panels.setdefault(tables.subject(row).removeprefix("step "), []).append(row)
    sizes = [len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 1.0 + 0.9 * len(panels) + 0.34 * sum(sizes)),
        height_ratios=sizes,
        squeeze=False,
        layout="constrained",
    )
    for axis, (subject, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for n, row in enumerate(reversed(panel)):
            ours = row["provider"].startswith("fused_lw")
            spread = [[row["p50_ms"] - row["p20_ms"]], [row["p80_ms"] - row["p50_ms"]]]
            axis.barh(n, row["p50_ms"], xerr=spread, capsize=2, color=_COLOURS[0] if ours else "#7FB2D5")
        names = [f"{row['provider']}  ({row['accuracy']})" for row in reversed(panel)]
        axis.set_yticks(range(len(panel)), names, fontsize=8)
        axis.set_title(subject, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("milliseconds a step (median, p20 to p80)")
    return _save(figure, rows, path)


def _breakdown(rows: Sequence[Row], path: Path) -> Path:
    """Stacked bars: the stages of a step, one bar per rank; collectives run beside it and are left out."""
    import matplotlib.pyplot as plt

    ranks = sorted({row["rank"] for row in rows})
    outside = ("step", *COLLECTIVES)
    stages = [s for s in dict.fromkeys(row["stage"] for row in rows) if "/" not in s and s not in outside]
    figure, axis = plt.subplots(figsize=(9, 1.8 + 0.4 * len(ranks)), layout="constrained")
    left = [0.0] * len(ranks)
    for n, stage in enumerate(stages):
        width = [sum(row["p50_ms"] for row in rows if (row["rank"], row["stage"]) == (r, stage)) for r in ranks]
        axis.barh(range(len(ranks)), width, left=left, color=_COLOURS[n % len(_COLOURS)], label=stage)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.set_xlabel("milliseconds a step")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    return _save(figure, rows, path)


def _save(figure: Any, rows: Sequence[Row], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.suptitle(tables.about(rows), fontsize=8, x=0.01, ha="left")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path


def _shape(row: Row) -> str:
    graph = "\ngraph" if row["mode"] == "graph" else ""
    return "{}x{}*{}{}".format(*row["shape"], row["batch"], graph)


def _ours_first(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=lambda name: (not name.startswith("fused_lw"), name))
