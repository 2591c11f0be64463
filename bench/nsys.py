"""Nsight Systems: the command that records, the reports that are read, and their CSV, parsed by header."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fused_lw.bench import stages
from fused_lw.bench.stages import RankProfile

REPORTS = ("nvtx_gpu_proj_sum", "cuda_gpu_kern_sum")
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "μs": 1e-3, "usec": 1e-3, "ms": 1.0, "msec": 1.0, "s": 1e3, "sec": 1e3}
_HEADING = re.compile(r"(?P<name>.*?)\s*(?:[(\[](?P<unit>[^)\]]*)[)\]])?\s*")
_RANK_FILE = re.compile(r"rank(\d+)\.nsys-rep")


class Line(NamedTuple):
    """A line of a summary: the range or kernel, all its time, and how often it occurred."""

    name: str
    milliseconds: float
    instances: int


# report -> headings (without their unit) of name, total time and count
_HEADINGS: dict[str, tuple[str, str, str]] = {
    "nvtx_gpu_proj_sum": ("Range", "Total Proj Time", "Range Instances"),
    "cuda_gpu_kern_sum": ("Name", "Total Time", "Instances"),
}


def find_nsys() -> str:
    """Where nsys is; FileNotFoundError that says how to get it, or how to do without."""
    found = shutil.which("nsys")
    if found is None:
        raise FileNotFoundError(
            "nsys is not on PATH. It comes with the CUDA toolkit (nsight-systems-cli in NVIDIA's package repository; "
            "look into /opt/nvidia/nsight-systems/*/bin), or use --tool torch"
        )
    return found


def rank_variable(environment: Mapping[str, str]) -> str | None:
    """The variable that tells the ranks apart, torchrun's or Slurm's; None where there is one process."""
    return next((name for name in ("RANK", "SLURM_PROCID") if name in environment), None)


def record_command(nsys: str, folder: Path, variable: str | None, command: Sequence[str]) -> list[str]:
    """`nsys profile` around a command that runs fused_lw: one report per rank, recorded between the profiler calls."""
    rank = "0" if variable is None else f"%q{{{variable}}}"
    return [
        nsys,
        "profile",
        "-t",
        "cuda,nvtx",
        "-s",
        "none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
        "-o",
        f"{folder}/rank{rank}",
        *command,
    ]


def stats_command(nsys: str, report: str, file: Path) -> list[str]:
    return [nsys, "stats", "--report", report, "--format", "csv", "--output", "-", "--force-export=true", str(file)]


def read(folder: Path) -> list[RankProfile]:
    """Run `nsys stats` on every rank's report in a folder; ValueError names a report that holds no step of ours."""
    files = sorted(file for file in folder.iterdir() if _RANK_FILE.fullmatch(file.name))
    if not files:
        raise ValueError(f"no rank*.nsys-rep in {folder}: did the command take enough steps to reach the first one?")
    nsys = find_nsys()
    profiles = []
    for file in files:
        texts = {}
        for report in REPORTS:
            done = subprocess.run(stats_command(nsys, report, file), capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"nsys stats failed on {file}: {(done.stderr or done.stdout).strip()}")
            texts[report] = done.stdout
            file.with_name(f"{file.stem}_{report}.csv").write_text(done.stdout, encoding="utf-8")
        match = _RANK_FILE.fullmatch(file.name)
        assert match is not None
        profiles.append(profile(int(match[1]), texts, str(file)))
    return profiles


def profile(rank: int, texts: Mapping[str, str], where: str) -> RankProfile:
    """A rank's profile from the CSV text of the two reports. `where` is for messages."""
    ranges = list(parse(texts.get("nvtx_gpu_proj_sum", ""), "nvtx_gpu_proj_sum", where))
    kernels = list(parse(texts.get("cuda_gpu_kern_sum", ""), "cuda_gpu_kern_sum", where))
    steps = sum(line.instances for line in ranges if stages.stage_of_range(line.name) == "step")
    if not steps:
        raise ValueError(
            f"{where} holds no fused_lw/step range: record with fused-lw profile, or set FUSED_LW_PROFILE=nsys, "
            "and let the command take more steps than FUSED_LW_PROFILE_STEPS asks for"
        )
    times = [(stages.stage_of_range(line.name), line.milliseconds) for line in ranges]
    times += [(stages.stage_of_kernel(line.name), line.milliseconds) for line in kernels]
    return stages.gather(rank, steps, [(stage, value) for stage, value in times if stage is not None])


def parse(text: str, report: str, where: str) -> Iterator[Line]:
    """The lines of a report's CSV, whatever its columns' order and units and whatever nsys prints around it.

    Raises ValueError if the report is not in the text, saying how to get it, or if a number is none.
    """
    name, total, count = _HEADINGS[report]
    rows = csv.reader(text.splitlines())
    columns: dict[str, tuple[int, str]] = {}
    for row in rows:
        columns = _headings(row)
        if columns.keys() >= {name, total, count}:
            break
    else:
        said = next(
            (line.strip() for line in text.splitlines() if "SKIPPED" in line or "rror" in line), "no table in it"
        )
        raise ValueError(
            f"{where}: the report {report} is missing ({said}). Get it with\n"
            f"  {' '.join(stats_command('nsys', report, Path(where)))}\n"
            "from a recording made with -t cuda,nvtx (fused-lw profile does both)"
        )
    unit = columns[total][1]
    if unit not in _MILLISECONDS:
        raise ValueError(f"{where}: {report} has {total!r} in {unit!r}, which is no unit of time that is known here")
    for row in rows:
        # An empty line, or what nsys prints about the next report, ends the table.
        if len(row) <= max(position for position, _ in columns.values()):
            break
        try:
            milliseconds = _number(row[columns[total][0]]) * _MILLISECONDS[unit]
            instances = int(_number(row[columns[count][0]]))
        except ValueError as error:
            raise ValueError(f"{where}: {report} has a line that is none: {row}") from error
        yield Line(row[columns[name][0]].strip(), milliseconds, instances)


def _headings(row: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Heading without unit -> its position and its unit, nanoseconds where none is written."""
    found = {}
    for position, text in enumerate(row):
        match = _HEADING.fullmatch(text.strip())
        if match is not None:
            found[match["name"]] = position, (match["unit"] or "ns").strip()
    return found


def _number(text: str) -> float:
    return float(text.strip().replace(",", ""))


def environment(tool: str, first: int, count: int, folder: Path) -> dict[str, str]:
    """This process's environment with what `fused_lw.nvtx` reads."""
    return os.environ | {
        "FUSED_LW_PROFILE": tool,
        "FUSED_LW_PROFILE_STEPS": f"{first}:{count}",
        "FUSED_LW_PROFILE_OUT": str(folder),
    }
