"""Two result files against each other: what became slower by more than the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fused_lw.bench import tables
from fused_lw.bench.environment import Row

# Least change of the median that is called one.
THRESHOLD = 1.05
# What has to be equal for two times to be comparable: what was measured, by whom, on what.
_KEY = (
    "benchmark",
    "stage",
    "model",
    "scale_down",
    "shape",
    "batch",
    "mode",
    "provider",
    "dtype",
    "ranks",
    "rank",
    "bucket_size",
    "device",
    "threads",
    "bf16_units",
)

Verdict = Literal["slower", "faster", "same", "not measured any more"]


class Change(NamedTuple):
    """What became of one measurement; `ratio` is new over old median, None where there is no new one."""

    what: str
    provider: str
    ratio: float | None
    verdict: Verdict


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """Every measurement of `old`, in its order. Of several rows of one measurement the last one counts.

    Slower means that the medians differ by more than 5% and that the intervals from p20 to p80 do not touch: a
    re-run of the same code on a noisy machine is "same". ValueError if nothing can be compared.
    """
    before, after = _measured(old), _measured(new)
    if not before.keys() & after.keys():
        raise ValueError("the files have no measurement in common: same benchmark, provider, shape and device")
    changes = []
    for key, row in before.items():
        found = after.get(key)
        ratio = None if found is None else found["p50_ms"] / row["p50_ms"]
        verdict = "not measured any more" if found is None else _verdict(row, found)
        changes.append(Change(tables.subject(row), row["provider"], ratio, verdict))
    return changes


def _verdict(old: Row, new: Row) -> Verdict:
    if new["p50_ms"] > THRESHOLD * old["p50_ms"] and new["p20_ms"] > old["p80_ms"]:
        return "slower"
    if old["p50_ms"] > THRESHOLD * new["p50_ms"] and old["p20_ms"] > new["p80_ms"]:
        return "faster"
    return "same"


def _measured(rows: Sequence[Row]) -> dict[str, Row]:
    return {repr([row.get(name) for name in _KEY]): row for row in rows if row["status"] == "measured"}
