"""Named ranges around the parts of a step, for Nsight Systems and torch.profiler. Off unless asked for by environment.

    FUSED_LW_PROFILE        nsys, torch, or unset: off
    FUSED_LW_PROFILE_STEPS  FIRST:COUNT, which steps to record (default 3:5, after warm-up)
    FUSED_LW_PROFILE_OUT    folder for torch's traces, one file per rank (default .)

`fused-lw profile` sets them for a command of any kind. "nsys" pushes NVTX ranges and brackets the steps by
cudaProfilerStart and cudaProfilerStop, which `nsys profile --capture-range=cudaProfilerApi` waits for; "torch" records
the same steps with torch.profiler. What is recorded starts when the step before the first one ends, so that it holds
whole iterations with their backward passes.

Ranges: fused_lw/step, and in it fused_lw/pack, fused_lw/ns/<algorithms>, fused_lw/unpack.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = ("FUSED_LW_PROFILE", "FUSED_LW_PROFILE_STEPS", "FUSED_LW_PROFILE_OUT")
DEFAULT_STEPS = (3, 5)  # first, count
TOOLS = ("nsys", "torch")

_OFF: AbstractContextManager[None] = nullcontext()


class Recorder:
    """Counts steps, opens ranges, and starts and stops the tool around the steps that were asked for."""

    def __init__(self, tool: str, first: int, count: int, folder: Path) -> None:
        self.tool = tool
        self.first = first
        self.last = first + count - 1
        self.folder = folder
        self._done = 0
        self._recording = False
        self._profiler: Any = None

    def span(self, name: str) -> AbstractContextManager[Any]:
        range_of: Any = torch.cuda.nvtx.range if self.tool == "nsys" else torch.profiler.record_function
        opened: AbstractContextManager[Any] = range_of(name)
        return opened

    @contextmanager
    def step(self) -> Iterator[None]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # Nothing runs while a CUDA graph is captured, and nothing may be waited for.
            yield
            return
        if self._done + 1 == self.first == 1:
            self._start()
        with self.span("fused_lw/step"):
            yield
        self._done += 1
        if self._done == self.first - 1:
            self._start()
        elif self._done == self.last:
            self.finish()

    def _start(self) -> None:
        self._recording = True
        # A run may end before the last step does.
        atexit.register(self.finish)
        if self.tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def finish(self) -> None:
        """End the recording if there is one, and switch the ranges off."""
        global _recorder
        if not self._recording:
            return
        self._recording = False
        _recorder = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.tool == "nsys":
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        self._profiler.export_chrome_trace(str(self.folder / f"rank{rank}.json"))


def from_environment(environment: Mapping[str, str]) -> Recorder | None:
    """The recorder that the environment asks for. ValueError for a value that means nothing."""
    tool = environment.get("FUSED_LW_PROFILE", "")
    if not tool:
        return None
    if tool not in TOOLS:
        raise ValueError(f"FUSED_LW_PROFILE must be one of {', '.join(TOOLS)}, or unset; got {tool!r}")
    if tool == "nsys" and torch.version.cuda is None:
        raise ValueError("FUSED_LW_PROFILE=nsys needs a CUDA build of torch; use FUSED_LW_PROFILE=torch")
    text = environment.get("FUSED_LW_PROFILE_STEPS", "{}:{}".format(*DEFAULT_STEPS))
    first, _, count = text.partition(":")
    if not (first.isdecimal() and count.isdecimal() and int(first) and int(count)):
        raise ValueError(f"FUSED_LW_PROFILE_STEPS must be FIRST:COUNT, both at least 1; got {text!r}")
    return Recorder(tool, int(first), int(count), Path(environment.get("FUSED_LW_PROFILE_OUT", ".")))


def span(name: str) -> AbstractContextManager[Any]:
    """A range of that name; when nothing records, always the same empty context."""
    return _OFF if _recorder is None else _recorder.span(name)


def step() -> AbstractContextManager[Any]:
    """The range of a whole step; recording starts and ends between them."""
    return _OFF if _recorder is None else _recorder.step()


_recorder = from_environment(os.environ)
