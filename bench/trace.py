"""torch.profiler's traces, read into the same stages as Nsight Systems' reports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fused_lw.bench import stages
from fused_lw.bench.stages import RankProfile

_RANK_FILE = re.compile(r"rank(\d+)\.json")

Event = dict[str, Any]


def read(folder: Path) -> list[RankProfile]:
    """The profile of every rank's trace in a folder."""
    files = [(int(match[1]), file) for file in folder.iterdir() if (match := _RANK_FILE.fullmatch(file.name))]
    if not files:
        raise ValueError(f"no rank*.json in {folder}: did the command take enough steps to reach the first one?")
    return [profile(rank, json.loads(file.read_text()), str(file)) for rank, file in sorted(files)]


def profile(rank: int, trace: dict[str, Any], where: str) -> RankProfile:
    """A rank's profile from a Chrome trace; times on a GPU where the trace has any, on the CPU otherwise."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_cpu = [event for event in events if event.get("cat") == "user_annotation"]
    on_gpu = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    steps = sum(event["name"] == stages.STEP for event in on_cpu)
    if not steps:
        raise ValueError(f"{where} holds no fused_lw/step range: set FUSED_LW_PROFILE=torch and take more steps")
    annotations = on_gpu or on_cpu
    times: list[tuple[str | None, float]] = [(stages.stage_of_range(e["name"]), _milliseconds(e)) for e in annotations]
    if kernels:
        times += [(stages.stage_of_kernel(event["name"]), _milliseconds(event)) for event in kernels]
    else:
        times += [(stages.stage_of_kernel(e["name"]), _milliseconds(e)) for e in on_cpu if e["name"] != stages.STEP]
        times += _operators(events, on_cpu)
    return stages.gather(rank, steps, [(stage, value) for stage, value in times if stage is not None])


def _operators(events: Sequence[Event], annotations: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """On a CPU, the operators that Newton-Schulz calls, without those that these call in turn."""
    spans = [event for event in annotations if stages.stage_of_range(event["name"]) == "newton-schulz"]
    called = sorted(
        (event for event in events if event.get("cat") == "cpu_op"), key=lambda event: (event["ts"], -event["dur"])
    )
    for span in spans:
        end_of_last = span["ts"]
        for event in called:
            inside = end_of_last <= event["ts"] < span["ts"] + span["dur"]
            if inside and event["tid"] == span["tid"]:
                end_of_last = event["ts"] + event["dur"]
                yield f"newton-schulz/{event['name']}", _milliseconds(event)


def _milliseconds(event: Event) -> float:
    return float(event["dur"]) / 1e3
