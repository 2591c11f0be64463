"""A picture of layouts: shards by buckets, coloured by shape, over the cost of each rank."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fused_lw.layout import Layout

# Shapes with a colour of their own, by elements; the others share grey.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#99ddff", "#aaaa00")
OTHERS = "#999999"
PADDING = "#f2f2f2"


def require_matplotlib() -> None:
    """Raise a ModuleNotFoundError that says what to install where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("--plot needs matplotlib: install fused-lw[plot]")


def draw(layouts: Sequence[Layout], title: str, path: Path) -> None:
    """Write a PNG with one column a layout. Raises ModuleNotFoundError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    elements: Counter[tuple[int, ...]] = Counter()
    for spec in layouts[0].params:
        elements[spec.full_shape] += spec.numel
    colours = dict(zip((shape for shape, _ in elements.most_common(len(COLOURS))), COLOURS, strict=False))

    figure = Figure(figsize=(1.6 + 5.2 * len(layouts), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes = figure.subplots(2, len(layouts), sharey="row", squeeze=False, height_ratios=(1, 2.6))
    for column, layout in enumerate(layouts):
        cost, shards = axes[0, column], axes[1, column]
        bound = max(1, layout.lower_bound)
        cost.bar(range(layout.dp_size), [c / bound for c in layout.shard_costs], width=1.0, color="#4477aa")
        cost.axhline(1, color="#bb5566", linewidth=1)
        cost.set_title(
            f"{layout.policy}: slowest rank {layout.over_bound:.1%} over the bound, padding {layout.padding:.1%}",
            fontsize=9,
        )
        shards.set_xlim(-0.5, layout.dp_size - 0.5)
        cost.set_xlim(-0.5, layout.dp_size - 0.5)

        bottoms = [0]
        for start, end, _ in layout.buckets:
            bottoms.append(bottoms[-1] + (end - start) // layout.dp_size)
        boxes, faces = [], []
        for spec, slot in zip(layout.params, layout.slots, strict=True):
            bucket = layout.buckets[slot.bucket]
            shard_start = bucket.start + slot.shard * (bucket.end - bucket.start) // layout.dp_size
            low = (bottoms[slot.bucket] + slot.start - shard_start) / 1e6
            high = low + spec.numel / 1e6
            left, right = slot.shard - 0.5, slot.shard + 0.5
            boxes.append([(left, low), (right, low), (right, high), (left, high)])
            faces.append(colours.get(spec.full_shape, OTHERS))
        # Lines between matrices help the eye only while there are few of them.
        width = 0.4 if len(boxes) <= 2000 else 0.0
        shards.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="white", linewidths=width))
        shards.axhspan(0, bottoms[-1] / 1e6, color=PADDING, zorder=0)
        for bottom in bottoms[1:]:
            shards.axhline(bottom / 1e6, color="black", linewidth=0.9 if len(bottoms) < 24 else 0.3)
        shards.set_xlabel(f"shard (rank), {len(layout.buckets)} bucket{'s' if len(layout.buckets) != 1 else ''}")
    axes[0, 0].set_ylabel("cost / lower bound")
    axes[1, 0].set_ylabel("offset in the shard, millions of elements")
    tallest = max(layout.buffer_numel // layout.dp_size for layout in layouts)
    axes[1, 0].set_ylim(0, max(1, tallest) * 1.01 / 1e6)

    handles = [Patch(color=colour, label=" × ".join(map(str, shape))) for shape, colour in colours.items()]
    if len(elements) > len(colours):
        handles.append(Patch(color=OTHERS, label="other shapes"))
    handles.append(Patch(facecolor=PADDING, edgecolor="#cccccc", label="padding"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, format="png")
