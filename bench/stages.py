"""What the profilers' times are gathered into: the stages of a step, per rank and of the slowest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

# Range of fused_lw.nvtx -> stage
_RANGES = {"fused_lw/pack": "copy-in", "fused_lw/ns": "newton-schulz", "fused_lw/unpack": "copy-out"}
STEP = "fused_lw/step"
# Our kernels -> what of Newton-Schulz they are. "update" ends the iteration and is the copy-out of its matrices too.
_KERNELS = {
    "symmetric_kernel": "symmetric products",
    "general_kernel": "general products",
    "update_kernel": "last product with copy-out",
    "reduce_kernel": "partial sums",
    "onchip_kernel": "on chip",
}
# gloo reduce-scatters by an all-reduce.
COLLECTIVES = ("reduce-scatter", "all-reduce", "all-gather")
MAX_RANK_COLUMNS = 8
# Parts of a stage below this share of the step are summed up in one line.
SMALL = 0.01


class RankProfile(NamedTuple):
    """Milliseconds a step of each stage of one rank, in the order of a step; "a/b" is a part of "a"."""

    rank: int
    steps: int
    stages: dict[str, float]


def stage_of_range(name: str) -> str | None:
    """The stage of an NVTX range, "step" for the whole; None for one that is not ours."""
    # nsys writes "domain:name", and nothing before the colon for the default domain.
    name = name.rsplit(":", 1)[-1]
    if name == STEP:
        return "step"
    return next((stage for of, stage in _RANGES.items() if name == of or name.startswith(of + "/")), None)


def stage_of_kernel(name: str) -> str | None:
    """The stage of a kernel: a part of Newton-Schulz, a collective, or None for one that is neither.

    NCCL's kernels are called like ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL, gloo's ranges like
    gloo:_allgather_base.
    """
    base = re.split(r"[(<]", name, maxsplit=1)[0].strip()
    if base in _KERNELS:
        return f"newton-schulz/{_KERNELS[base]}"
    word = name.lower().replace("_", "")
    if word.startswith(("nccl", "gloo:")):
        return next((stage for stage in COLLECTIVES if stage.replace("-", "") in word), None)
    return None


def gather(rank: int, steps: int, milliseconds: Iterable[tuple[str, float]]) -> RankProfile:
    """Sum (stage, milliseconds of all steps) up to a profile.

    Gaps are the part of the steps in which none of copy-in, Newton-Schulz and copy-out ran. Collectives run beside
    the step and during the backward pass, and are not part of it.
    """
    sums: dict[str, float] = {}
    for stage, value in milliseconds:
        sums[stage] = sums.get(stage, 0.0) + value / steps
    inside = sum(sums.get(stage, 0.0) for stage in _RANGES.values())
    ordered = {}
    for stage in _RANGES.values():
        ordered[stage] = sums.get(stage, 0.0)
        parts = {name: value for name, value in sums.items() if name.startswith(f"{stage}/")}
        large = {name: value for name, value in parts.items() if value >= SMALL * sums["step"]}
        ordered |= dict(sorted(large.items(), key=lambda item: -item[1]))
        if len(parts) > len(large):
            ordered[f"{stage}/other"] = sum(parts.values()) - sum(large.values())
    ordered["gaps"] = max(0.0, sums["step"] - inside)
    ordered["step"] = sums["step"]
    ordered |= {stage: sums.get(stage, 0.0) for stage in COLLECTIVES}
    return RankProfile(rank, steps, ordered)


def slowest(profiles: Sequence[RankProfile]) -> RankProfile:
    """The rank whose step takes longest: all others wait for it."""
    return max(profiles, key=lambda profile: profile.stages["step"])


def table(profiles: Sequence[RankProfile]) -> Table:
    """Stages down; ranks across, and the slowest again with each stage's share of its step."""
    profiles = sorted(profiles)
    worst = slowest(profiles)
    shown = profiles if 1 < len(profiles) <= MAX_RANK_COLUMNS else []
    ranks = f", {len(profiles)} ranks" if len(profiles) > 1 else ""
    found = Table(title=f"milliseconds a step, mean of {worst.steps} steps{ranks}")
    found.add_column("stage", no_wrap=True)
    for profile in shown:
        found.add_column(f"rank {profile.rank}", justify="right")
    found.add_column(f"slowest: rank {worst.rank}" if ranks else "ms", justify="right")
    found.add_column("of its step", justify="right")
    for stage in _all_stages(profile.stages for profile in profiles):
        values = [profile.stages.get(stage) for profile in (*shown, worst)]
        share = "" if stage in COLLECTIVES or values[-1] is None else f"{values[-1] / worst.stages['step']:.0%}"
        name = "  " + stage.split("/", 1)[1] if "/" in stage else stage
        # A part that is too small on one rank is in the "other" of that one.
        found.add_row(name, *("" if value is None else f"{value:.3f}" for value in values), share)
    return found


def _all_stages(profiles: Iterable[Mapping[str, float]]) -> list[str]:
    """Every stage that some rank has, parts after their whole."""
    seen: dict[str, None] = {}
    for stages in profiles:
        seen |= dict.fromkeys(stages)
    found = []
    for stage in (name for name in seen if "/" not in name):
        parts = [name for name in seen if name.startswith(f"{stage}/")]
        found += [stage, *sorted(parts, key=lambda name: name.endswith("/other"))]
    return found
