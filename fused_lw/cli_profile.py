"""`fused-lw profile`: record steps of a command with Nsight Systems or torch.profiler, and print where they went."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from fused_lw.bench import environment, nsys, stages, trace
from fused_lw.bench.stages import RankProfile
from fused_lw.nvtx import DEFAULT_STEPS, TOOLS

EPILOG = """examples:
  fused-lw profile -- python train.py                                one process, then the table
  fused-lw profile --bench step --model llama3-8b --device cuda      our step over a model's matrices
  torchrun --nproc-per-node 4 --no-python fused-lw profile --out prof -- python train.py
  srun --ntasks-per-node 4 fused-lw profile --out prof -- python train.py
  fused-lw profile --table prof                                      when all ranks are done

The command has to step a fused_lw optimizer, at least as often as the steps asked for.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    first, count = DEFAULT_STEPS
    parser.add_argument("--tool", choices=TOOLS, help="default: nsys on a machine with a GPU, torch elsewhere")
    parser.add_argument("--first", type=int, default=first, metavar="N", help=f"first step recorded (default: {first})")
    parser.add_argument("--steps", type=int, default=count, metavar="N", help=f"steps recorded (default: {count})")
    parser.add_argument("--out", type=Path, default=Path("profile"), metavar="FOLDER", help="default: profile")
    environment.add_json_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command, and run nothing")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--table", type=Path, metavar="FOLDER", help="run nothing: the table of what ranks left there")
    what.add_argument("--bench", choices=("step",), help="profile our step over a model's matrices")
    parser.add_argument("--model", default="gpt2-124m", metavar="NAME", help="of --bench (default: gpt2-124m)")
    parser.add_argument("--scale-down", type=int, default=1, metavar="K", help="of --bench: divide every dimension")
    parser.add_argument("--device", default=environment.default_device(), help="of --bench (default: cuda if there)")
    parser.add_argument("profiled", nargs="*", metavar="COMMAND", help="after --: what to run, and its arguments")


def run(args: argparse.Namespace) -> int:
    tool = args.tool or ("nsys" if torch.cuda.is_available() else "torch")
    try:
        environment.check_json(args.json)
        if args.table is not None:
            return show(read(args.table), args.json)
        command = command_of(args)
        variable = nsys.rank_variable(os.environ)
        if tool == "nsys":
            found = shutil.which("nsys") or "nsys" if args.dry_run else nsys.find_nsys()
            command = nsys.record_command(found, args.out, variable, command)
        if args.dry_run:
            print(shlex.join(command))
            return 0
        args.out.mkdir(parents=True, exist_ok=True)
        status = subprocess.run(
            command, env=nsys.environment(tool, args.first, args.steps, args.out.resolve())
        ).returncode
        if status:
            print(f"fused-lw profile: the command failed with exit status {status}", file=sys.stderr)
            return status
        if variable is not None:
            print(f"rank {os.environ[variable]} recorded; when all are: fused-lw profile --table {args.out}")
            return 0
        return show(read(args.out, tool), args.json)
    except (ValueError, OSError) as error:
        print(f"fused-lw profile: {error}", file=sys.stderr)
        return 2


def command_of(args: argparse.Namespace) -> list[str]:
    """What to run. ValueError if nothing, or nothing that makes sense, was asked for."""
    if args.first < 1 or args.steps < 1:
        raise ValueError(f"--first and --steps must be at least 1, got {args.first} and {args.steps}")
    command: list[str] = args.profiled
    if args.bench is None:
        if not command:
            raise ValueError("nothing to profile: give a command after --, or --bench step, or --table FOLDER")
        return command
    if command:
        raise ValueError(f"--bench and a command exclude each other, got {shlex.join(command)!r}")
    # Two steps of the gate come before those that are timed.
    rounds = str(max(1, args.first + args.steps - 2))
    step = ["bench", "step", "--providers", "fused_lw", "--rounds", rounds]
    where = ["--model", args.model, "--scale-down", str(args.scale_down), "--device", args.device]
    return [sys.executable, "-m", "fused_lw.cli", *step, *where]


def read(folder: Path, tool: str | None = None) -> list[RankProfile]:
    """What the ranks left in a folder; by the kind of file that is there if no tool is named."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    if tool is None:
        tool = "torch" if any(folder.glob("rank*.json")) else "nsys"
    return nsys.read(folder) if tool == "nsys" else trace.read(folder)


def show(profiles: Sequence[RankProfile], json: Path | None) -> int:
    """Print the table, and add its numbers to a result file if one is named."""
    Console(highlight=False).print(stages.table(profiles))
    if json is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        environment.append(json, [environment.describe(device) | row for row in rows(profiles)])
    return 0


def rows(profiles: Sequence[RankProfile]) -> list[environment.Row]:
    """A row per rank and stage; all quantiles are the mean over the recorded steps."""
    return [
        {
            "benchmark": "profile",
            "provider": "fused_lw",
            "stage": stage,
            "rank": profile.rank,
            "batch": profile.steps,
            "model": None,
            "accuracy": "any",
            "mode": "eager",
            "status": "measured",
            **dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), value),
        }
        for profile in profiles
        for stage, value in profile.stages.items()
    ]
